"""The benchmark of a layer's attention runs, names its parts, and counts bytes as a hand does."""

import json
from typing import Any

import pytest
import torch
from rich.console import Console

from sparrow import api, ops
from sparrow.bench import layer_attention, timing
from sparrow.bench.layer_attention import Bed, Heads, Shape
from sparrow.schema.base import to_dict
from sparrow.schema.bench import Benchmark
from sparrow.sparse.rule import Rule

TINY = {"batch": 2, "context": 256, "kept": 4, "head_size": 64, "layers": 1}
PARTS = ["select", "attend", "both", "append", "finish"]
RULE = Rule(dense_layers=frozenset())


def short_run(**changes: Any) -> Benchmark:
    return layer_attention.run(**{**TINY, "device": "cpu", "replays": 1, "rounds": 2, **changes})


@pytest.fixture(scope="module")
def result() -> Benchmark:
    return short_run()


def test_what_a_short_run_reports(result: Benchmark) -> None:
    json.dumps(to_dict(result))
    assert [row["part"] for row in result["rows"]] == ["dense", *PARTS]
    assert [row["flow"] for row in result["rows"]] == [None, *["block-mean"] * 5]
    assert result["dtype"] == "bfloat16"
    assert result["selection"] == ()  # what a GPU adds, a CPU does not
    for row in result["rows"]:
        assert (row["batch"], row["context"], row["kept"]) == (2, 256, 4)
        assert (row["table_pages"], row["layers"], row["calls"]) == (16, 1, 1)
        assert 0 < row["us_min"] <= row["us"] <= row["us_max"]
        assert len(row["us_rounds"]) == 2
        assert row["tb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e6)
        assert row["of_peak"] is None  # no published figure for a CPU


def test_bytes_by_hand(result: Benchmark) -> None:
    size = {row["part"]: row["bytes"] for row in result["rows"]}
    token = 8 * 64 * 2  # KV heads, head size, bf16
    assert size["dense"] == 2 * 256 * 2 * token  # rows, tokens, k and v
    assert size["select"] == 2 * 16 * token  # a landmark a page
    assert size["attend"] == 2 * (4 * 16) * 2 * token
    assert size["both"] == size["select"] + size["attend"]
    assert size["append"] == 2 * 2 * token
    assert size["finish"] == 2 * 2 * token + 2 * (15 + 1) * token  # the page's other keys
    (stored,) = result["flows"]
    assert stored["page_bytes"] == token
    assert stored["kv_page_bytes"] == 32 * token
    assert stored["of_kv"] == 1 / 32
    rows = short_run(batch=32, context=32, kept=1)["rows"]  # one append in a page finishes it
    (append,) = [row["bytes"] for row in rows if row["part"] == "append"]
    assert append == 32 * 2 * token + 2 * (15 + 1) * token


def test_bars_are_for_the_main_shape_on_a_gpu(result: Benchmark) -> None:
    dense, sparse = result["bars"]
    assert (dense["at_least"], dense["unit"], dense["met"]) == (4.2, "TB/s", None)
    assert (sparse["at_most"], sparse["unit"], sparse["met"]) == (215.0, "us", None)
    names = {"batch": 32, "context": 32_768, "kept": 256}
    rows = [
        {**names, "flow": None, "part": "dense", "us": 1000.0, "tb_per_s": 4.3},
        {**names, "flow": "block-mean", "part": "both", "us": 220.0, "tb_per_s": 3.0},
        {**names, "kept": 64, "flow": "block-mean", "part": "both", "us": 1.0, "tb_per_s": 3.0},
    ]
    dense, sparse = layer_attention._bars(Heads(device=torch.device("cuda")), rows)
    assert (dense["measured"], dense["met"]) == (4.3, True)
    assert (sparse["measured"], sparse["met"]) == (220.0, False)
    assert "missed" in layer_attention._verdict(sparse)


def test_several_flows_other_shapes_and_a_sweep() -> None:
    seen: list[str] = []
    sweep = [Shape(batch=2, context=length, kept=4) for length in (128, 512)]
    result = short_run(
        flows=[RULE, Rule(first=0, dense_layers=frozenset())],
        others=[Shape(batch=1, context=128, kept=3)],
        sweep=sweep,
        layers=2,
        progress=seen.append,
    )
    assert seen == ["2 rows of 256 tokens", "1 rows of 128 tokens", "selection by length"]
    names = ("block-mean", "block-mean (2)")
    assert [flow["flow"] for flow in result["flows"]] == list(names)
    expected = [(None, "dense"), *((name, part) for name in names for part in PARTS)]
    assert [(row["flow"], row["part"]) for row in result["rows"]] == expected * 2
    assert {row["calls"] for row in result["rows"]} == {2}
    found = [(row["flow"], row["context"], row["table_pages"]) for row in result["selection"]]
    assert found == [(name, length, 32) for name in names for length in (128, 512)]
    token = 8 * 64 * 2
    sizes = [row["bytes"] for row in result["selection"]]
    assert sizes == [2 * 8 * token, 2 * 32 * token] * 2
    Console(quiet=True).print(layer_attention.table(result))


def test_flows_share_keys_and_have_fields_of_their_own() -> None:
    heads = Heads(size=64, device=torch.device("cpu"))
    bed = Bed(heads, 2, 4, {"a": RULE, "b": RULE}, 1)
    a, b = bed.caches.values()
    assert a.field("k", 0).data_ptr() == b.field("k", 0).data_ptr()
    assert a.field("mean", 0).data_ptr() != b.field("mean", 0).data_ptr()
    mean_NGD = a.field("k", 0).float().mean(2).bfloat16()
    torch.testing.assert_close(a.field("mean", 0), mean_NGD)
    assert sorted(bed.table().flatten().tolist()) == list(range(8))


def test_layers_are_cold_where_a_flow_stores_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_attention, "device_memory", lambda _: 140 << 30)
    heads, flows = Heads(device=torch.device("cuda")), {"block-mean": RULE}
    count = layer_attention._layers
    assert count(heads, 32 * 2048, flows, 4) == 4  # 134 MB of landmarks a layer
    assert count(heads, 16 * 1024, flows, 4) == 8
    assert count(heads, 8 * 16_384, flows, 1) == 1
    monkeypatch.setattr(layer_attention, "device_memory", lambda _: 18 << 30)
    assert count(heads, 32 * 2048, flows, 4) == 2  # all that fits
    assert count(Heads(device=torch.device("cpu")), 1, flows, 4) == 1


