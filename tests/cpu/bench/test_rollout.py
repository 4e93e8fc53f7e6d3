"""The rollout benchmark runs, also beside transformers, and reports what it promises."""

import json

import pytest
from rich.console import Console

from sparrow.bench import rollout, timing
from sparrow.schema.base import to_dict

SMALL = {"rollouts": 3, "prompt_tokens": 8, "new_tokens": 6}


def test_the_tiny_shape_has_three_million_weights() -> None:
    assert rollout.TINY.parameters() == 2_976_576


def test_a_short_run() -> None:
    seen: list[str] = []
    result = rollout.run(preset="cpu-tiny", peer=False, progress=seen.append, **SMALL)
    assert len(seen) == 2
    json.dumps(to_dict(result))
    assert [row["who"] for row in result["rows"]] == ["sparrow dense", "sparrow fixed-256"]
    for row in result["rows"]:
        assert row["tokens"] == 18
        assert row["tokens_per_s"] == pytest.approx(18 / row["seconds"])
        assert row["ratio"] is None
        assert set(row["split"]) == {*timing.OPS, "python"}
        assert sum(row["split"].values()) == pytest.approx(row["seconds"])
    Console(quiet=True).print(rollout.table(result))


def test_beside_transformers() -> None:
    pytest.importorskip("transformers")
    result = rollout.run(preset="cpu-tiny", peer_tokens=4, **SMALL)
    who = [(row["who"], row["new_tokens"]) for row in result["rows"]]
    assert who[2:] == [("sparrow dense", 4), ("transformers generate", 4)]
    ours, theirs = result["rows"][2:]
    assert theirs["failed"] is None
    assert theirs["tokens"] == ours["tokens"] == 12
    assert ours["ratio"] == pytest.approx(ours["tokens_per_s"] / theirs["tokens_per_s"])
    assert result["rows"][0]["ratio"] is None  # on more tokens: not to be compared
    Console(quiet=True).print(rollout.table(result))


def test_a_peer_that_fails_or_stops_early_is_no_result() -> None:
    def refuse(new_tokens: int) -> int:
        raise NotImplementedError("not here")

    model = rollout._model(rollout.WORKLOADS["cpu-tiny"], None)
    row = rollout._attempt("peer", refuse, 4, 2, model)
    assert row["failed"] == "NotImplementedError: not here"
    assert row["tokens_per_s"] is None
    early = rollout._attempt("peer", lambda new_tokens: 1, 4, 2, model)
    assert "1 tokens" in early["failed"]
