"""Documents of a step: a function of configuration and step alone, by shares, lengths, seeds."""

import pickle
from typing import Any

import pytest

from sparrow.schema.episode import Document
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import EOS, WORDS, decode, encode
from sparrow_recipes.warmup import documents
from sparrow_recipes.warmup.config import DataConfig, StageConfig
from sparrow_recipes.warmup.documents import EVALUATION, PuzzleDocuments, document

SHORT = StageConfig(steps=3, tokens=1024, shortest=100, longest=200)
LATER = StageConfig(steps=5, tokens=2048, shortest=300, longest=400)


def maker(*stages: StageConfig, context: int = 8192, **data: Any) -> PuzzleDocuments:
    return PuzzleDocuments(data=DataConfig(**data), stages=stages or (SHORT,), context=context)


def stage(**changes: Any) -> StageConfig:
    return StageConfig(**{"steps": 100, "tokens": 2048, "shortest": 100, "longest": 200, **changes})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int, int]]:
    """Puzzle, seed and length of every document that is made from now on."""
    seen: list[tuple[Any, int, int]] = []

    def spy(puzzle: Any, seed: int, length: int) -> Document:
        seen.append((puzzle, seed, length))
        return document(puzzle, seed, length)

    monkeypatch.setattr(documents, "document", spy)
    return seen


def test_a_step_is_the_same_twice_in_any_order_and_steps_differ() -> None:
    make, copy = maker(), pickle.loads(pickle.dumps(maker()))
    everything = [copy(step) for step in range(3)]
    assert [make(2), make(0), make(1)] == [everything[2], everything[0], everything[1]]
    assert make(1) == maker()(1)
    assert make(1) not in (make(0), maker(seed=1)(1))


def test_documents_are_prompts_with_right_chains() -> None:
    """A share of 0 leaves a family out."""
    for name, puzzle in PUZZLES.items():
        row = puzzle.row(5, 150)
        one = document(puzzle, 5, 150)
        prompt, answer = one.ids[: one.prompt].tolist(), one.ids[one.prompt :].tolist()
        assert prompt == encode(row.prompt), name
        assert answer.index(WORDS.index(EOS)) == len(answer) - 1
        assert puzzle.reward(row, decode(answer)).acc == 1
        make = maker(**{other: float(other == name) for other in PUZZLES})
        assert {WORDS[one.ids[0]] for step in range(3) for one in make(step)} == {name}


def test_families_lengths_and_seeds(drawn: list[tuple[Any, int, int]]) -> None:
    """Families by their shares, lengths evenly on a log scale, within four standard errors.

    Evaluation counts its seeds from 0 and stays below those that training draws.
    """
    make = maker(stage(longest=400), assignments=0.25, countdown=0.25, graph=0.5)
    for step in range(25):
        make(step)
    puzzles, seeds, lengths = zip(*drawn, strict=True)
    names = [puzzle.name for puzzle in puzzles]
    total = len(drawn)
    assert total > 150
    for name, share in (("assignments", 0.25), ("countdown", 0.25), ("graph", 0.5)):
        assert abs(names.count(name) / total - share) < 4 * (share * (1 - share) / total) ** 0.5
    assert 100 <= min(lengths) < 130
    assert 370 < max(lengths) <= 400
    below = sum(length < 200 for length in lengths) / total  # the geometric mean
    assert abs(below - 0.5) < 4 * 0.5 / total**0.5
    assert min(seeds) >= EVALUATION == 2**20
    assert len(set(seeds)) == total


def test_each_stage_has_its_steps(drawn: list[tuple[Any, int, int]]) -> None:
    make = maker(SHORT, LATER)
    for step, low, high, tokens in ((2, 100, 200, 1024), (3, 300, 400, 2048), (7, 300, 400, 2048)):
        drawn.clear()
        found = make(step)
        assert all(low <= length <= high for _, _, length in drawn)
        assert sum(map(len, found)) <= tokens
    with pytest.raises(ValueError, match="step 8"):
        make(8)


def test_a_step_is_filled_and_nothing_is_too_long() -> None:
    """It ends with the document that has no room; those are at most about twice their dial."""
    for tokens, context in ((1024, 8192), (4096, 500), (1024, 300)):
        make = maker(stage(tokens=tokens, longest=1500), context=context)
        for step in range(4):
            lengths = [*map(len, make(step))]
            assert 0 < max(lengths) <= min(tokens, context)
            assert sum(lengths) <= tokens
    make = maker(stage(tokens=4096))
    assert all(sum(map(len, make(step))) > 4096 - 600 for step in range(5))


def test_revisit_is_passed_on(drawn: list[tuple[Any, int, int]]) -> None:
    for revisit in (False, True):
        drawn.clear()
        for step in range(3):
            maker(revisit=revisit)(step)
        seen = {(puzzle.name, getattr(puzzle, "revisit", None)) for puzzle, _, _ in drawn}
        assert {own for name, own in seen if name != "countdown"} == {revisit}
        assert {name for name, _ in seen} == set(PUZZLES)
