"""`sparrow serve` as a user meets it: it starts, answers, drains on SIGTERM, refuses mistakes."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import httpx2
import pytest
from support import cli
from support.killing import kill_under_load
from support.waiting import start

PROMPT = "assignments mod 97 : x227 = 31 ; x83 = x64 - x227 ; x64 = 60 ; find x83 <think>"


ADMIN = ("--admin-port", "0", "--admin-key", "an-admin-key")


@pytest.fixture(params=[(), ADMIN], ids=["one port", "admin port"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Popen[str], str]]:
    words = ("serve", "tiny", "--port", "0", "--device", "cpu", "--kv-gib", "0.2", "--drain", "60")
    words = (*words, *request.param)
    process = start(tmp_path, "-m", "sparrow", *words)
    assert process.stdout is not None
    said = ""
    while not (found := re.search(r"http://127\.0\.0\.1:\d+/v1", said)):
        line = process.stdout.readline()
        assert line, said
        said += line
    yield process, found.group()
    process.kill()
    process.wait()


def test_a_running_answer_ends_after_sigterm(server: tuple[Popen[str], str]) -> None:
    process, url = server
    check_no_http(httpx2.URL(url).port)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 300, "stream": True}
    body |= {"sparrow": {"ignore_eos": True, "return_token_ids": True}}
    with httpx2.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        events = [next(lines)]
        process.send_signal(signal.SIGTERM)
        events += lines
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["sparrow"]["token_ids"]]
    assert len(tokens) == 300
    assert process.wait(60) in (0, -signal.SIGTERM)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/models")


def check_no_http(port: int | None) -> None:
    """What is no HTTP gets an error object, and the server goes on."""
    for junk in (b"\x00\xff\x01\r\n\r\n", b"GET /\tx y z\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port or 0), timeout=30) as client:
            client.sendall(junk)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_mistakes_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARROW_API_KEY", raising=False)
    monkeypatch.delenv("SPARROW_ADMIN_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, reason in (
            (("--host", "0.0.0.0"), "api_key"),
            (("--decoding", "sparse"), "budget"),
            (("--budget", "64", "--schedule", "tiny-0.86"), "budget"),
            (("--draft-tokens", "4"), "exact"),
            (("--api-key", "short"), "api_key"),
            (("--port", str(port)), "use"),
            (("--admin-port", "0"), "admin_key"),
        ):
            assert reason in cli.refused("serve", "tiny", *words)


@pytest.mark.slow
def test_clients_outlive_a_server_that_is_killed() -> None:
    """Under load; its engine is in order after the restart. Those that retry see no error."""
    counts = kill_under_load(1)
    assert counts["client without retries: ClientError"]
    assert not counts["client: ClientError"]
