"""Is a model fit for the study? Four conditions, measured.

1. accuracy at the studied length is between 0.3 and 0.6
2. with a window of the last 256 tokens alone, accuracy at the long end falls by half at least
3. mean entropy at temperature 1 is between 0.05 and 0.4 nats a token
4. acceptance is graded: near the budget where p05 is 0.86 at least 3 % of tokens have alpha between
   0.05 and 0.95, and the budgets for p05 of 0.75, 0.80, 0.86, 0.92 are 15 % apart at least
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from sparrow.calibrate.cells import Tail, budget_for, in_bin, tail
from sparrow.calibrate.replay import Replay, replay
from sparrow.dataflow.evaluate import Accuracy, answer_puzzles, attending, puzzles
from sparrow.models import Decoder

WINDOW = 256
TARGETS = (0.75, 0.80, 0.86, 0.92)
THRESHOLD = 0.86


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured of a model, on one family of puzzles."""

    family: str
    studied: int  # the length that the study uses
    lengths: tuple[int, ...]  # of the table of accuracies; the last is the long end
    budgets: tuple[int, ...]
    bin: tuple[int, int]  # total lengths whose tail is measured: the longest bin
    sequences: int  # that are sampled for each budget; those that reach the bin count


class Condition(NamedTuple):
    """One of the four, whether it holds, and the figures."""

    text: str
    holds: bool
    figures: str


def sampled_tail(actor: Decoder, policy: Decoder, plan: Plan, budget: int) -> Tail | None:
    """The tail in the plan's bin of what a sparse actor writes under a budget.

    None where no sequence reaches the bin. The policy has the actor's weights, and float32.
    """
    alphas = in_bin(list(_replays(actor, policy, plan, budget)), *plan.bin)
    return tail(alphas) if alphas else None


def _replays(actor: Decoder, policy: Decoder, plan: Plan, budget: int) -> Iterator[Replay]:
    engine, schedule = attending(actor, budget=budget)
    assert schedule is not None, "a budget was given"
    start = plan.bin[0]
    rows = puzzles(plan.family, plan.lengths[-1], plan.sequences, room=1.25)
    for one in answer_puzzles(engine, rows, schedule=schedule):
        answer = one.completion.token_ids.tolist()
        if len(one.prompt_ids) + len(answer) > start:
            yield replay(
                policy, one.prompt_ids, answer[: plan.bin[1] - len(one.prompt_ids)], schedule
            )


def conditions(
    plan: Plan,
    dense: Mapping[int, Accuracy],
    window: Mapping[int, Accuracy],
    tails: Mapping[int, Tail],
) -> list[Condition]:
    """The four, from accuracies by length and tails by budget."""
    studied, end = dense[plan.studied], plan.lengths[-1]
    seen, blind = dense[end].accuracy, window[end].accuracy
    return [
        Condition(
            f"accuracy at length {plan.studied} between 0.3 and 0.6",
            0.3 <= studied.accuracy <= 0.6,
            f"{studied.accuracy:.3f} ± {studied.error:.3f} ({studied.answers} answers)",
        ),
        Condition(
            f"a window of {WINDOW} tokens halves accuracy at length {end} at least",
            seen > 0 and blind <= seen / 2,
            f"{seen:.3f} dense, {blind:.3f} through the window",
        ),
        Condition(
            "entropy at temperature 1 between 0.05 and 0.4 nats a token",
            0.05 <= studied.entropy <= 0.4,
            f"{studied.entropy:.3f} at length {plan.studied}, {dense[end].entropy:.3f} at {end}",
        ),
        _graded(tails),
    ]


def _graded(tails: Mapping[int, Tail]) -> Condition:
    budgets = [budget_for(tails, target) for target in TARGETS]
    ratios = [b / a for a, b in pairwise(budgets) if a is not None and b is not None]
    near = min(tails, key=lambda budget: abs(tails[budget].p05 - THRESHOLD))
    between = tails[near].between
    shown = ", ".join(
        f"{target}: {'not reached' if budget is None else round(budget)}"
        for target, budget in zip(TARGETS, budgets, strict=True)
    )
    apart = len(ratios) == len(TARGETS) - 1 and min(ratios) >= 1.15
    return Condition(
        "acceptance is graded: 3 % of tokens between, budgets 15 % apart",
        between >= 0.03 and apart,
        f"{between:.3f} of the tokens at budget {near}; budgets for p05 of {shown}; "
        f"least ratio {min(ratios, default=float('nan')):.2f}",
    )
