"""Schedules: look-up, what they refuse, how they read, and their files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparrow.schema.schedule import DENSE, LayerBudgets, Note, Schedule, kept_tokens


def schedule(**changes: Any) -> Schedule:
    settings = {"name": "three", "lengths": [0, 100, 200], "budgets": [64, 64, 128]} | changes
    return Schedule(**settings)


def test_the_bin_that_holds_the_length_gives_the_budget() -> None:
    made = schedule(budgets=[64, 80, 128])
    looked_up = {n: made.budget(n) for n in (0, 1, 99, 100, 101, 199, 200, 10**6)}
    assert looked_up == {0: 64, 1: 64, 99: 64, 100: 80, 101: 80, 199: 80, 200: 128, 10**6: 128}


def test_layers_have_budgets_of_their_own_or_the_common_ones() -> None:
    made = schedule(layers=[LayerBudgets(layer=5, budgets=[48, 96, 4096])])
    assert [made.budget(150, layer) for layer in (None, 0, 1, 2, 5)] == [64, DENSE, DENSE, 64, 96]


def test_heads_have_budgets_of_their_own_or_their_layers() -> None:
    made = schedule(
        layers=[
            LayerBudgets(layer=4, head=2, budgets=[48, 48, 50]),
            LayerBudgets(layer=5, budgets=[48, 96, 4096]),
            LayerBudgets(layer=5, head=1, budgets=[48, 49, 50]),
        ]
    )
    assert [made.budget(150, 5, head) for head in (None, 0, 1, 2)] == [96, 96, 49, 96]
    assert [made.budget(150, 4, head) for head in (None, 0, 1, 2)] == [64, 64, 64, 48]
    assert [made.budget(150, 0, head) for head in (None, 1)] == [DENSE, DENSE]
    lengths = np.array([150, 500])
    of_heads = [[made.kept(lengths, 5, head) for head in range(3)], [made.kept(lengths, 3)]]
    assert made.kept_of_heads(lengths, 5, 3).tolist() == np.mean(of_heads[0], axis=0).tolist()
    assert made.kept_of_heads(lengths, 3, 3).tolist() == of_heads[1][0].tolist()
    assert "layer (2 with budgets of their own) and KV head (2 with" in made.describe()


def test_fixed_is_one_budget_at_every_length() -> None:
    made = Schedule.fixed(192, dense_layers=(3,))
    assert [made.budget(length, 0) for length in (0, 17, 10**6)] == [192] * 3
    assert (made.name, made.dense_layers) == ("fixed-192", (3,))


def test_describe_says_what_runs() -> None:
    rule = "first 1 and last 2 pages kept, dense layers: 0, 1"
    assert Schedule.fixed(192).describe() == f"block-mean, page 16, budget 192 tokens, {rule}"
    by_length = "budgets 64 to 128 tokens by length (3 bins)"
    assert schedule().describe() == f"three: block-mean, page 16, {by_length}, {rule}"
    own = (LayerBudgets(layer=2, budgets=[64]), LayerBudgets(layer=4, budgets=[96]))
    by_layer = "budgets 48 to 96 tokens by layer (2 with budgets of their own)"
    assert by_layer in Schedule.fixed(48, layers=own).describe()
    assert Schedule.fixed(48, dense_layers=()).describe().endswith("dense layers: none")


def test_what_keeps_everything_is_dense() -> None:
    assert Schedule.fixed(DENSE).describe() == "dense"
    own = (LayerBudgets(layer=2, budgets=[64]),)
    assert "budgets 64 to all tokens" in Schedule.fixed(DENSE, layers=own).describe()


# Elsewhere.


def test_a_place_is_compared_field_by_field() -> None:
    made = schedule(family="qwen3")
    assert made.misfits({"family": "qwen3", "page": 16, "dense_layers": (0, 1)}) == {}
    assert made.misfits({"family": "llama", "page": 8}) == {"family": "llama", "page": 8}
    assert made.misfits({"family": None, "flow": "quest"}) == {"flow": "quest"}
    assert schedule().misfits({"family": "llama"}) == {}  # made by hand: for any


def test_forced_it_says_what_it_was_made_for() -> None:
    made = schedule(family="qwen3")
    forced = made.forced_onto(family="llama", flow="quest", page=8, dense_layers={3})
    assert (forced.family, forced.flow, forced.page) == ("llama", "quest", 8)
    assert forced.dense_layers == (3,)
    assert forced.budgets.tolist() == made.budgets.tolist()
    text = "; FORCED, made for family qwen3, flow block-mean, page 16, dense layers 0, 1"
    assert forced.describe().endswith("dense layers: 3" + text)


def test_forced_where_it_holds_it_is_the_same() -> None:
    made = schedule(family="qwen3")
    assert made.forced_onto(family="qwen3", page=16) == made
    assert schedule().forced_onto(family="llama") == schedule()


def test_forced_twice_it_says_where_it_came_from() -> None:
    once = schedule(family="qwen3").forced_onto(family="llama")
    twice = once.forced_onto(family="qwen2", last=1)
    assert twice.describe().endswith("; FORCED, made for family qwen3, last 2")
    assert twice.forced_onto(family="qwen3", last=2) == schedule(family="qwen3")


def test_forced_layers_that_are_dense_there_lose_their_budgets() -> None:
    own = [LayerBudgets(layer=at, budgets=[64, 64, 96]) for at in (2, 4)]
    forced = schedule(layers=own).forced_onto(dense_layers=(2,))
    assert [item.layer for item in forced.layers] == [4]
    assert [forced.budget(250, layer) for layer in range(5)] == [128, 128, DENSE, 128, 96]


def test_forcing_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"64 tokens in bin 0, allowed: >= 96, the first 1 and"):
        schedule().forced_onto(page=32)
    with pytest.raises(ValueError, match=r"forced_onto: got \['model'\], allowed: family, flow"):
        schedule().forced_onto(model="x")


# Changes on the way.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, r"Schedule\.name: got an empty text"),
        ({"family": ""}, r"Schedule\.family: got an empty text"),
        ({"forced": [Note(key="model", text="b")]}, r"forced: got \['model'\], allowed: fields"),
        ({"forced": [Note(key="page", text="8")] * 2}, r"forced: got \['page', 'page'\]"),
        ({"lengths": []}, r"Schedule\.lengths: got \[\], allowed: bins of which the first .* 0"),
        ({"lengths": [1, 100, 200]}, r"Schedule\.lengths: got \[1, 100, 200\]"),
        ({"lengths": [0, 100, 100]}, r"Schedule\.lengths: got \[0, 100, 100\], .* each above"),
        ({"lengths": [0, 100]}, r"Schedule\.budgets: got 3 budgets, allowed: .* each of 2 bins"),
        ({"budgets": [47, 64, 64]}, r"got 47 tokens in bin 0, allowed: >= 48, the first 1 and las"),
        ({"budgets": [64, 96, 80]}, r"got 80 tokens in bin 2 after 96, allowed: .* not fall"),
        ({"budgets": [64.0, 64, 64]}, "budgets"),
        ({"page": 0}, r"Schedule\.page: got 0, allowed: an integer >= 1"),
        ({"page": 32}, r"Schedule\.budgets: got 64 tokens in bin 0, allowed: >= 96"),
        ({"first": -1}, r"Schedule\.first: got -1"),
        ({"last": 0}, r"Schedule\.last: got 0"),
        ({"dense_layers": (1, 0)}, r"Schedule\.dense_layers: got \[1, 0\]"),
        ({"dense_layers": (-1,)}, r"Schedule\.dense_layers: got \[-1\]"),
        ({"provenance": [Note(key="a", text="b")] * 2}, r"provenance: got \['a', 'a'\]"),
        ({"name": "x\x1b[2J"}, r"Schedule\.name"),
        ({"provenance": [Note(key="a", text="\x07")]}, r"Schedule\.provenance"),
    ],
)
def test_refuses_what_is_no_schedule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(**changes)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(1, [64, 64, 64])], r"layers\[0\]\.layer: got 1, .* not dense \(dense: \[0, 1\]\)"),
        ([(3, [64] * 3), (2, [64] * 3)], r"Schedule\.layers: got \[3, 2\]"),
        ([(3, [64] * 3, 1), (3, [64] * 3)], r"Schedule\.layers: got \[\(3, 1\), 3\], .* before"),
        ([(3, [64] * 3, 1)] * 2, r"Schedule\.layers: got \[\(3, 1\), \(3, 1\)\]"),
        ([(3, [64] * 3, -1)], r"layers\[0\]\.head: got -1, allowed: the number of a KV head"),
        ([(2, [64] * 3), (3, [64] * 2)], r"layers\[1\]\.budgets: got 2 budgets"),
        ([(2, [64, 63, 64])], r"layers\[0\]\.budgets: got 63 tokens in bin 1 after 64"),
        ([(2, [16, 64, 64])], r"layers\[0\]\.budgets: got 16 tokens in bin 0, allowed: >= 48"),
    ],
)
def test_refuses_layers_that_do_not_fit(layers: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(
            layers=[
                LayerBudgets(layer=at, budgets=row, head=next(iter(head), None))
                for at, row, *head in layers
            ]
        )


def test_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match="a length of -1 tokens, allowed: >= 0"):
        schedule().budget(-1)


def test_file_has_one_field_a_line_and_gives_the_schedule_back(tmp_path: Path) -> None:
    path = tmp_path / "three.json"
    made = schedule(
        layers=[LayerBudgets(layer=5, budgets=[48, 96, 4096])],
        model="Qwen3-1.7B",
        family="qwen3",
        provenance=[Note(key="prompts", text='AIME "24"')],
    ).forced_onto(family="llama")
    made.save(path)
    assert Schedule.load(path) == made
    assert '  "lengths": [0, 100, 200],\n' in path.read_text()
    assert Schedule.load(path).describe().endswith("; FORCED, made for family qwen3")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace('"page"', '"pages"'), "page"),
        (lambda text: text.replace('  "page": 16,\n', ""), "missing key 'page'"),
        (lambda text: text.replace('  "page"', '  "page": 16,\n  "page"'), "key 'page' twice"),
        (lambda text: text.replace("[0, 100", "[5, 100"), r"Schedule\.lengths: got \[5, 100"),
        (lambda text: text[:-5], "JSON"),
        (lambda text: json.dumps([text]), "a JSON object"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, edit: Any, message: str) -> None:
    path = tmp_path / "edited.json"
    schedule().save(path)
    path.write_text(edit(by_hand(path)))
    with pytest.raises(ValueError, match=rf"schedule .*edited\.json: .*{message}"):
        Schedule.load(path)


def by_hand(path: Path) -> str:
    """A schedule's file without its digest, as people write it."""
    lines = path.read_text().split("\n")
    kept = [line for line in lines if not line.startswith('  "digest"')]
    kept[-3] = kept[-3].rstrip(",")
    return "\n".join(kept)


