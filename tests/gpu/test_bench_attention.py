"""The benchmark of a layer's attention on a GPU: graphs are captured and replayed."""

import json

import pytest
import torch
from rich.console import Console

pytest.importorskip("triton")

from sparrow.benchmarks import layer_attention, timing
from sparrow.benchmarks.layer_attention import Shape
from sparrow.schema.base import to_dict


def test_a_short_run() -> None:
    result = layer_attention.run(
        device="cuda",
        shape=Shape(batch=2, context=512, kept=4),
        layers=2,
        others=[Shape(batch=1, context=256, kept=3)],
        replays=2,
        rounds=1,
    )
    json.dumps(to_dict(result))
    parts = ["dense", "select", "attend", "both", "append", "finish"]
    assert [row.part for row in result.rows] == parts * 2
    assert all(row.us > 0 for row in result.rows)
    Console(quiet=True).print(timing.table(result))


def test_a_captured_graph_does_the_work_again() -> None:
    count = torch.zeros((), device="cuda")
    replay = timing.captured(lambda: count.add_(1), count.device)
    assert count.item() == 1  # capturing runs nothing
    replay()
    replay()
    assert count.item() == 3
    assert timing.device_seconds(replay, 4, count.device) > 0
    assert count.item() == 7
