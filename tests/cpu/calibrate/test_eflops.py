"""The paper's cost as printed and as we count it, by hand, and against counted bytes."""

from dataclasses import replace

import pytest
from support.specs import TINY as SPEC

from sparrow.calibrate.planning import cost
from sparrow.calibrate.planning.cost import ByteModel
from sparrow.calibrate.planning.eflops import Rollout, Work, consistent, printed
from sparrow.models.spec import shape
from sparrow.schema.schedule import DENSE, LayerBudgets, Schedule
from sparrow.sparse import preset

D = 2 * 3 * 2 * 16  # keys and values, layers, KV heads, head size
PER_LAYER = D // 3
P = SPEC.parameters()


def test_as_printed_by_hand() -> None:
    found = printed(SPEC, samples=2, prompt=10, output=4, budget=8, page=4)
    products = 2 * P * 2 * 4
    assert found == Rollout(
        dense=Work(comp=products + 2 * (20 + 4) * 4 * 2 * D, mem=2 * 10 * 4 * D + 2 * 16 * D),
        sparse=Work(comp=products + 2 * 2 * 2 * D * 8 * 4, mem=2 * 2 * D * 8 * 4),
        scoring=Work(
            comp=2 * 2 * 10 * D * 4 + 2 * 2 * D * 16 / 8, mem=2 * 10 * D * 4 + 2 * D * 16 / 8
        ),
    )
    assert (found.dense.mem, found.sparse.mem, found.scoring.mem) == (21_504, 24_576, 16_128)


def test_consistent_by_hand() -> None:
    # Two steps at 99 and 100 tokens: 7 pages, of which 52 tokens pay 3 and the last: 51, then 52.
    found = consistent(SPEC, Schedule.fixed(52), samples=3, prompt=98, output=2)
    products, seen, kept, marks = 2 * P * 3 * 2, 3 * 199, 2 * 199 + 103, 6 + 6
    assert found == Rollout(
        dense=Work(comp=products + 3 * 2 * 2 * PER_LAYER * seen, mem=3 * 2 * PER_LAYER * seen),
        sparse=Work(comp=products + 3 * 2 * 2 * PER_LAYER * kept, mem=3 * 2 * PER_LAYER * kept),
        scoring=Work(comp=3 * PER_LAYER * marks, mem=3 * PER_LAYER * marks),
    )


def test_eflops_and_speed_up_by_hand() -> None:
    found = Rollout(
        dense=Work(comp=10, mem=100), sparse=Work(comp=8, mem=20), scoring=Work(comp=2, mem=5)
    )
    assert found.dense.eflops(3) == 310
    assert found.speed_up(3) == 310 / (68 + 17)


LAYERED = Schedule.fixed(52, dense_layers=(0,), layers=(LayerBudgets(layer=1, budgets=[DENSE]),))


@pytest.mark.parametrize("schedule", [Schedule.fixed(52), LAYERED, Schedule.fixed(400)])
def test_memory_is_what_the_byte_model_counts(schedule: Schedule) -> None:
    found = consistent(SPEC, schedule, samples=4, prompt=33, output=300)
    over = cost.trace([333] * 4, prompt=33)
    read = cost.rollout_bytes(ByteModel(spec=SPEC, schedule=schedule), over)
    dense = cost.rollout_bytes(ByteModel(spec=SPEC), over)
    assert (found.dense.mem, found.sparse.mem) == (dense.kv, read.kv)
    assert found.scoring.mem == read.landmarks


def test_memory_of_a_published_schedule() -> None:
    spec, schedule = replace(shape("qwen3-8b"), layers=4), preset("qwen3-8b-0.86")
    found = consistent(spec, schedule, samples=2, prompt=100, output=9000, field_bytes=72)
    reads = ByteModel(spec=spec, schedule=schedule, field_bytes=72)
    read = cost.rollout_bytes(reads, cost.trace([9100] * 2, prompt=100))
    assert (found.sparse.mem, found.scoring.mem) == (read.kv, read.landmarks)


def test_both_agree_on_one_dense_sample() -> None:
    ours = consistent(SPEC, Schedule.fixed(52), samples=1, prompt=10, output=40).dense
    theirs = printed(SPEC, samples=1, prompt=10, output=40, budget=52).dense
    assert ours.mem - theirs.mem == D * 40  # the token of each step
    assert ours.comp - theirs.comp == 2 * D * 40


def test_printed_prompts_are_scored_as_if_a_page_were_a_token() -> None:
    settings = {"samples": 1, "prompt": 4096, "output": 16}
    ours = consistent(SPEC, Schedule.fixed(52, dense_layers=()), **settings).scoring
    theirs = printed(SPEC, **settings, budget=52).scoring
    assert theirs.mem / ours.mem == pytest.approx(2 * 16, rel=0.01)


def test_a_looked_up_embedding_is_no_product() -> None:
    tied, apart = (
        consistent(replace(SPEC, tied=tied), Schedule.fixed(52), samples=1, prompt=0, output=9)
        for tied in (True, False)
    )
    assert tied == apart


def test_what_is_refused() -> None:
    for field in ("samples", "output", "budget"):
        with pytest.raises(ValueError, match=field if field == "budget" else "got"):
            printed(SPEC, **{"samples": 1, "prompt": 1, "output": 1, "budget": 64} | {field: 0})
