"""Groups of layers, and budgets shared out by what they lose."""

import numpy as np
import pytest
from support.specs import TINY

from sparrow.calibrate.arms import DENSE, Arm, arm, layers_alone, variant_of
from sparrow.calibrate.deciding import groups_of, shares, slope
from sparrow.schema.schedule import DENSE as EVERYTHING
from sparrow.schema.surface import Cell, LayerLoss
from sparrow.sparse.flows.library import block_mean


def loss(layers: tuple[int, ...], p05: float) -> LayerLoss:
    return LayerLoss(
        variant="v", budget=64, layers=layers, p05=p05, low=0, high=1, mean=1, tokens=9, prompts=9
    )


def seen(budget: int, p05: float, start: int = 4096) -> Cell:
    numbers = dict.fromkeys(("tokens", "sequences", "prompts", "uncertain"), 9)
    rest = dict.fromkeys(("mean", "p01", "low", "high", "p50", "above"), 0.5)
    return Cell(
        variant="v",
        budget=budget,
        start=start,
        stop=start + 1,
        p05=p05,
        beta=(),
        uncertain_p05=None,
        **numbers,
        **rest,
    )


def test_groups() -> None:
    assert groups_of(5, 2) == [(0, 1, 2), (3, 4)]
    assert groups_of(4, 9) == [(0,), (1,), (2,), (3,)]
    assert groups_of(4, 2, dense=[0, 1]) == [(2,), (3,)]
    assert groups_of(2, 1, dense=[0, 1]) == []


def test_only_leaves_the_others_dense() -> None:
    variant = variant_of(block_mean, "block_mean", TINY, shares=(2.0, 1.0, 0.5))
    schedule = layers_alone(variant, block_mean, 64, (1,), 3).schedule
    assert schedule is not None
    assert schedule.dense_layers == (0, 2)
    assert schedule.budgets_of(1).tolist() == [64]


def test_the_slope_of_a_power_law_is_found() -> None:
    cells = [seen(b, 1 - 20 * b**-0.7) for b in (128, 256, 512)]
    assert slope(cells) == pytest.approx(0.7)
    assert slope(cells[:1]) == 1.0
    assert slope([seen(8192, 0.9), seen(9000, 0.99)]) == 1.0  # budgets that keep everything


def test_shares_follow_what_groups_lose() -> None:
    cells = [seen(b, 1 - 20 * b**-1.0) for b in (128, 256)]
    found = shares([loss((0, 1), 0.99), loss((2,), 0.84)], cells, 3)
    # c^(1/2) of 0.005, 0.005, 0.16: 0.0707, 0.0707, 0.4; over their mean: 0.39, 0.39, 2.22.
    assert found == pytest.approx((0.4, 0.4, 2.2))
    assert shares([loss((0, 1, 2), 0.9)], cells, 3) == (1.0, 1.0, 1.0)
    # Equal layers in groups of unequal size: a group's loss is the sum of its layers'.
    assert shares([loss((0, 1), 0.9), loss((2,), 0.95)], cells, 3) == (1.0, 1.0, 1.0)


def test_extreme_shares_are_cut_and_the_mean_stays() -> None:
    found = shares([loss((n,), 0.2 if n == 0 else 0.9999) for n in range(10)], [], 10)
    assert max(found) == 4.0
    assert min(found) >= 0.25
    assert np.mean(found) == pytest.approx(1, abs=0.03)


def test_shares_become_budgets_of_layers() -> None:
    variant = variant_of(block_mean, "block_mean", TINY, shares=(0.25, 1.0, 2.0))
    schedule = variant.schedule([0, 100], [96, EVERYTHING])
    assert schedule.budgets_of(0).tolist() == [48, EVERYTHING]  # never below reserved pages
    assert schedule.budgets_of(1).tolist() == [96, EVERYTHING]
    assert schedule.budgets_of(2).tolist() == [192, EVERYTHING]


def test_arms_of_equal_content_are_equal() -> None:
    variant = variant_of(block_mean, "block_mean", TINY)
    assert arm(variant, block_mean, 64) == arm(variant, block_mean, 64)
    assert arm(variant, block_mean, 64) != arm(variant, block_mean, 80)
    assert Arm(name="other name") == DENSE
    assert len({arm(variant, block_mean, 64), arm(variant, block_mean, 64)}) == 1
    assert np.unique([len(arm(variant, block_mean, b).key) for b in (64, 80)]).size == 1