def test_what_is_refused() -> None:
    sweep = [Shape(batch=batch, context=32, kept=1) for batch in (1, 2)]
    for changes, told in (
        ({"flows": [Rule()]}, "layer 0"),
        ({"context": 250}, "context"),
        ({"batch": 0}, "batch"),
        ({"kept": 0}, "kept"),
        ({"sweep": sweep}, "sweep"),
    ):
        with pytest.raises(ValueError, match=told):
            short_run(**changes)


def test_cases_take_turns() -> None:
    seen: list[str] = []
    cases = [
        timing.Case(names={"name": name}, bytes=8, calls=[lambda name=name: seen.append(name)] * 2)
        for name in "ab"
    ]
    rows = timing.measure(cases, torch.device("cpu"), replays=1, rounds=2)
    assert "".join(seen) == "aabb" * 4  # one that compiles, one that does not count, two that do
    assert [(row["name"], row["calls"], len(row["us_rounds"])) for row in rows] == [
        ("a", 2, 2),
        ("b", 2, 2),
    ]


def test_the_verb_goes_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparrow.models.checkpoint.pick_device", torch.device)
    for device, module in (("cuda", "layer_attention"), ("cpu", "decode_attention")):
        monkeypatch.setattr(f"sparrow.bench.{module}.run", lambda **_: {"by": module})  # noqa: B023
        assert api.bench_attention(device=device) == {"by": module}
    with pytest.raises(ValueError, match="device"):
        api.bench_attention(device="meta")


def test_the_parts_agree_with_the_ops() -> None:
    """`both` is attention over what `select` keeps, and keeping everything is dense."""
    heads = Heads(size=64, device=torch.device("cpu"), dtype=torch.float32)
    bed = Bed(heads, 2, 8, {"rule": RULE}, 1)
    shape = Shape(batch=2, context=128, kept=8)
    (row,) = layer_attention._rows(bed, shape, [bed.table()])
    torch.testing.assert_close(row.both("rule"), row.attend())
    (few,) = layer_attention._rows(bed, Shape(batch=2, context=128, kept=4), [row.table_BM])
    lists = few.select("rule")
    assert isinstance(lists, ops.PageLists)
    assert (lists.counts == 4).all()
    torch.testing.assert_close(few.both("rule"), few.attend(lists))
