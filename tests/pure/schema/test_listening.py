"""Addresses that a run listens on, options of workers, and keys."""

from typing import Any

import pytest

from sparrow.schema.asynchronous import WorkerConfig
from sparrow.schema.simulation import TrainDispatchConfig, listening_address
from sparrow.schema.types import environment_key


def test_hosts_and_ports() -> None:
    assert listening_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert listening_address("run.example.org:7777") == ("run.example.org", 7777)
    assert listening_address("[::1]:7777") == ("::1", 7777)
    assert TrainDispatchConfig(listen="[::]:80", workers=0).listen == "[::]:80"


@pytest.mark.parametrize(
    "text",
    ["", "7777", ":7777", "host", "host:", "host:x", "::1:7777", "[::1]", "h:65536", "[h]:1"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="listen"):
        TrainDispatchConfig(listen=text)


def test_somebody_must_answer() -> None:
    with pytest.raises(ValueError, match=r"1 or more without dispatch\.listen"):
        TrainDispatchConfig(workers=0)


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"connect": text}
            for text in ("host:1", "http://h:abc", "http://h:99999", "http://[::1")
        ),
        *({"budget": 64, "schedule": "x"}, {"name": "../x"}),
    ],
)
def test_workers_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WorkerConfig(**{"connect": "http://host:1", **wrong})


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    assert environment_key("A_KEY") is None
    for given, key in (("", None), (" \n", None), ("a secret\n", "a secret")):
        monkeypatch.setenv("A_KEY", given)
        assert environment_key("A_KEY") == key
    for wrong in ("secret\nsecret", "secr\u00e9t", "secr\udcfft"):
        monkeypatch.setenv("A_KEY", wrong)
        with pytest.raises(ValueError, match="A_KEY") as raised:
            environment_key("A_KEY")
        assert "secr" not in str(raised.value)
