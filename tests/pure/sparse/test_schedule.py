"""Schedules: look-up, what they refuse, how they read, and their files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparrow.schema.schedule import DENSE, LayerBudgets, Note, Schedule, kept_tokens


def schedule(**changes: Any) -> Schedule:
    settings = {"name": "three", "lengths": [0, 100, 200], "budgets": [64, 64, 128]}
    return Schedule(**(settings | {"dense_layers": (0, 1)} | changes))


def own(layer: int, budgets: list[int], head: int | None = None) -> LayerBudgets:
    return LayerBudgets(layer=layer, budgets=budgets, head=head)


def test_layers_and_heads_have_budgets_of_their_own_or_the_common_ones() -> None:
    made = schedule(layers=[own(4, [48, 48, 50], 2), own(5, [48, 96, 4096]), own(5, [48] * 3, 1)])
    assert [made.budget(150, layer) for layer in (None, 0, 1, 2, 5)] == [64, DENSE, DENSE, 64, 96]
    assert [made.budget(150, 5, head) for head in (None, 0, 1, 2)] == [96, 96, 48, 96]
    assert [made.budget(150, 4, head) for head in (None, 0, 1, 2)] == [64, 64, 64, 48]
    assert [made.budget(150, 0, head) for head in (None, 1)] == [DENSE, DENSE]
    lengths = np.array([150, 500])
    of_heads = np.mean([made.kept(lengths, 5, head) for head in range(3)], axis=0)
    assert made.kept_of_heads(lengths, 5, 3).tolist() == of_heads.tolist()
    assert made.kept_of_heads(lengths, 3, 3).tolist() == made.kept(lengths, 3).tolist()
    assert "layer (2 with budgets of their own) and KV head (2 with" in made.describe()


def test_describe_says_what_runs() -> None:
    rule = "first 1 and last 2 pages kept, dense layers: 0, 1"
    budget = "block-mean, page 16, budget 192 tokens"
    assert Schedule.fixed(192, dense_layers=(0, 1)).describe() == f"{budget}, {rule}"
    by_length = "budgets 64 to 128 tokens by length (3 bins)"
    assert schedule().describe() == f"three: block-mean, page 16, {by_length}, {rule}"
    by_layer = "budgets 48 to 96 tokens by layer (2 with budgets of their own)"
    assert by_layer in Schedule.fixed(48, layers=(own(2, [64]), own(4, [96]))).describe()
    assert Schedule.fixed(48).describe().endswith("dense layers: none")
    assert Schedule.fixed(DENSE).describe() == "dense"
    assert "budgets 64 to all tokens" in Schedule.fixed(DENSE, layers=(own(2, [64]),)).describe()


# Elsewhere.


def test_forced_it_says_what_it_was_made_for() -> None:
    made = schedule(family="qwen3")
    forced = made.forced_onto(family="llama", flow="quest", page=8, dense_layers={3})
    assert (forced.family, forced.flow, forced.page) == ("llama", "quest", 8)
    assert (forced.dense_layers, forced.budgets.tolist()) == ((3,), made.budgets.tolist())
    text = "; FORCED, made for family qwen3, flow block-mean, page 16, dense layers 0, 1"
    assert forced.describe().endswith("dense layers: 3" + text)
    twice = made.forced_onto(family="llama").forced_onto(family="qwen2", last=1)
    assert twice.describe().endswith("; FORCED, made for family qwen3, last 2")
    assert twice.forced_onto(family="qwen3", last=2) == made
    assert made.forced_onto(family="qwen3", page=16) == made
    assert schedule().forced_onto(family="llama") == schedule()
    with pytest.raises(ValueError, match="96 tokens"):
        schedule().forced_onto(page=32)


def test_forced_layers_that_are_dense_there_lose_their_budgets() -> None:
    layers = [own(at, [64, 64, 96]) for at in (2, 4)]
    forced = schedule(layers=layers).forced_onto(dense_layers=(2,))
    assert [item.layer for item in forced.layers] == [4]
    assert [forced.budget(250, layer) for layer in range(5)] == [128, 128, DENSE, 128, 96]


def test_refuses_what_is_no_schedule() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("name", {"name": ""}),
        ("family", {"family": ""}),
        ("lengths", {"lengths": []}),
        ("lengths", {"lengths": [1, 100, 200]}),
        ("lengths", {"lengths": [0, 100, 100]}),
        ("budgets", {"lengths": [0, 100]}),
        ("budgets", {"budgets": [47, 64, 64]}),
        ("budgets", {"budgets": [64, 96, 80]}),
        ("budgets", {"budgets": [64.0, 64, 64]}),
        ("budgets", {"page": 32}),
        ("page", {"page": 0}),
        ("first", {"first": -1}),
        ("last", {"last": 0}),
        ("dense_layers", {"dense_layers": (1, 0)}),
        ("dense_layers", {"dense_layers": (-1,)}),
        (r"layers\[0\]\.layer", {"layers": [own(1, [64] * 3)]}),
        ("layers", {"layers": [own(3, [64] * 3), own(2, [64] * 3)]}),
        ("layers", {"layers": [own(3, [64] * 3, 1), own(3, [64] * 3)]}),
        ("layers", {"layers": [own(3, [64] * 3, 1)] * 2}),
        (r"layers\[1\]\.budgets", {"layers": [own(2, [64] * 3), own(3, [64] * 2)]}),
        (r"layers\[0\]\.budgets", {"layers": [own(2, [64, 63, 64])]}),
        (r"layers\[0\]\.budgets", {"layers": [own(2, [16, 64, 64])]}),
    ]
    for field, changes in wrong:
        with pytest.raises(ValueError, match=field):
            schedule(**changes)
    with pytest.raises(ValueError, match="head"):
        own(3, [64], -1)


# Files.


def by_hand(path: Path) -> str:
    """A schedule's file without its digest, as people write it."""
    data = json.loads(path.read_text())
    del data["digest"]
    return json.dumps(data, indent=2)