def test_an_edited_file_is_refused_unless_its_digest_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "edited.json"
    schedule(budgets=[64, 64, 64]).save(path)
    edited = path.read_text().replace("[64, 64, 64]", "[64, 64, 96]")
    path.write_text(edited)
    with pytest.raises(ValueError, match=r"edited\.json: .*digest"):
        Schedule.load(path)
    path.write_text(by_hand(path))
    assert Schedule.load(path).budgets.tolist() == [64, 64, 96]


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.json cannot be read: No such file"):
        Schedule.load(tmp_path / "gone.json")


def test_kept_tokens_by_hand() -> None:
    assert kept_tokens(0, 64) == 0
    assert kept_tokens(7, 64) == 7
    assert kept_tokens(160, 64) == 64  # four whole pages
    assert kept_tokens(159, 64) == 63  # three and the unfinished one, of 15
    assert kept_tokens(161, 63) == 49  # three and the unfinished one, of 1
    assert kept_tokens(160, 0) == 48  # the reserved pages
    assert kept_tokens(33, 16, 16, 1, 1) == 17


def test_kept_tokens_refuses_what_no_sequence_has() -> None:
    with pytest.raises(ValueError, match="got length -1, page 16, first 1, last 2, allowed"):
        kept_tokens(-1, 64)


def test_kept_of_many_lengths_is_kept_tokens_of_each() -> None:
    schedule = Schedule(
        name="own",
        lengths=[0, 100, 200],
        budgets=[64, 96, 160],
        layers=(LayerBudgets(layer=3, budgets=[48, 48, 128]),),
    )
    lengths = np.arange(1, 400)
    for layer in range(5):
        expected = [kept_tokens(n, schedule.budget(n, layer)) for n in lengths.tolist()]
        assert schedule.kept(lengths, layer).tolist() == expected
