"""Bytes of steps and rollouts as a hand counts them, and what bytes alone allow."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.specs import TINY as SPEC

from sparrow.calibration.planning import cost
from sparrow.calibration.planning.cost import ByteModel, Trace
from sparrow.models.spec import ModelSpec, shape
from sparrow.schema.schedule import DENSE, LayerBudgets, Schedule
from sparrow.sparse import preset

VECTOR = 2 * 2 * 16 * 2  # k and v, heads, head size, bf16
LANDMARK = 2 * 16 * 2
WEIGHTS = SPEC.parameters() * 2
FIXED = Schedule.fixed(52, dense_layers=(0, 1))


def by_hand(model: ByteModel, over: Trace) -> cost.Traffic:
    """Step after step, row after row."""
    steps = [model.step(over.at(number)) for number in range(over.steps)]
    fields = ("weights", "dense", "kept", "landmarks")
    return cost.Traffic(**{name: sum(getattr(s, name) for s in steps) for name in fields})


def limit(
    schedule: Schedule, lengths: Sequence[int], spec: ModelSpec = SPEC, **machine: int
) -> cost.Limit:
    reads = ByteModel(spec=spec, schedule=schedule)
    fits = reads.capacity(**machine)
    over = cost.trace(lengths, capacity=fits)
    return cost.limit(reads, over, capacity=fits, bytes_per_s=1e12)


def test_a_step_by_hand() -> None:
    read = ByteModel(spec=SPEC, schedule=FIXED).step([100, 30])
    assert read.weights == WEIGHTS
    assert read.dense == 2 * (100 + 30) * VECTOR
    # Of 7 pages, the last with 4 tokens, 52 tokens pay 3 and the last; 30 tokens are 2 pages.
    assert read.kept == (52 + 30) * VECTOR
    assert read.landmarks == 6 * LANDMARK  # the row of 30 is dense exactly
    assert read.kv == read.dense + read.kept
    assert read.total == read.weights + read.kv + read.landmarks
    # Landmarks that the engine reads today.
    read = ByteModel(spec=SPEC, schedule=FIXED, idle_landmarks=True).step([100, 30])
    assert read.landmarks == (6 + 1) * LANDMARK
    assert ByteModel(spec=SPEC, idle_landmarks=True).step([100, 30]).landmarks == 0
    assert ByteModel(spec=SPEC, schedule=FIXED, field_bytes=10).step([100]).landmarks == 6 * 2 * 10
    # Layers with budgets of their own.
    own = LayerBudgets(layer=1, budgets=np.array([84]))
    schedule = Schedule.fixed(52, dense_layers=(0,), layers=(own,))
    read = ByteModel(spec=SPEC, schedule=schedule).step([100])
    assert (read.dense, read.kept) == (100 * VECTOR, (84 + 52) * VECTOR)
    assert read.landmarks == 2 * 6 * LANDMARK
    # An embedding of its own takes memory only.
    tied = ByteModel(spec=SPEC)
    apart = ByteModel(spec=replace(SPEC, tied=False))
    assert apart.weights == tied.weights
    assert apart.resident == tied.resident + 64 * 32 * 2
    # Everything dense is dense.
    full = ByteModel(spec=SPEC, schedule=Schedule.fixed(DENSE))
    assert full.step([100, 30]) == tied.step([100, 30])
    assert limit(Schedule.fixed(300), [200, 300]).speed_up == 1


def test_capacity_by_hand() -> None:
    page = 3 * (16 * VECTOR + LANDMARK)
    model = ByteModel(spec=SPEC)
    assert model.capacity(memory=WEIGHTS + 1000 + 5 * page, reserve=1000) == 5 * 16
    assert model.capacity(memory=WEIGHTS + 1000 + 5 * page - 1, reserve=1000) == 4 * 16
    with pytest.raises(ValueError, match="page"):
        model.capacity(memory=WEIGHTS, reserve=0)
    with pytest.raises(ValueError, match="page"):
        ByteModel(spec=SPEC, schedule=Schedule.fixed(52, page=8))


def test_two_requests_by_hand() -> None:
    over = cost.trace([5, 3], prompt=1)
    assert (over.steps, over.tokens, over.mean_batch) == (4, 6, 1.5)
    assert [over.at(step).tolist() for step in range(4)] == [[2, 2], [3, 3], [4], [5]]
    assert [chunk.tolist() for chunk in over.chunks(1)] == [[[2, 2]], [[3, 3]], [[4]], [[5]]]
    read = cost.rollout_bytes(ByteModel(spec=SPEC), over)
    assert read.weights == 4 * WEIGHTS
    assert read.dense == 3 * (2 + 2 + 3 + 3 + 4 + 5) * VECTOR
    assert (read.kept, read.landmarks) == (0, 0)


def test_who_waits_for_memory() -> None:
    # In whole pages 48, 16, 32 and 16 tokens: 64 hold the first two, and the third needs more than
    # the second leaves behind.
    lengths = [40, 10, 20, 5]
    assert cost.trace(lengths, capacity=64).starts.tolist() == [0, 0, 40, 40]  # in order
    assert cost.trace(lengths, capacity=96).starts.tolist() == [0, 0, 0, 10]
    assert cost.trace(lengths, capacity=64).steps == 60
    assert cost.trace(lengths).starts.tolist() == [0, 0, 0, 0]
    assert cost.trace([9, 4, 6, 5], most=2).starts.tolist() == [0, 0, 4, 9]
    for lengths, settings in (([], {}), ([5, 3], {"prompt": 3}), ([5, 33], {"capacity": 32})):
        with pytest.raises(ValueError, match="trace"):
            cost.trace(lengths, **settings)


def test_sums_are_those_of_the_steps() -> None:
    for capacity in (None, 320):
        over = cost.trace([90, 230, 61, 300, 150], prompt=7, capacity=capacity)
        for model in (ByteModel(spec=SPEC), ByteModel(spec=SPEC, schedule=FIXED)):
            assert cost.rollout_bytes(model, over) == by_hand(model, over)
            total = model.steps(300)
            took = cost.rollout_seconds(over, lambda lengths, total=total: total(lengths) / 1e9)
            assert took == pytest.approx(by_hand(model, over).total / 1e9)
    over = cost.trace([5000, 9000], capacity=9008)  # one after the other, in chunks
    rows = cost.rollout_seconds(over, lambda lengths: np.full(len(lengths), lengths.shape[1] + 0.5))
    assert rows == 14_000 * 1.5


def test_smaller_budgets_gain_more_and_less_memory_less() -> None:
    budgets = (48, 64, 128, 256, 512)
    gains = [limit(Schedule.fixed(budget), [400, 900, 700]).speed_up for budget in budgets]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1
    memory = WEIGHTS + 60 * 3 * (16 * VECTOR + LANDMARK)  # 60 pages
    tight, wide = (
        limit(FIXED, [900, 800, 700], memory=given, reserve=0) for given in (memory, 10 * memory)
    )
    assert (tight.capacity, tight.steps, wide.steps) == (960, 2400, 900)
    assert tight.sparse.kv == wide.sparse.kv
    assert tight.speed_up < wide.speed_up


# The estimate of ../shared/reference/method.md, section 10, made with code of its own.
ESTIMATES = {"qwen3-1.7b": 2.79, "qwen3-4b": 2.46, "qwen3-8b": 2.01, "qwen3-14b": 1.50}


def test_the_limit_of_published_schedules() -> None:
    lengths = cost.published_lengths()
    assert (len(lengths), int(lengths.min()), int(lengths.max())) == (60, 3088, 32_768)
    assert lengths.mean() == pytest.approx(16_655, abs=1)
    for name, estimate in ESTIMATES.items():
        found = limit(preset(f"{name}-0.86"), lengths, shape(name))
        assert found.speed_up == pytest.approx(estimate, rel=0.01)


# eFLOPs.

D = 2 * 3 * 2 * 16  # keys and values, layers, KV heads, head size
P = SPEC.parameters()


def test_eflops_as_printed_by_hand() -> None:
    products = 2 * P * 2 * 4
    comp = {
        "dense": products + 2 * (20 + 4) * 4 * 2 * D,
        "sparse": products + 2 * 2 * 2 * D * 8 * 4,
        "scoring": 2 * 2 * 10 * D * 4 + 2 * 2 * D * 16 / 8,
    }
    mem = {"dense": 21_504, "sparse": 24_576, "scoring": 16_128}
    dense, sparse, scoring = (comp[name] + 3 * mem[name] for name in comp)
    sizes = {"samples": 2, "prompt": 10, "output": 4, "budget": 8, "page": 4}
    assert cost.printed_speed_up(SPEC, 3, **sizes) == pytest.approx(dense / (sparse + scoring))


def test_consistent_eflops_by_hand() -> None:
    # Two steps at 99 and 100 tokens: 7 pages, of which 52 tokens pay 3 and the last: 51, then 52.
    over = cost.trace([100] * 3, prompt=98)
    products, seen, kept, marks, layer = 2 * P * 3 * 2, 3 * 199, 2 * 199 + 103, 6 + 6, D // 3
    for spec in (SPEC, replace(SPEC, tied=False)):  # a looked-up embedding is no product
        for schedule, tokens, scored in ((None, seen, 0), (FIXED, kept, marks)):
            reads = ByteModel(spec=spec, schedule=schedule)
            work = cost.eflops(reads, cost.rollout_bytes(reads, over), over.tokens, intensity=3)
            comp = products + 3 * 2 * 2 * layer * tokens + 3 * layer * scored
            assert work == comp + 3 * (3 * 2 * layer * tokens + 3 * layer * scored)
    # The operations of scoring are those of a mean key, whatever a landmark holds.
    other = ByteModel(spec=SPEC, schedule=FIXED, field_bytes=64)
    read = cost.rollout_bytes(other, over)
    more = cost.eflops(other, read, over.tokens, 3) - cost.eflops(other, read, over.tokens, 0)
    assert more == 3 * (read.kv + read.landmarks)
    assert read.landmarks == 3 * 2 * 64 * marks
