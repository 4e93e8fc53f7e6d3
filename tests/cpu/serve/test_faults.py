"""Malformed bodies and clients that leave: every answer is one, and nothing leaks."""

import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.http_faults import check_answer, disconnect, send_malformed
from support.serving import Running, serving


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving("tiny", max_running=8, max_waiting=8, max_n=8) as server:
        yield server


@pytest.mark.parametrize("wave", range(2))
def test_waves_of_faults(running: Running, wave: int) -> None:
    rng = random.Random(wave)
    found = send_malformed(running, rng, 150)
    assert found[200] > 10 < found[400]
    disconnect(running, rng, 12)
    running.wait_until_free()


def test_a_huge_prompt_is_refused_and_others_go_on(running: Running) -> None:
    import httpx2

    huge = {"model": "tiny", "prompt": [2] * 500_000, "max_tokens": 1}
    response = httpx2.post(f"{running.url}/completions", json=huge, timeout=60)
    assert check_answer(response) == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    running.wait_until_free()


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01 no http\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"a" * 2**20]
)
def test_what_is_no_http_gets_an_error_object(running: Running, sent: bytes) -> None:
    """Also a head that never ends."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        with suppress(OSError):  # it may be closed before all is sent
            client.sendall(sent)
        with suppress(ConnectionError):
            head, _, body = b"".join(iter(lambda: client.recv(2**16), b"")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
    running.wait_until_free()
