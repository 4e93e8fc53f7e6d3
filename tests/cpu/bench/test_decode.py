"""The decode benchmark runs, reports what it promises, and counts bytes as a hand does."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.specs import TINY as SPEC

from sparrow import models, ops
from sparrow.bench import decode, timing
from sparrow.schema.base import to_dict
from sparrow.schema.bench import Benchmark
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows import library
from sparrow.sparse.rule import Rule


def short_run(split: bool) -> Benchmark:
    cases = [(2, 64, None), (2, 64, "fixed-48")]
    settings: dict[str, Any] = {"steps": 4, "rounds": 1, "split": split}
    return decode.run(model=SPEC, dtype="fp32", device="cpu", cases=cases, **settings)


def test_a_short_run() -> None:
    result = short_run(split=True)
    json.dumps(to_dict(result))
    dense, sparse = result["rows"]
    assert (dense["schedule"], sparse["schedule"]) == (None, "fixed-48")
    assert dense["speed_up"] == 1.0
    for row in result["rows"]:
        assert row["batch"] == 2
        assert row["steps"] == 4
        assert row["mean_length"] == 62.5  # 61, 62, 63, 64
        assert row["ms_step"] > 0
        assert row["ms_device"] > 0
        assert row["idle"] < 1
        assert row["bytes"] == row["bytes_weights"] + row["bytes_kv"] + row["bytes_landmarks"]
        assert set(row["split"]) == {*timing.OPS, "python"}
        assert row["split"]["linear"] > 0
        assert row["of_peak"] is None  # no published figure for a CPU
    assert sparse["split"]["select"] > 0
    plain = short_run(split=False)
    assert [row["split"] for row in plain["rows"]] == [None, None]
    for own in (result, plain):
        Console(quiet=True).print(decode.table(own))
    with pytest.raises(ValueError, match="context"):
        decode.run(model=SPEC, device="cpu", cases=[(1, 8, None)])


def test_dense_takes_turns_with_the_first_schedule_of_its_batch_and_context() -> None:
    """Schedules with other dense layers need an engine of their own."""
    bare, own = frozenset[int](), Rule().dense_layers
    assert own != bare
    cases = [(2, 64, None), (2, 64, "fixed-48-all"), (2, 64, "fixed-48"), (2, 64, "fixed-64-all")]
    assert decode._groups(cases) == {
        (2, 64, bare): [None, "fixed-48-all", "fixed-64-all"],
        (2, 64, own): ["fixed-48"],
    }
    assert decode._groups([(2, 64, "fixed-48"), (2, 64, "fixed-48-all"), (2, 64, None)]) == {
        (2, 64, own): ["fixed-48", None],
        (2, 64, bare): ["fixed-48-all"],
    }
    cases = [(2, 64, "fixed-48-all"), (2, 128, None)]  # dense of another context is alone
    assert decode._groups(cases) == {(2, 64, bare): ["fixed-48-all"], (2, 128, own): [None]}


def test_bytes_by_hand() -> None:
    read = decode.traffic(SPEC, 2, 5, np.array([100]), None)
    attention = 32 * (4 + 2 + 2) * 16 + 4 * 16 * 32 + 2 * 16
    layer = attention + 3 * 32 * 48 + 2 * 32
    assert read.weights == 2 * (3 * layer + 64 * 32 + 32)
    assert read.kv == 5 * 3 * 100 * 2 * (2 * 16) * 2  # rows, layers, tokens, k and v, ...
    assert read.landmarks == 0
    # Of 7 pages, the last with 4 tokens, 52 tokens pay 3 and the last. Layers 0 and 1 are dense.
    read = decode.traffic(SPEC, 2, 5, np.array([100]), Schedule.fixed(52))
    assert read.kv == 5 * (2 * 100 + 52) * 2 * (2 * 16) * 2
    assert read.landmarks == 5 * 1 * 6 * (2 * 16) * 2


def test_published_weights() -> None:
    read = decode.traffic(models.shape("qwen3-1.7b"), 2, 1, np.array([1]), None)
    assert read.weights / 4.8e12 == pytest.approx(0.717e-3, rel=1e-3)


def test_placed_samples_go_on_like_any_other() -> None:
    engine = decode._build(models.random(SPEC), Rule(), 3, 64)
    samples = decode.place(engine, [40] * 3, None, room=9)
    engine.check_integrity()
    assert [sample.length for sample in samples] == [41] * 3
    done = [output.completion for output in engine.stream() if output.completion is not None]
    assert [len(completion.token_ids) for completion in done] == [9] * 3
    assert engine.runner.rows.length_R[:3].tolist() == [48] * 3
    assert engine.pool.available == engine.pool.pages


def test_ops_are_left_as_they_were() -> None:
    taken: timing.Split = {}
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
        assert {timing.part_of(kernel) for kernel in kernels} == {part}


def test_presets_are_timed_on_any_flow_and_family() -> None:
    own = timing.schedule_named("qwen3-1.7b-0.86")
    assert own is not None
    assert (own.forced, own.family) == ((), None)
    other = timing.schedule_named("qwen3-1.7b-0.86", library.quest)
    assert other is not None
    Rule(flow=library.quest).check(other, page=16, family="llama")