def test_file_has_one_field_a_line_and_gives_the_schedule_back(tmp_path: Path) -> None:
    path = tmp_path / "three.json"
    made = schedule(
        layers=[own(5, [48, 96, 4096])],
        model="Qwen3-1.7B",
        family="qwen3",
        provenance=[Note(key="prompts", text='AIME "24"')],
    ).forced_onto(family="llama")
    made.save(path)
    assert Schedule.load(path) == made
    assert '  "lengths": [0, 100, 200],\n' in path.read_text()
    edited = path.read_text().replace("[64, 64, 128]", "[64, 64, 96]")
    path.write_text(edited)
    with pytest.raises(ValueError, match=r"three\.json: .*digest"):
        Schedule.load(path)
    path.write_text(by_hand(path))
    assert Schedule.load(path).budgets.tolist() == [64, 64, 96]


def test_a_wrong_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "edited.json"
    schedule().save(path)
    text = by_hand(path)
    for edited, field in (
        (text.replace('"page"', '"pages"'), "page"),
        (text.replace('"page": 16,', ""), "missing key 'page'"),
        (text.replace('"page"', '"page": 16, "page"'), "key 'page' twice"),
        (text.replace("100", "0", 1), "lengths"),
        (text[:-5], "JSON"),
        (json.dumps([text]), "a JSON object"),
    ):
        path.write_text(edited)
        with pytest.raises(ValueError, match=rf"schedule .*edited\.json: .*{field}"):
            Schedule.load(path)
    with pytest.raises(ValueError, match=r"gone\.json"):
        Schedule.load(tmp_path / "gone.json")


def test_kept_tokens_of_many_lengths_are_those_of_each() -> None:
    made = schedule(layers=(own(3, [48, 48, 128]),))
    lengths = np.arange(1, 400)
    for layer in range(5):
        expected = [kept_tokens(n, made.budget(n, layer)) for n in lengths.tolist()]
        assert made.kept(lengths, layer).tolist() == expected
