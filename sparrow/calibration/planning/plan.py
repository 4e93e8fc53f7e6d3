"""Plans a schedule from a surface: the cheapest budgets that keep p05, and their speed-up.

Of every variant the cheapest schedule is found and its rollout priced (`context`), and the cheapest
of those is the plan. What a plan says of acceptance was measured with one budget at all lengths;
under the schedule earlier tokens kept less, so a check run has the last word.

A budget is allowed in a bin where its acceptance reaches the target and, if they are bounded, its
hard misses are within the bound; budgets may not fall with the length. What remains is a shortest
path through bins, found by dynamic programming: exact, for any costs that add up over bins. Costs
need not rise with the budget (a bin that is dense reads no landmarks), and what is allowed need not
either (measurements are noisy).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sparrow.calibration.planning.context import (
    FEW,
    PlanningContext,
    measured_to,
    prices,
    reliable,
)
from sparrow.calibration.planning.cost import FloatArray, eflops, printed_speed_up
from sparrow.calibration.planning.hardware import extrapolation_notes
from sparrow.files import remove_unfinished
from sparrow.schema import plan as schema
from sparrow.schema.calibrate import PlanConfig
from sparrow.schema.schedule import DENSE, Note, Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, Surface, Variant

PLAN, SCHEDULE = "plan.json", "schedule.json"
ASIDE = 0.02  # how far from the target the plan is looked at again
MEASURED = (
    "p05",
    "low",
    "high",
    "mean",
    "prompts",
    "p0_1",
    "hard_misses",
)  # of a cell, kept in the bin of a plan


class Unreachable(ValueError):
    """No schedule keeps the target; `nearest` is the highest target that one could keep."""

    def __init__(self, text: str, nearest: float) -> None:
        super().__init__(text)
        self.nearest = nearest


def plan(
    context: PlanningContext,
    config: PlanConfig,
    *,
    compare: Schedule | None = None,
    check: Surface | None = None,
) -> schema.PlanFile:
    """Make a plan; beside it those at neighbouring targets, another schedule and a check run."""
    options, target = plan_options(context, config), config.target
    limits = [context.limit(option.variant, option.schedule) for option in options]
    best = options[0]
    near = (round(target + change, 6) for change in (-ASIDE, ASIDE))
    limit, reads = limits[0], context.reads(best.variant, best.schedule)
    dense_eflops, sparse_eflops = (
        eflops(reads, read, limit.tokens, context.hardware.intensity)
        for read in (limit.dense, limit.sparse)
    )
    return schema.PlanFile(
        model=context.surface.model,
        variant=best.variant.name,
        target=target,
        by=config.by,
        hard_misses=config.hard_misses,
        bins=best.bins,
        sensitivity=tuple(
            plan_at(context, config.replace(target=aim)) for aim in near if 0 < aim < 1
        ),
        speed_up=best.speed_up,
        limit=limit.speed_up,
        eflops=dense_eflops / sparse_eflops,
        eflops_printed=_eflops_printed(context, best.schedule),
        seconds=best.seconds,
        dense_seconds=best.dense_seconds,
        steps=limit.steps,
        ms_step=1e3 * best.seconds / limit.steps,
        dense_ms_step=1e3 * best.dense_seconds / limit.steps,
        tokens=limit.tokens,
        capacity=limit.capacity,
        bytes=limit.sparse.total,
        dense_bytes=limit.dense.total,
        hardware=context.hardware.name,
        hardware_note=context.hardware.note,
        workload=context.workload.describe(),
        variants=tuple(
            schema.PlannedVariant(
                name=option.variant.name, speed_up=option.speed_up, limit=most.speed_up
            )
            for option, most in zip(options, limits, strict=True)
        ),
        compare=None if compare is None else _compared(context, best, compare),
        check=None if check is None else _checked(context, best, check),
        notes=notes(context, best),
        schedule=best.schedule,
    )


def write(planned: schema.PlanFile, folder: str | Path) -> list[Path]:
    """Write schedule.json and plan.json into a folder."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    remove_unfinished(place)
    planned.schedule.save(place / SCHEDULE)
    planned.save(place / PLAN)
    return [place / SCHEDULE, place / PLAN]


