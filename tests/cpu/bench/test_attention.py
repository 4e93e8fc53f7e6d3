"""The benchmark of a layer's attention runs, names its parts, and counts bytes as a hand does."""

from itertools import product
from typing import Any

import pytest
import torch
from support.results import check_output

from sparrow.benchmarks import layer_attention, timing
from sparrow.benchmarks.layer_attention import Heads, LayerStack, Shape
from sparrow.schema.bench import LayerBenchmark
from sparrow.sparse.rule import Rule

SMALL = Shape(batch=2, context=256, kept=4)
PARTS = ["select", "attend", "both", "append", "finish"]
RULE = Rule(dense_layers=frozenset())
TOKEN = 8 * 64 * 4  # KV heads, head size, fp32


def short_run(shape: Shape = SMALL, **changes: Any) -> LayerBenchmark:
    settings = {"device": "cpu", "head_size": 64, "layers": 1, "replays": 1, "rounds": 2}
    return layer_attention.run(shape=shape, **settings | changes)


def test_what_a_short_run_reports_and_bytes_by_hand() -> None:
    result = short_run()
    assert [row.part for row in result.rows] == ["dense", "read", *PARTS]
    assert [row.flow for row in result.rows] == [None, None, *["block-mean"] * 5]
    assert result.dtype == "float32"
    for row in result.rows:
        assert (row.batch, row.context, row.kept) == (2, 256, 4)
        assert (row.layers, row.calls) == (1, 1)
        assert 0 < row.us_min <= row.us <= row.us_max
        assert len(row.us_rounds) == 2
        assert row.tb_per_s == pytest.approx(row.bytes / row.us / 1e6)
        assert row.of_peak is None  # no published figure for a CPU
        assert row.of_read == pytest.approx(row.tb_per_s / result.rows[1].tb_per_s)
    size = {row.part: row.bytes for row in result.rows}
    assert size["dense"] == size["read"] == 2 * 256 * 2 * TOKEN  # rows, tokens, k and v
    assert size["select"] == 2 * 16 * TOKEN  # a landmark a page
    assert size["attend"] == 2 * (4 * 16) * 2 * TOKEN
    assert size["both"] == size["select"] + size["attend"]
    assert size["append"] == 2 * 2 * TOKEN
    assert size["finish"] == 2 * 2 * TOKEN + 2 * (15 + 1) * TOKEN  # the page's other keys
    (stored,) = result.flows
    assert (stored.page_bytes, stored.kv_page_bytes, stored.of_kv) == (TOKEN, 32 * TOKEN, 1 / 32)
    rows = short_run(Shape(batch=32, context=32, kept=1)).rows
    (append,) = [row.bytes for row in rows if row.part == "append"]
    assert append == 32 * 2 * TOKEN + 2 * (15 + 1) * TOKEN  # one append in a page finishes it


def test_several_flows_and_other_shapes() -> None:
    seen: list[str] = []
    result = short_run(
        flows=[RULE, Rule(first=0, dense_layers=frozenset())],
        others=[Shape(batch=1, context=128, kept=3)],
        layers=2,
        progress=seen.append,
    )
    assert seen == ["2 rows of 256 tokens", "1 rows of 128 tokens"]
    names = ("block-mean", "block-mean (2)")
    assert [flow.flow for flow in result.flows] == list(names)
    expected = [(None, "dense"), (None, "read"), *product(names, PARTS)]
    assert [(row.flow, row.part) for row in result.rows] == expected * 2
    assert {row.calls for row in result.rows} == {2}
    check_output(result)


def test_flows_share_keys_and_have_fields_of_their_own() -> None:
    heads = Heads(size=64, device=torch.device("cpu"))
    bed = LayerStack(heads, Shape(batch=2, context=64, kept=1), {"a": RULE, "b": RULE}, 1)
    a, b = bed.caches.values()
    assert a.field("k", 0).data_ptr() == b.field("k", 0).data_ptr()
    assert a.field("mean", 0).data_ptr() != b.field("mean", 0).data_ptr()
    mean_NGD = a.field("k", 0).mean(2)
    torch.testing.assert_close(a.field("mean", 0), mean_NGD)
    assert sorted(bed.table_BM.flatten().tolist()) == list(range(8))


def test_the_parts_agree_with_the_ops() -> None:
    """`both` is attention over what `select` keeps, and keeping everything is dense."""
    heads = Heads(size=64, device=torch.device("cpu"))
    bed = LayerStack(heads, Shape(batch=2, context=128, kept=8), {"rule": RULE}, 1)
    every = bed.select(0, "rule")
    assert every is not None
    torch.testing.assert_close(bed.both(0, "rule", every), bed.attend(0))
    few = LayerStack(heads, Shape(batch=2, context=128, kept=4), {"rule": RULE}, 1)
    lists = few.select(0, "rule")
    assert (lists.counts == 4).all()
    torch.testing.assert_close(few.both(0, "rule", lists), few.attend(0, lists))


def test_layers_are_cold_where_a_flow_stores_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_attention, "device_memory", lambda _: 140 << 30)
    heads, flows = Heads(device=torch.device("cuda")), {"block-mean": RULE}
    count = layer_attention._layers
    assert count(heads, 32 * 2048, flows) == 4  # 134 MB of landmarks a layer
    assert count(heads, 16 * 1024, flows) == 8
    monkeypatch.setattr(layer_attention, "device_memory", lambda _: 18 << 30)
    assert count(heads, 32 * 2048, flows) == 2  # all that fits
    assert count(Heads(device=torch.device("cpu")), 1, flows) == 1


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0"):
        short_run(flows=[Rule(dense_layers=frozenset({0}))])
    for context, kept in ((250, 4), (256, 0), (256, 17)):
        with pytest.raises(ValueError, match="context"):
            short_run(Shape(batch=1, context=context, kept=kept))


def test_cases_take_turns() -> None:
    seen: list[str] = []
    cases = [
        timing.TimedCase(
            names={"name": name}, bytes=8, calls=[lambda name=name: seen.append(name)] * 2
        )
        for name in "ab"
    ]
    rows = timing.measure(cases, torch.device("cpu"), replays=1, rounds=2)
    assert "".join(seen) == "aabb" * 4  # one that compiles, one that does not count, two that do
    assert [(row["name"], row["calls"], len(row["us_rounds"])) for row in rows] == [
        ("a", 2, 2),
        ("b", 2, 2),
    ]
