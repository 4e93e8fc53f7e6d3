"""Malformed bodies and clients that leave: every answer is one, and nothing leaks."""

import random
from collections.abc import Iterator

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
