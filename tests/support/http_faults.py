"""Clients that misbehave: bodies that are not what they should be, and connections that end."""

import contextlib
import copy
import json
import random
import socket
from typing import Any

import httpx2

from support.serving import Running

PROMPT = "assignments mod 97 : x227 = 31 ; x83 = x64 - x227 ; x64 = 60 ; find x83 <think>"
VALID: tuple[dict[str, Any], ...] = (
    {"prompt": PROMPT, "max_tokens": 3, "n": 2, "logprobs": 1, "stop": ["x"], "seed": 1},
    {"prompt": [2, 3, 4], "max_tokens": 2, "echo": True, "temperature": 0, "stream": False},
    {"prompt": PROMPT, "max_tokens": 3, "stream": True, "sparrow": {"budget": 48}},
    {"prompt": PROMPT, "max_tokens": 2, "sparrow": {"decoding": "dense", "min_tokens": 1}},
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "find x83"}], "max_tokens": 2}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 10**9, 2**70, 1.5, -0.0, 1e308, "", "x", "\x00", "é" * 50),
    *([], {}, [[]], [None], [[1, "a"]], {"a": {"b": []}}, ["x"] * 100, "9" * 5000, [-1], [10**8]),
)
ANSWERED = (200, 400, 404, 413, 429)


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A route and a body: valid but for a few values, keys or bytes."""
    chat = rng.random() < 0.2
    body = copy.deepcopy(CHAT if chat else rng.choice(VALID)) | {"model": "tiny"}
    for _ in range(rng.randint(0, 3)):
        place: Any = body
        while True:
            if isinstance(place, dict) and place:
                key: Any = rng.choice(list(place))
            elif isinstance(place, list) and place:
                key = rng.randrange(len(place))
            else:
                break
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.5:
                place = place[key]
                continue
            action = rng.random()
            if action < 0.7:
                place[key] = copy.deepcopy(rng.choice(ODD))
            elif action < 0.85 and isinstance(place, dict):
                name = rng.choice(("suffix", "user", "tools", "unheard", "logit_bias"))
                place[name] = copy.deepcopy(place[key])
            else:
                del place[key]
            break
    data = json.dumps(body).encode()
    if rng.random() < 0.1:
        cut = rng.randrange(len(data))
        data = data[:cut] + rng.choice((b"", b"\xff\xfe", b"}" * 9, b"[" * 500)) + data[cut + 1 :]
    return "chat/completions" if chat else "completions", data


def check_answer(response: httpx2.Response) -> int:
    """Whether an answer is as it should be: an object, an error object or events."""
    status = response.status_code
    assert status in ANSWERED, (status, response.text[:300])
    if status != 200:
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), response.text[-300:]
    else:
        assert response.json()["choices"]
    return status


def send_malformed(server: Running, rng: random.Random, count: int) -> dict[int, int]:
    """Send malformed bodies; return how many answers had which status."""
    found: dict[int, int] = {}
    with httpx2.Client(timeout=60) as client:
        for _ in range(count):
            route, data = mutated(rng)
            status = check_answer(client.post(f"{server.url}/{route}", content=data))
            found[status] = found.get(status, 0) + 1
    return found


def disconnect(server: Running, rng: random.Random, count: int) -> None:
    """Open connections, send a part or all of a long request, and leave without reading."""
    host, port = server.root.removeprefix("http://").split(":")
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2000, "n": 2, "stream": True}
    body |= {"sparrow": {"ignore_eos": True}}
    data = json.dumps(body | {"stream": rng.random() < 0.5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    whole = head.encode() + data
    for _ in range(count):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            sent = len(whole) if rng.random() < 0.7 else rng.randrange(len(whole))
            connection.sendall(whole[:sent])
            if rng.random() < 0.3:
                connection.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    connection.recv(64)
