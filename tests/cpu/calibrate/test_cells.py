"""Hand-made tokens to figures, open questions, and budgets shared out by what layers lose."""

import numpy as np
import pytest
from support.specs import TINY
from support.surfaces import cell

from sparrow.calibration.cells import (
    Tokens,
    cells,
    estimators,
    layer_groups,
    open_questions,
    shares,
    slope,
)
from sparrow.calibration.replay import DENSE, Arm, make_arm, make_variant
from sparrow.calibration.store import MeasuredSequence
from sparrow.schema.schedule import DENSE as EVERYTHING
from sparrow.schema.surface import Cell, LayerLoss
from sparrow.sparse.flows.library import block_mean


def measured(
    prompt: int, alpha: list[float], *, sample: int = 0, ratio: float | None = 1.0
) -> MeasuredSequence:
    return MeasuredSequence(
        prompt=prompt,
        sample=sample,
        prompt_tokens=10,
        first=11,
        ids=np.zeros(11 + len(alpha), np.int32),
        alpha=alpha,
        entropy=np.linspace(0, 0.3, len(alpha), dtype=np.float32),
        below=np.full(len(alpha), 0.125, np.float32),
        above=np.full(len(alpha), 0.25, np.float32),
        ratio=None if ratio is None else np.full(len(alpha), ratio, np.float32),
    )


def test_tokens_are_placed_by_total_length_and_by_position() -> None:
    tokens = Tokens.of([measured(1, [0.5, 0.6]), measured(0, [0.7, 0.8, 0.9])])
    assert tokens.prompt.tolist() == [0, 0, 0, 1, 1]
    assert tokens.length.tolist() == [11, 12, 13, 11, 12]
    assert tokens.position.tolist() == [1, 2, 3, 1, 2]
    assert tokens.within(12, 13).alpha.tolist() == pytest.approx([0.8, 0.6])
    assert tokens.within(1, 2, "position").alpha.tolist() == pytest.approx([0.7, 0.5])
    tokens = Tokens.of([measured(0, [0.5]), measured(0, [0.6], sample=1), measured(2, [0.7])])
    assert [len(group) for group in tokens.by_prompt()] == [2, 1]
    assert len(np.unique(tokens.sequence)) == 3


def test_cells_by_hand() -> None:
    tokens = Tokens.of([measured(n, [i / 100 for i in range(101)]) for n in range(2)])
    (found,) = cells(tokens, (0, 200), variant="v", budget=64, top_k=20)
    assert (found.tokens, found.sequences, found.prompts) == (202, 2, 2)
    assert found.mean == pytest.approx(0.5)
    assert found.p05 == pytest.approx(0.05, abs=0.01)
    assert found.p50 == pytest.approx(0.5)
    assert found.above == pytest.approx(1 / 101, abs=1e-4)
    # The fitted Beta of a uniform is Beta(1, 1).
    a, b, ks = found.beta
    assert (a, b) == pytest.approx((1, 1), abs=0.25)
    assert ks < 0.06
    # Entropy rises along the sequence to 0.3: two thirds are over 0.1.
    assert found.uncertain == pytest.approx(134, abs=2)
    assert found.uncertain_p05 == pytest.approx(0.37, abs=0.02)
    tokens = Tokens.of([measured(0, [0.5] * 5), measured(1, [0.5] * 5)])
    several = cells(tokens, (0, 11, 13, 20, 30), variant="v", budget=None, top_k=20)
    assert [(one.start, one.stop, one.tokens) for one in several] == [(11, 13, 4), (13, 20, 6)]
    assert Tokens.of([]).by_prompt() == []


def test_estimators_by_hand() -> None:
    tokens = Tokens.of([measured(0, [0.5, 0.75], ratio=0.5), measured(1, [0.5, 0.75], ratio=0.75)])
    found = estimators(tokens, 20)
    means = found.lower_mean, found.upper_mean, found.widest, found.ratio_mean
    assert means == pytest.approx((0.5, 0.875, 0.375, 0.625))
    # Differences to alpha add up to -0.25 and 0.25 in two prompts: their spread is 0.354.
    assert found.ratio_error == pytest.approx(0.25 * 2**0.5 * 2**0.5 / 4)
    given = estimators(Tokens.of([measured(0, [0.5], ratio=None)]), 20)
    assert (given.ratio_mean, given.ratio_error, given.ratio_p05) == (None, None, None)
    # Gaps of 0.125 below and 0.25 above, as 16 bits may round them, stay within 0 to 1.
    found = estimators(Tokens.of([measured(n, [0.01, 0.01, 0.99]) for n in range(3)]), 20)
    assert found.lower_p05 == 0
    assert found.lower_mean == pytest.approx((0 + 0 + 0.865) / 3)
    assert found.upper_mean == pytest.approx((0.26 + 0.26 + 1) / 3)


# What to measure next.


