"""The four conditions, from figures at hand."""

import pytest

pytest.importorskip("pydantic")

from sparrow.calibrate.cells import Tail
from sparrow.dataflow.evaluate import Accuracy, attending
from sparrow.dataflow.fitness import Plan, conditions, sampled_tail
from sparrow.models import load

PLAN = Plan(
    family="assignments",
    studied=500,
    lengths=(200, 500),
    budgets=(100, 200, 400, 800),
    bin=(300, 500),
    sequences=4,
)


def accuracy(value: float, entropy: float = 0.2) -> Accuracy:
    return Accuracy(
        answers=48,
        accuracy=value,
        error=0.05,
        tokens=500.0,
        entropy=entropy,
        unfinished=0.1,
        reasons={"right": 10},
    )


def tails(*p05: float, between: float = 0.1) -> dict[int, Tail]:
    return {
        budget: Tail(
            p05=value,
            low=value,
            high=value,
            mean=0.95,
            between=between,
            lost=0.0,
            tokens=100,
            sequences=4,
        )
        for budget, value in zip(PLAN.budgets, p05, strict=True)
    }


GRADED = tails(0.7, 0.8, 0.9, 1.0)


def held(dense: Accuracy, window: Accuracy, tail: dict[int, Tail]) -> list[bool]:
    both = {200: accuracy(0.9), 500: dense}
    found = conditions(PLAN, both, {200: accuracy(0.9), 500: window}, tail)
    return [condition.holds for condition in found]


def test_all_hold() -> None:
    assert held(accuracy(0.45), accuracy(0.2), GRADED) == [True] * 4


@pytest.mark.parametrize("value", [0.29, 0.61])
def test_accuracy_outside(value: float) -> None:
    assert held(accuracy(value), accuracy(0.0), GRADED) == [False, True, True, True]


def test_a_window_that_takes_less_than_half() -> None:
    assert held(accuracy(0.4), accuracy(0.21), GRADED) == [True, False, True, True]


def test_nothing_to_take() -> None:
    assert held(accuracy(0.0), accuracy(0.0), GRADED) == [False, False, True, True]


@pytest.mark.parametrize("entropy", [0.04, 0.41])
def test_entropy_outside(entropy: float) -> None:
    assert held(accuracy(0.4, entropy), accuracy(0.0), GRADED) == [True, True, False, True]


@pytest.mark.parametrize(
    "tail",
    [
        tails(0.2, 0.3, 0.95, 0.96),  # a cliff: budgets lie within 15 %
        tails(0.8, 0.85, 0.9, 0.95),  # 0.75 is not reached
        tails(0.7, 0.8, 0.9, 1.0, between=0.02),
    ],
)
def test_not_graded(tail: dict[int, Tail]) -> None:
    assert held(accuracy(0.4), accuracy(0.0), tail) == [True, True, True, False]


def test_a_tail_is_of_what_the_sparse_actor_wrote() -> None:
    model = load("tiny", device="cpu")
    plan = Plan(
        family="countdown", studied=200, lengths=(200,), budgets=(64,), bin=(60, 120), sequences=2
    )
    found = sampled_tail(model, model, plan, 64)
    assert found is not None
    assert 0 < found.p05 <= found.mean < 1
    unreached = Plan(
        family="countdown",
        studied=200,
        lengths=(200,),
        budgets=(64,),
        bin=(7000, 8000),
        sequences=2,
    )
    assert sampled_tail(model, model, unreached, 64) is None


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"budget": 64, "window": 64}, "give one of a budget"),
        ({"window": 100}, "multiple of 16, got|of 16"),
    ],
)
def test_what_attends_in_no_way(given: dict[str, int], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        attending(load("tiny", device="cpu"), **given)
