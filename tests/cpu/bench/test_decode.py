"""The decode benchmark runs, reports what it promises, and counts bytes as a hand does."""

import pytest
import torch
from support.results import check_output
from support.specs import TINY as SPEC

from sparrow import models, ops
from sparrow.benchmarks import decode, timing
from sparrow.schema.bench import DecodeBenchmark
from sparrow.sparse.flows import library
from sparrow.sparse.rule import Rule


def short_run(*cases: decode.Case, split: bool = False) -> DecodeBenchmark:
    return decode.run(
        model=SPEC, dtype="fp32", device="cpu", cases=cases, steps=4, rounds=1, split=split
    )


def test_a_short_run() -> None:
    result = short_run((2, 64, None), (2, 64, "fixed-48"), split=True)
    dense, sparse = result.rows
    assert (dense.schedule, sparse.schedule) == (None, "fixed-48")
    assert dense.speed_up == 1.0
    for row in result.rows:
        assert (row.batch, row.steps, row.mean_length) == (2, 4, 62.5)  # 61, 62, 63, 64
        assert row.ms_step > 0
        assert row.ms_device > 0
        assert row.of_peak is None  # no published figure for a CPU
        assert set(row.split) == {*timing.PARTS, "python"}
        assert row.split["linear"] > 0
    assert sparse.split["select"] > 0
    check_output(result)
    with pytest.raises(ValueError, match="context"):
        short_run((1, 8, None))


def test_bytes_by_hand() -> None:
    dense, sparse = short_run((2, 112, None), (2, 112, "fixed-52")).rows
    attention = 32 * (4 + 2 + 2) * 16 + 4 * 16 * 32 + 2 * 16
    layer = attention + 3 * 32 * 48 + 2 * 32
    assert dense.bytes_weights == 4 * (3 * layer + 64 * 32 + 32)
    token = 2 * (2 * 16) * 4  # k and v, KV heads, head size, fp32
    # Four steps of 109 to 112 tokens: 7 pages, of which 6 are finished until the last step.
    assert dense.bytes_kv == 2 * 3 * 110.5 * token
    assert (dense.bytes_landmarks, dense.split) == (0, None)
    # Layers 0 and 1 are dense. 52 tokens pay for 3 pages and the last one.
    assert sparse.bytes_kv < 2 * (2 * 110.5 + 64) * token
    assert sparse.bytes_landmarks == 2 * 6.25 * token / 2
    assert sparse.bytes == sparse.bytes_weights + sparse.bytes_kv + sparse.bytes_landmarks


def test_dense_takes_turns_with_the_first_schedule_of_its_batch_and_context() -> None:
    """Schedules with other dense layers need an engine of their own."""
    bare, own = frozenset[int](), frozenset((0, 1))
    cases = [(2, 64, None), (2, 64, "fixed-48-all"), (2, 64, "fixed-48"), (2, 64, "fixed-64-all")]
    assert decode._groups(cases) == {
        (2, 64, bare): [None, "fixed-48-all", "fixed-64-all"],
        (2, 64, own): ["fixed-48"],
    }
    cases = [(2, 64, "fixed-48-all"), (2, 128, None)]  # dense of another context is alone
    assert decode._groups(cases) == {(2, 64, bare): ["fixed-48-all"], (2, 128, bare): [None]}


def test_placed_samples_go_on_like_any_other() -> None:
    engine = decode.build(models.random(SPEC), Rule(), 3, 64)
    with decode.running(engine, [40] * 3, None, room=9) as samples:
        engine.check_integrity()
        assert [sample.length for sample in samples] == [41] * 3
        done = [output.completion for output in engine.stream() if output.completion is not None]
        assert [len(completion.token_ids) for completion in done] == [9] * 3
        assert engine.runner.rows.length_R[:3].tolist() == [48] * 3
    assert engine.pool.available == engine.pool.pages


def test_ops_are_left_as_they_were() -> None:
    taken: dict[str, float] = {}
    before = ops.logits
    with timing.timed_ops(taken):
        assert ops.logits is not before
        ops.logits(torch.ones(1, 2), torch.ones(3, 2))
    assert ops.logits is before
    assert taken["linear"] > 0
    assert taken["attention"] == 0


def test_kernels_by_name() -> None:
    parts = {
        "attention": ["_attend_split"],
        "select": ["_select", "score_pages", "choose"],
        "store": ["append", "_store"],
        "linear": ["_linear_kernel", "nvjet_tst_64x16_64x16_4x2_h_bz_TNT"],
        "heads": ["_split_heads_kernel"],
        "sampling": ["_draw"],
        "rows": ["_read_rows"],
        "other": ["void at::native::elementwise_kernel", "Memcpy DtoH (Device -> Pinned)"],
    }
    for part, kernels in parts.items():
        assert {timing.kernel_part(kernel) for kernel in kernels} == {part}


def test_presets_are_timed_on_any_flow_and_family() -> None:
    own = timing.schedule_named("qwen3-1.7b-0.86", library.quest)
    assert own.family is None
    Rule.of(own, library.quest).check(own, page=16, family="llama")
