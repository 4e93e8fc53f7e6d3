"""Bytes of steps and rollouts as a hand counts them, and what bytes alone allow."""

from dataclasses import replace

import numpy as np
import pytest
from support.specs import TINY as SPEC

from sparrow.calibrate.planning import cost
from sparrow.calibrate.planning.cost import ByteModel, Trace
from sparrow.models.spec import shape
from sparrow.schema.schedule import DENSE, LayerBudgets, Schedule
from sparrow.sparse import preset

VECTOR = 2 * 2 * 16 * 2  # k and v, heads, head size, bf16
LANDMARK = 2 * 16 * 2
WEIGHTS = SPEC.parameters() * 2
FIXED = Schedule.fixed(52)  # layers 0 and 1 dense


def by_hand(model: ByteModel, over: Trace) -> cost.Traffic:
    """Step after step, row after row."""
    steps = [model.step(over.at(number)) for number in range(over.steps)]
    fields = ("weights", "dense", "kept", "landmarks")
    return cost.Traffic(**{name: sum(getattr(s, name) for s in steps) for name in fields})


def test_a_step_by_hand() -> None:
    read = ByteModel(spec=SPEC, schedule=FIXED).step([100, 30])
    assert read.weights == WEIGHTS
    assert read.dense == 2 * (100 + 30) * VECTOR
    # Of 7 pages, the last with 4 tokens, 52 tokens pay 3 and the last; 30 tokens are 2 pages.
    assert read.kept == (52 + 30) * VECTOR
    assert read.landmarks == 6 * LANDMARK  # the row of 30 is dense exactly
    assert read.kv == read.dense + read.kept
    assert read.total == read.weights + read.kv + read.landmarks


def test_landmarks_that_the_engine_reads_today() -> None:
    read = ByteModel(spec=SPEC, schedule=FIXED, idle_landmarks=True).step([100, 30])
    assert read.landmarks == (6 + 1) * LANDMARK
    assert ByteModel(spec=SPEC, idle_landmarks=True).step([100, 30]).landmarks == 0
    assert ByteModel(spec=SPEC, schedule=FIXED, field_bytes=10).step([100]).landmarks == 6 * 2 * 10


def test_layers_have_budgets_of_their_own() -> None:
    own = LayerBudgets(layer=1, budgets=np.array([84]))
    schedule = Schedule.fixed(52, dense_layers=(0,), layers=(own,))
    read = ByteModel(spec=SPEC, schedule=schedule).step([100])
    assert (read.dense, read.kept) == (100 * VECTOR, (84 + 52) * VECTOR)
    assert read.landmarks == 2 * 6 * LANDMARK


def test_an_embedding_of_its_own_takes_memory_only() -> None:
    tied = ByteModel(spec=SPEC)
    apart = ByteModel(spec=replace(SPEC, tied=False))
    assert apart.weights == tied.weights
    assert apart.resident == tied.resident + 64 * 32 * 2


def test_everything_dense_is_dense() -> None:
    dense = ByteModel(spec=SPEC)
    full = ByteModel(spec=SPEC, schedule=Schedule.fixed(DENSE))
    assert full.step([100, 30]) == dense.step([100, 30])
    assert cost.limit(SPEC, Schedule.fixed(DENSE), [200, 300]).speed_up == 1
    assert cost.limit(SPEC, Schedule.fixed(300), [200, 300]).speed_up == 1


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
    assert over.segments() == [(0, 2), (2, 4)]
    assert [chunk.tolist() for chunk in over.chunks(1)] == [[[2, 2]], [[3, 3]], [[4]], [[5]]]
    read = cost.rollout_bytes(ByteModel(spec=SPEC), over)
    assert read.weights == 4 * WEIGHTS
    assert read.dense == 3 * (2 + 2 + 3 + 3 + 4 + 5) * VECTOR
    assert (read.kept, read.landmarks) == (0, 0)


def test_who_waits_for_memory() -> None:
    # In whole pages 48, 16, 32 and 16 tokens: 64 hold the first two, and the third needs more than
    # the second leaves behind.
    over = cost.trace([40, 10, 20, 5], capacity=64)
    assert over.starts.tolist() == [0, 0, 40, 40]  # in order: the fourth passes nobody
    assert over.steps == 60
    assert cost.trace([40, 10, 20, 5], capacity=96).starts.tolist() == [0, 0, 0, 10]
    assert cost.trace([40, 10, 20, 5]).starts.tolist() == [0, 0, 0, 0]
    assert cost.trace([9, 4, 6, 5], most=2).starts.tolist() == [0, 0, 4, 9]
    for lengths, settings in (([], {}), ([5, 3], {"prompt": 3}), ([5, 33], {"capacity": 32})):
        with pytest.raises(ValueError, match="trace"):
            cost.trace(lengths, **settings)


@pytest.mark.parametrize("capacity", [None, 320])
def test_sums_are_those_of_the_steps(capacity: int | None) -> None:
    over = cost.trace([90, 230, 61, 300, 150], prompt=7, capacity=capacity)
    for model in (ByteModel(spec=SPEC), ByteModel(spec=SPEC, schedule=FIXED)):
        assert cost.rollout_bytes(model, over) == by_hand(model, over)
        total = model.steps(300)
        took = cost.rollout_seconds(over, lambda lengths, total=total: total(lengths) / 1e9)
        assert took == pytest.approx(by_hand(model, over).total / 1e9)


def test_any_step_time_adds_up() -> None:
    over = cost.trace([5000, 9000], capacity=9008)  # one after the other, in chunks
    rows = cost.rollout_seconds(over, lambda lengths: np.full(len(lengths), lengths.shape[1] + 0.5))
    assert rows == 14_000 * 1.5


def test_a_smaller_budget_gains_more() -> None:
    lengths = [400, 900, 700]
    gains = [
        cost.limit(SPEC, Schedule.fixed(budget), lengths).speed_up
        for budget in (48, 64, 128, 256, 512)
    ]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > gains[-1] > 1


def test_less_memory_gains_less() -> None:
    room = 3 * (16 * VECTOR + LANDMARK) * 60  # 60 pages
    tight, wide = (
        cost.limit(SPEC, FIXED, [900, 800, 700], memory=memory, reserve=0)
        for memory in (WEIGHTS + room, 10 * (WEIGHTS + room))
    )
    assert (tight.capacity, tight.steps, wide.steps) == (960, 2400, 900)
    assert tight.mean_batch < wide.mean_batch
    assert tight.sparse.weights > wide.sparse.weights  # read more often
    assert tight.sparse.kv == wide.sparse.kv
    assert tight.speed_up < wide.speed_up


def test_the_published_workload() -> None:
    lengths = cost.published_lengths()
    assert (len(lengths), int(lengths.min()), int(lengths.max())) == (60, 3088, 32_768)
    assert lengths.mean() == pytest.approx(16_655, abs=1)
    assert cost.published_lengths(cutoff=2048).tolist() == [2048] * 60


# The estimate of ../shared/reference/method.md, section 10, made with code of its own.
@pytest.mark.parametrize(
    ("name", "estimate"),
    [("qwen3-1.7b", 2.79), ("qwen3-4b", 2.46), ("qwen3-8b", 2.01), ("qwen3-14b", 1.50)],
)
def test_the_limit_of_published_schedules(name: str, estimate: float) -> None:
    found = cost.limit(shape(name), preset(f"{name}-0.86"), cost.published_lengths())
    assert found.speed_up == pytest.approx(estimate, rel=0.01)
    dense, sparse = found.tokens_per_s
    assert sparse / dense == pytest.approx(found.speed_up)