def seen(budget: int, p05: float, start: int = 0, prompts: int = 48) -> Cell:
    ends = {"low": p05 - 0.01, "high": min(1.0, p05 + 0.01)}
    return Cell(**cell("v", budget, start, start + 1, p05=p05, prompts=prompts, beta=(), **ends))


def test_open_questions_are_between_the_careful_and_the_bold_plan() -> None:
    for known, asked in (
        # Every interval is on one side.
        ([seen(64, 0.8), seen(64, 0.7, 1), seen(128, 0.9), seen(128, 0.89, 1)], set()),
        # One that crosses, below the careful choice.
        ([seen(64, 0.8), seen(128, 0.865), seen(256, 0.95)], {(128, 0)}),
        # One that crosses, but 64 holds already; or the first bin forces 128 on all later ones.
        ([seen(64, 0.9), seen(128, 0.865)], set()),
        ([seen(64, 0.7), seen(64, 0.865, 1), seen(128, 0.9), seen(128, 0.9, 1)], set()),
        # Nothing surely holds: all that cross; nothing can hold: none.
        ([seen(64, 0.7), seen(128, 0.86), seen(256, 0.863)], {(128, 0), (256, 0)}),
        ([seen(64, 0.5), seen(128, 0.6)], set()),
        # Few prompts count as a wider interval, 0.845 + 2 * 0.01, and are filled up.
        ([seen(64, 0.845, prompts=16), seen(128, 0.95)], {(64, 0)}),
        ([seen(64, 0.7, prompts=16), seen(128, 0.95, prompts=16)], {(128, 0)}),
        ([seen(64, 0.9, 1)], set()),
        ([], set()),
    ):
        found = {(q.cell.budget, q.cell.start) for q in open_questions(known, (0.86,))}
        assert found == asked
    # Every target asks.
    questions = open_questions([seen(64, 0.8), seen(128, 0.9)], (0.8, 0.9))
    assert [(q.cell.budget, q.target, q.why) for q in questions] == [
        (64, 0.8, "crosses"),
        (128, 0.9, "crosses"),
    ]


# Layers.


def loss(layers: tuple[int, ...], p05: float) -> LayerLoss:
    ends = {"low": 0.0, "high": 1.0, "mean": 1.0}
    return LayerLoss(variant="v", budget=64, layers=layers, p05=p05, tokens=9, prompts=9, **ends)


def test_groups_and_their_shares() -> None:
    assert layer_groups(5, 2) == [(0, 1, 2), (3, 4)]
    assert layer_groups(4, 9) == [(0,), (1,), (2,), (3,)]
    assert layer_groups(4, 2, dense=[0, 1]) == [(2,), (3,)]
    assert layer_groups(2, 1, dense=[0, 1]) == []
    # Shares follow what groups lose.
    law = [seen(b, 1 - 20 * b**-0.7, 4096) for b in (128, 256, 512)]
    assert slope(law) == pytest.approx(0.7)
    assert slope(law[:1]) == 1.0
    assert slope([seen(8192, 0.9, 4096), seen(9000, 0.99, 4096)]) == 1.0  # they keep everything
    known = [seen(b, 1 - 20 * b**-1.0, 4096) for b in (128, 256)]
    found = shares([loss((0, 1), 0.99), loss((2,), 0.84)], known, 3)
    # c^(1/2) of 0.005, 0.005, 0.16: 0.0707, 0.0707, 0.4; over their mean: 0.39, 0.39, 2.22.
    assert found == pytest.approx((0.4, 0.4, 2.2))
    assert shares([loss((0, 1, 2), 0.9)], known, 3) == (1.0, 1.0, 1.0)
    # Equal layers in groups of unequal size: a group's loss is the sum of its layers'.
    assert shares([loss((0, 1), 0.9), loss((2,), 0.95)], known, 3) == (1.0, 1.0, 1.0)
    extreme = shares([loss((n,), 0.2 if n == 0 else 0.9999) for n in range(10)], [], 10)
    assert max(extreme) == 4.0
    assert min(extreme) >= 0.25
    assert np.mean(extreme) == pytest.approx(1, abs=0.03)
    # They become budgets of layers, never below reserved pages.
    variant = make_variant(block_mean, "block_mean", TINY, shares=(0.25, 1.0, 2.0))
    schedule = variant.schedule([0, 100], [96, EVERYTHING])
    budgets = [schedule.budgets_of(layer).tolist() for layer in range(3)]
    assert budgets == [[48, EVERYTHING], [96, EVERYTHING], [192, EVERYTHING]]


def test_arms_of_equal_content_are_equal() -> None:
    variant = make_variant(block_mean, "block_mean", TINY)
    own = make_arm(variant, block_mean, 64)
    assert {own, make_arm(variant.replace(name="other"), block_mean, 64)} == {own}
    assert own != make_arm(variant, block_mean, 80)
    assert own != make_arm(variant, block_mean, 64, given=True)
    assert Arm(name="other name") == DENSE
