"""A world in which the tail of acceptance follows from budget and length, for the gate."""

from collections.abc import Callable

import numpy as np

from sparrow.gate import Gate
from sparrow.schema.gate import Look, Reading
from sparrow.schema.gate import RatioEstimate as Estimate
from sparrow.schema.schedule import DENSE

Level = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (budgets, lengths) -> p05


def reading(prompt: str, start: int, alpha: np.ndarray) -> Reading:
    """Tokens drawn at start, start + 1, ..."""
    return Reading(prompt=prompt, lengths=start + np.arange(len(alpha)), alpha=alpha)


def drawn(gate: Gate, step: int, level: Level, *, start: int, stop: int, n: int) -> list[Reading]:
    """Readings of n prompts; of each token 90 % are 1, the others within 0.05 of the p05."""
    rng = np.random.default_rng([step, n])
    lengths = np.arange(start, stop)
    budgets = np.full(len(lengths), DENSE)
    if gate.schedule is not None:
        starts = gate.schedule.lengths
        budgets = gate.schedule.budgets[np.searchsorted(starts, lengths, side="right") - 1]
    p05 = level(budgets, lengths)
    found = []
    for i in range(n):
        bad = rng.random(len(lengths)) < 0.1
        alpha = np.where(bad, p05 + rng.uniform(-0.05, 0.05, len(lengths)), 1.0)
        found.append(reading(f"{step}/{i}", start, np.clip(alpha, 0, 1)))
    return found


def lived(
    gate: Gate, steps: range, level: Level, *, start: int = 40, stop: int = 512, n: int = 8
) -> list[Look]:
    """The looks of so many steps; the first stop ends them, as it ends training."""
    looks: list[Look] = []
    for step in steps:
        readings = drawn(gate, step, level, start=start, stop=stop, n=n)
        estimates = [Estimate(lengths=each.lengths, ratio=each.alpha) for each in readings]
        looks.append(gate.observe(step, readings, estimates))
        if any(action.kind == "stop" for action in looks[-1].actions):
            break
    return looks


def kinds(looks: list[Look]) -> list[str]:
    return [action.kind for look in looks for action in look.actions]
