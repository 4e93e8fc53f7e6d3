"""What a calibration comes to: its answer in one sentence, and a command that works next."""

import math
import shlex
from pathlib import Path
from typing import NamedTuple

from sparrow.calibration.planning.context import PlanningContext, believed, measured_to
from sparrow.calibration.planning.hardware import Hardware
from sparrow.calibration.planning.plan import PlanOption, Unreachable, plan_options
from sparrow.schema.calibrate import PlanConfig
from sparrow.schema.surface import LEAST_PROMPTS, Surface


class Advice(NamedTuple):
    """The answer of a calibration, and what to do next: a command that works, or more measuring."""

    answer: str
    next_step: str


def advise(surface: Surface, folder: Path) -> Advice:
    """Try the plan for the surface's target, and where it fails what comes nearest to it."""
    target = surface.targets[0]
    config = PlanConfig(surface=folder, target=target)
    context = PlanningContext.of(surface, Hardware.load(config.hardware), config)
    command = ["sparrow", "plan", str(folder)]
    if target != PlanConfig.model_fields["target"].default:
        command.append(f"--target={target:g}")
    try:
        return Advice(_kept(surface, plan_options(context, config)[0]), shlex.join(command))
    except Unreachable as error:
        nearest = error.nearest
    except ValueError as error:  # too few prompts in every cell
        more = f"the same calibration with --prompts={LEAST_PROMPTS}, into another folder (--out)"
        return Advice(f"{error}.", more)
    missed = f"No measured budget keeps p05 at {target:g} at every length"
    dense = _try(context, config.replace(allow_dense=True))
    if dense is not None and any(dense.budgets):
        rest = ", ".join(f"{bin.start} to {bin.stop}" for bin in dense.bins if not bin.budget)
        answer = f"{missed}; a schedule that is dense at lengths {rest} does."
        return Advice(answer, shlex.join([*command, "--allow-dense"]))
    lower = math.floor(nearest * 100) / 100 if math.isfinite(nearest) else 0.0
    if lower > 0 and _try(context, config.replace(target=lower)) is not None:
        answer = f"{missed}, nor at some lengths alone; the highest that is kept is {nearest:.3f}."
        return Advice(answer, shlex.join([*command[:3], f"--target={lower:g}"]))
    larger = f"the same calibration with larger budgets, such as --budget={2 * surface.budgets[-1]}"
    return Advice(f"{missed}, nor at any lower target.", larger)


def _try(context: PlanningContext, config: PlanConfig) -> PlanOption | None:
    try:
        return plan_options(context, config)[0]
    except Unreachable:
        return None


def _kept(surface: Surface, option: PlanOption) -> str:
    """The cheapest constant budget that keeps the target, or the schedule where none does."""
    budgets = [budget for budget in option.budgets if budget is not None]
    constant = cheapest_constant(surface, option.target)
    kept = f"{min(budgets)} to {max(budgets)} tokens by length"
    if constant is not None:
        kept = "{} tokens at every length ({})".format(*constant)
    longest = option.bins[-1].stop
    return f"p05 stays at {option.target:g} or above up to {longest} tokens if you keep {kept}."


def cheapest_constant(surface: Surface, target: float) -> tuple[int, str] | None:
    """The smallest budget whose interval is at the target in every bin, and its variant."""
    cells = believed(surface.cells)
    last = measured_to(cells)
    for budget in surface.budgets:
        for variant in surface.variants:
            measured = [
                cell for cell in cells if (cell.variant, cell.budget) == (variant.name, budget)
            ]
            whole = measured and max(cell.stop for cell in measured) >= last
            if whole and all(cell.low >= target for cell in measured):
                return budget, variant.name
    return None