# The cheapest budgets.


def cheapest(costs: FloatArray, reached: FloatArray, target: float) -> list[int] | None:
    """Choose a budget for every bin, by index: the cheapest, none below the one before.

    costs, reached: [bins, budgets], budgets rising; `reached` must be at the target. None: no such
    choice. Of equal costs the smaller budgets win.
    """
    bins, budgets = costs.shape
    best = np.where(reached[0] >= target, costs[0], np.inf)
    predecessors: list[npt.NDArray[np.int64]] = []
    for place in range(1, bins):
        before = np.empty(budgets, np.int64)
        least = 0
        for budget in range(budgets):
            least = budget if best[budget] < best[least] else least
            before[budget] = least
        predecessors.append(before)
        best = np.where(reached[place] >= target, best[before] + costs[place], np.inf)
    places = [int(np.argmin(best))]
    if not np.isfinite(best[places[0]]):
        return None
    for before in reversed(predecessors):
        places.append(int(before[places[-1]]))
    return places[::-1]


def highest(reached: FloatArray) -> float:
    """Return the highest target that can be kept in every bin, or the lowest value measured."""
    values = np.unique(reached)
    free = np.zeros_like(reached)
    kept = (value for value in values[::-1] if cheapest(free, reached, value) is not None)
    return float(next(kept, values[0]))


