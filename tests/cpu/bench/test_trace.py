"""The trace benchmark runs, its steps are the engine's, and its sums are those of the points."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.results import check_output
from support.specs import TINY as SPEC

from sparrow import models
from sparrow.benchmarks import timing, trace
from sparrow.calibration.planning import cost
from sparrow.engine.pool import batch_bucket
from sparrow.engine.runner import pages_bucket

LENGTHS = [190, 90, 140]


def test_a_short_run() -> None:
    seen: list[str] = []
    where: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "progress": seen.append}
    result = trace.run(model=SPEC, schedule="fixed-64", lengths=LENGTHS, cutoff=60, **where)
    dense, sparse = result.rows
    assert (dense.who, sparse.who) == ("dense", "fixed-64")
    assert dense.tokens == sum(LENGTHS) - 3 * 16
    assert dense.tokens_per_s == pytest.approx(dense.tokens / dense.seconds)
    assert dense.of_limit is None  # no published figure for a CPU
    assert result.speed_up == pytest.approx(dense.seconds / sparse.seconds)
    assert result.share == pytest.approx(result.speed_up / result.limit["speed_up"])
    schedule = timing.schedule_named("fixed-64")
    reads = cost.ByteModel(spec=SPEC, schedule=schedule, itemsize=4)
    capacity = reads.capacity(memory=result.memory, reserve=0)
    over = cost.trace(LENGTHS, prompt=16, capacity=capacity)
    limit = cost.limit(reads, over, capacity=capacity, bytes_per_s=1.0)
    assert result.limit["speed_up"] == limit.speed_up
    assert result.limit["sparse"]["kept"] == limit.sparse.kept
    short = result.confirmation
    assert short.steps == 60 - 16
    for row in short.rows:
        assert row.ratio == pytest.approx(row.seconds / row.expected)
    assert any("a complete run up to 60" in text for text in seen)
    check_output(result)


def test_states_are_of_the_trace_and_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MANY", 2000)
    over = cost.trace([3000, 700, 1500, 9000], capacity=9600, prompt=16)
    reads = cost.ByteModel(spec=SPEC, schedule=timing.schedule_named("fixed-64"))
    states = defaultdict(list)
    for kind, rows in trace.find_states([over], 600, reads.steps(9000)):
        states[kind].append(rows)
    sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rows in map(over.at, range(over.steps)):
        width = pages_bucket(-(-int(rows.max()) // 16), 600)
        sizes[batch_bucket(len(rows)), width].append(reads.step(rows).total)
    assert states.keys() == sizes.keys()
    assert {len(several) for several in states.values()} == {2, 3}
    for kind, several in states.items():
        read = [reads.step(rows).total for rows in several]
        assert (read[0], read[-1]) == (min(sizes[kind]), max(sizes[kind]))
        assert read == sorted(read)


def test_times_between_points() -> None:
    case: Any = SimpleNamespace(sizes=lambda lengths: lengths.sum(1), width=20)
    fields: dict[str, Any] = {"who": "", "rows": 2, "mean_length": 1.0, "longest": 1}
    fields |= {"batch": 2, "pages": 20, "ms_step_rounds": (1.0,)}
    points = [
        trace.TracePoint(bytes=size, ms_step=1e3 * seconds, **fields)
        for size, seconds in ((300, 2.0), (100, 1.0))
    ]
    clock = trace.StepTimes(case, points)
    assert clock(np.array([[50, 50], [100, 100], [150, 150]])).tolist() == [1.0, 1.5, 2.0]


def test_requests_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = timing.schedule_named("fixed-64")
    model, lengths = models.random(SPEC), np.array([60, 40, 50])
    over = cost.trace(lengths, prompt=16, capacity=128, page=16)
    assert over.starts.tolist() == [0, 0, 24]
    case, _ = trace._cases(model, schedule, "fixed-64", (over, over))
    drawn: list[int] = []
    plain = case.engine.step

    def step() -> Any:
        outputs = plain()
        drawn.append(len(outputs))
        return outputs

    monkeypatch.setattr(case.engine, "step", step)
    assert trace.complete(case, over.lengths, 128, seed=0) > 0
    assert sum(drawn) == over.tokens + 3  # each prompt gives a token without a step of the trace
    assert max(drawn) == 2
