"""Packs made ahead: the same ones in the same order, errors, and an early end."""

import pytest
import torch

pytest.importorskip("pydantic")

from support.leftovers import marked, marking

from sparrow.train.packing import Pack, pack
from sparrow.train.prefetch import packs
from sparrow_recipes.warmup.config import DataConfig, StageConfig
from sparrow_recipes.warmup.documents import PuzzleDocuments

# A maker of the package itself: other processes can import it wherever the tests run.
STAGE = StageConfig(steps=30, tokens=1024, longest=150)
MAKE = PuzzleDocuments(data=DataConfig(assignments=0.0), stages=(STAGE,), context=1024)


def same(left: Pack, right: Pack) -> bool:
    names = ("ids_T", "positions_T", "bounds", "sources_R", "targets_R")
    return left.longest == right.longest and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in names
    )


def test_without_workers_each_pack_is_that_of_its_step() -> None:
    found = list(packs(MAKE, 3, 6))
    assert len(found) == 3
    for step, each in zip(range(3, 6), found, strict=True):
        assert same(each, pack(MAKE(step)))


def test_workers_give_the_same_packs_in_order() -> None:
    """More steps than are in the making at once, and fewer than workers could take."""
    for start, stop in ((0, 16), (29, 30)):
        alone = list(packs(MAKE, start, stop))
        with marking():
            together = list(packs(MAKE, start, stop, workers=2))
        assert len(alone) == len(together) == stop - start
        assert all(map(same, alone, together))


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_to_do(workers: int) -> None:
    assert list(packs(MAKE, 5, 5, workers=workers)) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_of_a_maker_comes_through(workers: int) -> None:
    """After the packs of the steps before it; a step behind the last stage has no documents."""
    short = MAKE.replace(stages=(STAGE.model_copy(update={"steps": 2}),))
    with marking():
        found = packs(short, 0, 9, workers=workers)
        assert same(next(found), pack(short(0)))
        assert same(next(found), pack(short(1)))
        with pytest.raises(ValueError, match="lies behind the last stage"):
            next(found)


def test_stopping_early_leaves_no_process() -> None:
    with marking() as mark:
        found = packs(MAKE, 0, 30, workers=2)
        assert same(next(found), pack(MAKE(0)))
        assert marked(mark)
        found.close()  # type: ignore[attr-defined]
