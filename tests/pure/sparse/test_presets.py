"""The published schedules: all there, converted as said, looked up where the release does."""

import json
from hashlib import sha256

import pytest

from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.schedule import Schedule
from sparrow.sparse import preset, preset_names

TARGETS = {
    "1.7b": ("0.75", "0.80", "0.83", "0.86", "0.88", "0.90", "0.92", "0.94"),
    "4b": ("0.75", "0.80", "0.86", "0.88", "0.90", "0.92"),
    "8b": ("0.75", "0.80", "0.86", "0.87", "0.92"),
    "14b": ("0.86",),
}
NAMES = [f"qwen3-{size}-{target}" for size, targets in TARGETS.items() for target in targets]

# Top-k pages of qwen3-1.7b-0.86 as published, as (k, how many bins in a row).
PUBLISHED = [(29, 1), (61, 1), (93, 2), (125, 1), (157, 1), (189, 1), (221, 2), (253, 11)]
PAGES = [k for k, bins in PUBLISHED for _ in range(bins)]
# Of the budgets of all twenty, so that none changes unseen.
DIGEST = "504255ca95c0867ffd1d5d12623aa1df7d1229057b1f9e4b68fe2795c556b693"


def test_all_twenty_are_there_and_the_shipped_models() -> None:
    ours = ["small-0.86", "small-rl-0.80", "small-rl-0.86", "tiny-0.86"]
    assert list(preset_names()) == [*NAMES, *ours]
    assert preset("tiny-0.86").model == "tiny"
    assert len(NAMES) == 20


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_a_schedule_of_the_papers_rule(name: str) -> None:
    made = preset(name)
    assert (made.flow, made.page, made.first, made.last) == ("block-mean", 16, 1, 2)
    assert (made.name, made.dense_layers) == (name, (0, 1))
    assert made.model == "Qwen3-" + name.split("-")[1].upper()
    assert (made.family, made.forced) == ("qwen3", ())
    assert made.lengths.tolist() == [0, *(2000 * i - 15 for i in range(1, 20))]
    assert from_dict(Schedule, to_dict(made)) == made
    notes = {note.key: note.text for note in made.provenance}
    assert "arXiv 2606.08446" in notes["source"]
    assert notes["target"].endswith(name.split("-")[2])
    assert "(k + 3) * 16" in notes["conversion"]


def test_budgets_are_the_published_ones_and_count_the_reserved_pages_too() -> None:
    assert preset("qwen3-1.7b-0.86").budgets.tolist() == [(k + 3) * 16 for k in PAGES]
    assert preset("qwen3-8b-0.86").budgets[17] == (385 + 3) * 16  # a probable slip, kept
    budgets = {name: preset(name).budgets.tolist() for name in NAMES}
    assert sha256(json.dumps(budgets).encode()).hexdigest() == DIGEST


def test_looked_up_by_pages_as_in_the_release() -> None:
    made = preset("qwen3-1.7b-0.86")
    for length in range(1, 50_000):
        bin = min(-(-length // 16) // 125, 19)
        assert made.budget(length) == (PAGES[bin] + 3) * 16, length


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'qwen3-4b-0\.87', .*\?; known: qwen3-1\.7b"):
        preset("qwen3-4b-0.87")
    with pytest.raises(ValueError, match=r"unknown preset 'x'; known: qwen3.*14b-0\.86"):
        preset("x")