def merged(starts: Sequence[int], budgets: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge neighbouring bins of equal budget; the first starts at 0."""
    kept = [i for i, budget in enumerate(budgets) if i == 0 or budget != budgets[i - 1]]
    return [0 if i == 0 else starts[i] for i in kept], [budgets[i] for i in kept]


# The schedule of a variant.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanOption:
    """The cheapest schedule of one variant, and what is predicted of its bins."""

    variant: Variant
    target: float
    bins: tuple[schema.PlanBin, ...]
    schedule: Schedule

    @property
    def seconds(self) -> float:
        return sum(bin.seconds for bin in self.bins)

    @property
    def dense_seconds(self) -> float:
        return sum(bin.dense_seconds for bin in self.bins)

    @property
    def speed_up(self) -> float:
        return self.dense_seconds / self.seconds

    @property
    def budgets(self) -> tuple[int | None, ...]:
        return tuple(bin.budget for bin in self.bins)


def plan_options(context: PlanningContext, config: PlanConfig) -> list[PlanOption]:
    """The cheapest schedule of every variant that reaches the target, the fastest first."""
    surface = context.surface
    options: list[PlanOption] = []
    missed: list[Unreachable] = []
    for variant in [surface.variant(name) for name in config.variant] or surface.variants:
        cells = reliable([cell for cell in surface.cells if cell.variant == variant.name])
        try:
            options += [_option(context, config, variant, cells)] if cells else []
        except Unreachable as error:
            missed.append(error)
    if not options and not missed:
        names = ", ".join(config.variant or (other.name for other in surface.variants))
        raise ValueError(f"Nothing can be planned: no cell of {names} has {FEW} prompts")
    if not options:
        raise max(missed, key=lambda error: error.nearest)
    return sorted(options, key=lambda option: option.seconds)


def _option(
    context: PlanningContext, config: PlanConfig, variant: Variant, measured: Sequence[Cell]
) -> PlanOption:
    """Plan a variant by dynamic programming over bins and budgets, the last of which is DENSE."""
    surface, target = context.surface, config.target
    edges = tuple(edge for edge in surface.bins if edge <= measured_to(measured))
    cells = {(cell.start, cell.budget or 0): cell for cell in measured}
    budgets = (*sorted({budget for _, budget in cells}), DENSE)
    reached = _reached(surface, variant, edges, budgets, cells, config)
    costs = prices(context, variant, edges, budgets)
    allowed = len(budgets) - (not config.allow_dense)
    places = cheapest(costs.seconds[:, :allowed], reached[:, :allowed], target)
    if places is None:
        raise _unreachable(variant, edges, config, reached[:, :allowed])
    bins = []
    for i, ((start, stop), place) in enumerate(zip(pairwise(edges), places, strict=True)):
        cell = cells.get((start, budgets[place]))
        bins.append(
            schema.PlanBin(
                start=start,
                stop=stop,
                budget=_budget(budgets[place]),
                **{name: None if cell is None else getattr(cell, name) for name in MEASURED},
                kept_share=costs.kv[i, place] / max(costs.dense_kv[i], 1),
                seconds=costs.seconds[i, place] + costs.fixed[i],
                dense_seconds=costs.dense_seconds[i],
            )
        )
    starts, kept = merged(edges[:-1], [budgets[place] for place in places])
    open_end = kept[-1] != DENSE  # what was not measured is not promised
    schedule = variant.schedule(
        [*starts, edges[-1]] if open_end else starts,
        [*kept, DENSE] if open_end else kept,
        name=f"{surface.model}-{target:g}",
        model=surface.model,
        family=surface.family,
        provenance=_provenance(context, config, variant, bins),
    )
    return PlanOption(variant=variant, target=target, bins=tuple(bins), schedule=schedule)


def _reached(
    surface: Surface,
    variant: Variant,
    edges: Sequence[int],
    budgets: Sequence[int],
    cells: dict[tuple[int, int], Cell],
    config: PlanConfig,
) -> FloatArray:
    """Acceptance by bin and budget, -inf where there are too many hard misses.

    cells: by the start of their bin and their budget.
    """
    floor = [cell for cell in surface.floor if cell.prompts >= FEW]
    p05 = {place: float(getattr(cell, config.by)) for place, cell in cells.items()}
    best = {cell.start: float(getattr(cell, config.by)) for cell in floor}
    reached = _by_bin(variant, edges, budgets, p05, best, 1.0)
    if config.hard_misses is None:
        return reached
    end = "high" if config.by == "low" else "value"
    misses = {place: -_hard_misses(cell, end) for place, cell in cells.items()}
    fewest = {cell.start: -_hard_misses(cell, "value") for cell in floor}
    within = _by_bin(variant, edges, budgets, misses, fewest, 0.0) >= -config.hard_misses
    return np.where(within, reached, -np.inf)


def _hard_misses(cell: Cell, end: str) -> float:
    if cell.hard_misses is None:
        raise ValueError(
            f"the surface has no hard misses ({cell.variant}, lengths {cell.start} to "
            f"{cell.stop}): calibrate again with this version, or plan without --hard-misses"
        )
    return float(getattr(cell.hard_misses, end))


def _by_bin(
    variant: Variant,
    edges: Sequence[int],
    budgets: Sequence[int],
    measured: dict[tuple[int, int], float],
    floor: dict[int, float],
    best: float,
) -> FloatArray:
    """A figure by bin and budget, the higher the better, at most that of dense (`floor`).

    A bin without measurements takes what the next one needs. measured: by start and budget; best:
    what dense has where it was not measured.
    """
    least = {budget: least_kept(variant, budget) for budget in budgets}
    rows: list[list[float]] = []
    for start, stop in reversed(list(pairwise(edges))):
        row = []
        for budget in budgets:
            figure = measured.get((start, budget))
            most = floor.get(start, best)  # no rollout is nearer to dense than dense itself
            whole = figure is None and least[budget] >= stop  # nothing is dropped
            row.append(most if whole else min(-np.inf if figure is None else figure, most))
        unknown = not any((start, budget) in measured for budget in budgets)
        rows.append(rows[-1] if unknown and rows else row)
    return np.array(rows[::-1])


def least_kept(variant: Variant, budget: int) -> int:
    """The smallest budget that any layer has: up to that length, nothing is dropped."""
    schedule = variant.schedule([0], [budget])
    budgets = [schedule.budgets, *(item.budgets for item in schedule.layers)]
    return min(int(row.min()) for row in budgets)


def _budget(budget: int) -> int | None:
    return None if budget == DENSE else budget


def _unreachable(
    variant: Variant, edges: Sequence[int], config: PlanConfig, reached: FloatArray
) -> Unreachable:
    nearest, best = highest(reached), reached.max(axis=1)
    worst = int(best.argmin())
    bound = "the lower end of the interval of p05" if config.by == "low" else "p05"
    what = f"{bound} at {config.target}"
    if config.hard_misses is not None:
        what += f" and at most {config.hard_misses:g} hard misses per 1000 tokens"
    shown = f"{best[worst]:.3f}" if np.isfinite(best[worst]) else "more hard misses"
    place = f"lengths {edges[worst]} to {edges[worst + 1]} (best there: {shown})"
    why = f"no measured budget keeps {what} for {place}"
    if best[worst] >= config.target:
        why = f"budgets that keep {what} in every bin would fall with the length"
    near = f"the nearest target that can be kept in every bin is {nearest:.3f}. Plan for that"
    if not np.isfinite(nearest):
        near = "none can be kept in every bin"
    return Unreachable(
        f"{variant.name}: {why}; {near}, measure larger budgets or more prompts, or let such bins "
        "run dense (--allow-dense)",
        nearest,
    )


# What a plan says of itself.


def notes(context: PlanningContext, option: PlanOption) -> tuple[str, ...]:
    """Return notes on what was not measured or is uncertain, and where sparsity does not pay."""
    surface, hardware, texts = context.surface, context.hardware, []
    name, cells = option.variant.name, reliable(surface.cells)
    starts = {cell.start for cell in cells if cell.variant == name}
    empty = ", ".join(f"{bin.start} on" for bin in option.bins if bin.start not in starts)
    if empty:
        texts.append(
            f"nothing was measured at lengths {empty}: those bins keep what the next one needs"
        )
    longest, last = int(context.workload.lengths.max()), option.bins[-1].stop
    if last is not None and longest > last:
        texts.append(
            f"lengths over {last} were not measured on {FEW} prompts: the schedule is dense there, "
            f"and the cost of lengths up to {longest} is counted as at the last budget"
        )
    few = ", ".join(
        f"{bin.start} to {bin.stop} ({bin.prompts})"
        for bin in option.bins
        if bin.prompts is not None and bin.prompts < LEAST_PROMPTS
    )
    if few:
        texts.append(f"fewer than {LEAST_PROMPTS} prompts, so too narrow intervals, at {few}")
    if surface.undecided:
        texts.append(f"measuring ended with {len(surface.undecided)} cells in doubt")
    if not any(abs(option.target - target) < 1e-9 for target in surface.targets):
        aims = ", ".join(f"{target:g}" for target in surface.targets)
        texts.append(f"samples were spent on a target of {aims}, not of {option.target:g}")
    rows = max(lengths.shape[1] for lengths in context.trace(option.variant).chunks())
    texts += extrapolation_notes(hardware, context.spec, rows)
    if option.seconds >= option.dense_seconds:
        texts.append(
            f"on {hardware.name} the schedule is no faster than dense ({option.speed_up:.2f}x): "
            "choosing what to read costs more than reading less saves"
        )
    return tuple(texts)


def _provenance(
    context: PlanningContext, config: PlanConfig, variant: Variant, bins: Sequence[schema.PlanBin]
) -> tuple[Note, ...]:
    surface, low = context.surface, config.by == "low"
    prompts = [bin.prompts for bin in bins if bin.prompts is not None]
    what = "lower end of its 95 % interval over prompts" if low else "point estimate"
    count = f"{min(prompts)} to {max(prompts)} prompts in a bin" if prompts else "no bin was bound"
    texts = {
        "target": f"5th percentile (p05) of per-token acceptance at {config.target:g}: {what}",
        "weights": surface.fingerprint,
        "flow": variant.source,
        "measured": f"{surface.mode}, {surface.dtype} on {surface.device}, {surface.created}",
        "prompts": f"{surface.prompts} ({surface.prompts_digest}); {count}",
        "lengths": f"measured to {bins[-1].stop} tokens; beyond, everything is kept",
        "sampling": f"temperature {surface.temperature:g}",
        "planned": f"{context.hardware.name}; {context.workload.describe()}",
        "check": "predicted from budgets that were constant over the length; check it with "
        "sparrow calibrate --schedule",
    }
    if config.hard_misses is not None:
        end = "upper end of their 95 % interval over prompts" if low else "point estimate"
        texts["hard misses"] = f"at most {config.hard_misses:g} per 1000 tokens: {end}"
    return tuple(Note(key=key, text=text) for key, text in texts.items())


# What stands beside it.


def plan_at(context: PlanningContext, config: PlanConfig) -> schema.PlanAtTarget:
    try:
        best = plan_options(context, config)[0]
    except Unreachable as error:
        nearest = error.nearest if np.isfinite(error.nearest) else None
        return schema.PlanAtTarget(target=config.target, reached=False, nearest=nearest)
    return schema.PlanAtTarget(
        target=config.target,
        reached=True,
        budgets=best.budgets,
        speed_up=best.speed_up,
        variant=best.variant.name,
    )


def _compared(context: PlanningContext, best: PlanOption, other: Schedule) -> schema.Compared:
    """Another schedule on the same rollout, and what the surface says of its budgets."""
    plan = best.schedule
    fields = {"flow": "flow", "page": "page", "dense_layers": "dense layers"}
    return schema.Compared(
        name=other.name,
        starts=tuple(other.lengths.tolist()),
        budgets=tuple(_budget(budget) for budget in other.budgets.tolist()),
        speed_up=best.dense_seconds / context.rollout(best.variant, other),
        differs=tuple(
            f"{what} {getattr(other, field)!r} (the plan: {getattr(plan, field)!r})"
            for field, what in (fields | {"family": "model family"}).items()
            if getattr(other, field) != getattr(plan, field)
        ),
        bins=tuple(_nearest_measured(context.surface, other, bin.start) for bin in best.bins),
    )


def _nearest_measured(surface: Surface, other: Schedule, start: int) -> schema.ComparedBin:
    """Of the measured budgets that are no larger than the other's, the largest: a lower bound.

    Only where the surface has a variant of the other's own flow, dense layers and even budgets.
    """
    budget = other.budget(start)
    rule = ("flow", "page", "first", "last", "dense_layers")
    alike = {
        variant.name
        for variant in surface.variants
        if all(getattr(variant, field) == getattr(other, field) for field in rule)
        and not variant.shares
        and not other.layers
    }
    below = [
        cell
        for cell in reliable(surface.cells)
        if cell.variant in alike and cell.start == start and (cell.budget or 0) <= budget
    ]
    near = max(below, key=lambda cell: cell.budget or 0, default=None)
    return schema.ComparedBin(
        start=start,
        budget=_budget(budget),
        measured=None if near is None else near.budget,
        p05=None if near is None else near.p05,
    )


def _checked(
    context: PlanningContext, best: PlanOption, check: Surface
) -> tuple[schema.CheckedBin, ...]:
    """The bins of a check run, of this plan's schedule on this plan's model and no other."""
    surface, schedules = context.surface, [variant.name for variant in check.variants]
    if check.fingerprint != surface.fingerprint or schedules != [best.schedule.name]:
        raise ValueError(
            f"the check is of {check.model}, {', '.join(schedules)}; the plan of "
            f"{surface.model}, {best.schedule.name}: give the check.json of its schedule"
        )
    fields = {*schema.CheckedBin.model_fields}
    return tuple(schema.CheckedBin(**cell.model_dump(include=fields)) for cell in check.cells)


def _eflops_printed(context: PlanningContext, schedule: Schedule) -> float:
    """The speed-up in eFLOPs as the paper prints them: one mean length, one mean budget."""
    lengths, prompt = context.workload.lengths, context.workload.shortest_prompt
    steps = np.arange(prompt + 1, int(lengths.mean()) + 1)
    layers = range(context.spec.layers)
    kept = np.mean([schedule.kept(steps, layer).mean() for layer in layers])
    return printed_speed_up(
        context.spec,
        context.hardware.intensity,
        samples=len(lengths),
        prompt=prompt,
        output=max(1, int(lengths.mean()) - prompt),
        budget=max(1, round(float(kept))),
        page=schedule.page,
    )
