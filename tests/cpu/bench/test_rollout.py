"""Rollouts, also beside transformers, and optimiser steps: benchmarks run and report."""

import pytest
from support.results import check_output

from sparrow.benchmarks import rollout, timing, training
from sparrow.schema.bench import TrainWork

SMALL = {"rollouts": 3, "prompt_tokens": 8, "new_tokens": 6}


def test_a_short_run_beside_transformers() -> None:
    seen: list[str] = []
    result = rollout.run(workload="cpu-tiny", peer_tokens=4, progress=seen.append, **SMALL)
    assert len(seen) == 4
    dense, sparse, ours, theirs = result.rows
    assert [row.who for row in (dense, sparse)] == ["sparrow dense", "sparrow fixed-256"]
    for row in (dense, sparse):
        assert (row.tokens, row.ratio) == (18, None)  # on more tokens: not to be compared
        assert row.tokens_per_s == pytest.approx(18 / row.seconds)
        assert set(row.split) == {*timing.PARTS, "python"}
        assert sum(row.split.values()) == pytest.approx(row.seconds)
    assert (ours.who, theirs.who) == ("sparrow dense", "transformers generate")
    assert (theirs.failed, theirs.tokens, ours.tokens) == (None, 12, 12)
    assert ours.ratio == pytest.approx(ours.tokens_per_s / theirs.tokens_per_s)
    check_output(result)


def test_a_peer_that_fails_or_stops_early_is_no_result() -> None:
    def refuse(new_tokens: int) -> int:
        raise NotImplementedError("not here")

    model = rollout._model(rollout.WORKLOADS["cpu-tiny"], None)
    row = rollout._attempt(refuse, 4, 2, model)
    assert row.failed == "NotImplementedError: not here"
    assert row.tokens_per_s is None
    early = rollout._attempt(lambda new_tokens: 1, 4, 2, model)
    assert (early.tokens, early.tokens_per_s) == (1, None)
    assert early.failed


def test_optimiser_steps() -> None:
    case = TrainWork(sequences=2, length=16, recompute=True)
    result = training.run(device="cpu", case=[case], steps=1)
    (row,) = result.cases
    assert (row.sequences, row.length, row.recompute) == (2, 16, True)
    assert row.tokens_per_second == pytest.approx(32 / row.seconds[0], rel=0.01)
    assert (row.utilisation, row.memory_gib) == (None, None)
    check_output(result)
    with pytest.raises(ValueError, match="length"):
        training.run(device="cpu", case=[TrainWork(sequences=1, length=10**6, recompute=True)])
