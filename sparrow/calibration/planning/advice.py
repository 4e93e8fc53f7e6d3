"""The result of a calibration in one sentence, and the next command: one that works."""

import math
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from sparrow.calibration.planning.context import PlanningContext, measured_to, reliable
from sparrow.calibration.planning.hardware import Hardware
from sparrow.calibration.planning.plan import plan_at
from sparrow.schema.calibrate import PlanConfig
from sparrow.schema.surface import LEAST_PROMPTS, Surface


class PlanAdvice(NamedTuple):
    """The answer of a calibration, and what to do next: a command that works, or more measuring."""

    answer: str
    next_step: str


def advise(surface: Surface, folder: Path) -> PlanAdvice:
    """Try the plan for the surface's target, and where it fails what comes nearest to it."""
    target = surface.targets[0]
    config = PlanConfig(surface=folder, target=target)
    context = PlanningContext.of(surface, Hardware.load(config.hardware), config)
    try:
        planned = plan_at(context, config)
    except ValueError as error:  # too few prompts in every cell
        more = f"the same calibration with --prompts={LEAST_PROMPTS}, into another folder (--out)"
        return PlanAdvice(f"{error}.", more)
    if planned.reached:
        return PlanAdvice(_kept(surface, planned.budgets), _command(folder, target))
    missed = f"No measured budget keeps p05 at {target:g} at every length"
    dense = plan_at(context, config.replace(allow_dense=True))
    if any(dense.budgets):
        bins = zip(pairwise(surface.bins), dense.budgets, strict=False)
        lengths = ", ".join(f"{start} to {stop}" for (start, stop), kept in bins if kept is None)
        answer = f"{missed}; a schedule that is dense at lengths {lengths} does."
        return PlanAdvice(answer, _command(folder, target, "--allow-dense"))
    lower = math.floor(100 * (planned.nearest or 0)) / 100
    if lower > 0 and plan_at(context, config.replace(target=lower)).reached:
        answer = f"{missed}; the highest p05 that is kept at every length is {planned.nearest:.3f}."
        return PlanAdvice(answer, _command(folder, lower))
    larger = f"the same calibration with larger budgets, such as --budget={2 * surface.budgets[-1]}"
    return PlanAdvice(f"{missed}, nor at any lower target.", larger)


def _command(folder: Path, target: float, *options: str) -> str:
    default = PlanConfig.model_fields["target"].default
    aim = [] if target == default else [f"--target={target:g}"]
    return shlex.join(["sparrow", "plan", str(folder), *aim, *options])


def _kept(surface: Surface, budgets: Sequence[int | None]) -> str:
    """The smallest constant budget that keeps the target, or else the budgets of the schedule."""
    target = surface.targets[0]
    planned = [budget for budget in budgets if budget is not None]
    kept = f"{min(planned)} to {max(planned)} tokens by length"
    if (constant := cheapest_constant(surface, target)) is not None:
        kept = "{} tokens at every length ({})".format(*constant)
    longest = measured_to(reliable(surface.cells))
    return f"p05 stays at {target:g} or above up to {longest} tokens if you keep {kept}."


def cheapest_constant(surface: Surface, target: float) -> tuple[int, str] | None:
    """The smallest budget whose interval is at the target in every bin, and its variant."""
    cells = reliable(surface.cells)
    last = measured_to(cells)
    for budget in surface.budgets:
        for variant in surface.variants:
            arm = [cell for cell in cells if (cell.variant, cell.budget) == (variant.name, budget)]
            whole = arm and max(cell.stop for cell in arm) >= last
            if whole and all(cell.low >= target for cell in arm):
                return budget, variant.name
    return None
