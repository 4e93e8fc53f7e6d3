"""From a surface to a schedule: the cheapest budgets that keep the tail, and what they promise.

Of every variant the cheapest schedule is found and its rollout priced (`context`), and the cheapest
of those is the plan. What a plan says of acceptance was measured with one budget at all lengths;
under the schedule earlier tokens kept less, so a check run has the last word.

A budget is allowed in a bin where its acceptance reaches the target; budgets may not fall with the
length. What remains is a shortest path through bins, found by dynamic programming: exact, for any
costs that add up over bins. Costs need not rise with the budget (a bin that is dense reads no
landmarks), and what is allowed need not either (measurements are noisy).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sparrow.calibrate.planning import eflops
from sparrow.calibrate.planning.context import (
    FEW,
    PlanningContext,
    Prices,
    believed,
    measured_to,
    prices,
)
from sparrow.calibrate.planning.cost import FloatArray, Limit
from sparrow.calibrate.planning.hardware import stretched
from sparrow.files import remove_unfinished
from sparrow.schema.plan import (
    By,
    CheckedBin,
    Compared,
    ComparedBin,
    PlanAside,
    PlanBin,
    PlanFile,
    PlannedVariant,
)
from sparrow.schema.schedule import DENSE, Note, Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, Surface, Variant

PLAN, SCHEDULE = "plan.json", "schedule.json"
ASIDE = 0.02  # how far from the target the plan is looked at again

Cells = dict[tuple[int, int], Cell]  # by start of the bin and budget


class Unmeasured(ValueError):
    """A variant of which too little is known to plan anything."""


class Unreachable(ValueError):
    """No schedule keeps the target; `nearest` is the greatest that one could keep."""

    def __init__(self, text: str, nearest: float) -> None:
        super().__init__(text)
        self.nearest = nearest


def plan(
    context: PlanningContext,
    target: float,
    *,
    by: By = "low",
    allow_dense: bool = False,
    variants: Sequence[str] = (),
    compare: Schedule | None = None,
    check: Surface | None = None,
) -> PlanFile:
    """The plan, the same at targets a little aside, another schedule and a check run beside it."""

    def options_for(aim: float) -> list[Option]:
        return plan_options(context, aim, by=by, allow_dense=allow_dense, variants=variants)

    options = options_for(target)
    best, limits = options[0], [option.limit(context) for option in options]
    near = (round(target + change, 6) for change in (-ASIDE, ASIDE))
    dense, sparse = limits[0].dense.total, limits[0].sparse.total
    return PlanFile(
        model=context.surface.model,
        variant=best.variant.name,
        target=target,
        by=by,
        bins=best.bins,
        sensitivity=tuple(_aside(options_for, aim) for aim in near if 0 < aim < 1),
        speed_up=best.speed_up,
        limit=limits[0].speed_up,
        eflops=_eflops(context, best),
        eflops_printed=_eflops_printed(context, best),
        seconds=best.seconds,
        dense_seconds=best.dense_seconds,
        steps=limits[0].steps,
        ms_step=1e3 * best.seconds / limits[0].steps,
        dense_ms_step=1e3 * best.dense_seconds / limits[0].steps,
        tokens=limits[0].tokens,
        capacity=limits[0].capacity,
        bytes=sparse,
        dense_bytes=dense,
        hardware=context.hardware.name,
        hardware_note=context.hardware.note,
        workload=context.workload.describe(),
        variants=tuple(
            PlannedVariant(name=one.variant.name, speed_up=one.speed_up, limit=most.speed_up)
            for one, most in zip(options, limits, strict=True)
        ),
        compare=None if compare is None else _compared(context, best, compare),
        check=None if check is None else _checked(context, best, check),
        notes=best.notes(context),
        schedule=best.schedule,
    )


def write(planned: PlanFile, folder: str | Path) -> list[Path]:
    """The schedule to use and the plan to read."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    remove_unfinished(place)
    planned.schedule.save(place / SCHEDULE)
    planned.save(place / PLAN)
    return [place / SCHEDULE, place / PLAN]


# The cheapest budgets.


class Choice(NamedTuple):
    """One budget for every bin, as places in the list of budgets, and what they cost together."""

    places: tuple[int, ...]
    cost: float


def cheapest(costs: FloatArray, reached: FloatArray, target: float) -> Choice | None:
    """The cheapest places, none below the one before, at which `reached` is at the target.

    costs, reached: [bins, budgets], budgets rising. None: no such choice. Of equal costs the
    smaller budgets win.
    """
    bins, budgets = costs.shape
    best = np.where(reached[0] >= target, costs[0], np.inf)
    came: list[npt.NDArray[np.int64]] = []
    for place in range(1, bins):
        lead = np.empty(budgets, np.int64)
        least = 0
        for budget in range(budgets):
            least = budget if best[budget] < best[least] else least
            lead[budget] = least
        came.append(lead)
        best = np.where(reached[place] >= target, best[lead] + costs[place], np.inf)
    last = int(np.argmin(best))
    if not np.isfinite(best[last]):
        return None
    places = [last]
    for lead in reversed(came):
        places.append(int(lead[places[-1]]))
    return Choice(tuple(reversed(places)), float(best[last]))


def highest(reached: FloatArray) -> float:
    """The greatest target that can be kept in every bin at all."""
    free = np.zeros_like(reached)
    values = np.unique(reached)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if cheapest(free, reached, float(values[middle])) is None:
            high = middle - 1
        else:
            low = middle
    return float(values[low])


def merged(starts: Sequence[int], budgets: Sequence[int]) -> tuple[list[int], list[int]]:
    """Bins without those that repeat the one before; the first starts at 0."""
    kept = [i for i, budget in enumerate(budgets) if i == 0 or budget != budgets[i - 1]]
    return [0 if i == 0 else starts[i] for i in kept], [budgets[i] for i in kept]


# What is known of a variant, by bin and budget.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Of one variant, by bin and budget (the last is DENSE): acceptance reached, seconds."""

    edges: tuple[int, ...]
    budgets: tuple[int, ...]
    cells: Cells
    reached: FloatArray
    prices: Prices

    @classmethod
    def of(cls, context: PlanningContext, variant: Variant, by: By) -> "Table":
        surface = context.surface
        known = believed([cell for cell in surface.cells if cell.variant == variant.name])
        if not known:
            raise Unmeasured(f"{variant.name}: no cell has {FEW} prompts, nothing can be planned")
        edges = tuple(edge for edge in surface.bins if edge <= measured_to(known))
        cells = {(cell.start, cell.budget): cell for cell in known if cell.budget is not None}
        budgets = (*sorted({budget for _, budget in cells}), DENSE)
        return cls(
            edges=edges,
            budgets=budgets,
            cells=cells,
            reached=_reached(surface, variant, edges, budgets, cells, by),
            prices=prices(context, variant, edges, budgets),
        )


def _reached(
    surface: Surface,
    variant: Variant,
    edges: Sequence[int],
    budgets: Sequence[int],
    cells: Cells,
    by: By,
) -> FloatArray:
    """Acceptance by bin and budget; a bin without measurements takes what the next one needs."""
    floor = {cell.start: float(getattr(cell, by)) for cell in surface.floor if cell.prompts >= FEW}
    least = {budget: least_kept(variant, budget) for budget in budgets}
    rows: list[list[float]] = []
    for start, stop in reversed(list(pairwise(edges))):
        row = []
        for budget in budgets:
            measured = cells.get((start, budget))
            known = -np.inf if measured is None else float(getattr(measured, by))
            most = floor.get(start, 1.0)  # no rollout is nearer to dense than dense itself
            whole = measured is None and least[budget] >= stop  # nothing is dropped
            row.append(most if whole else min(known, most))
        unknown = not any((start, budget) in cells for budget in budgets)
        rows.append(rows[-1] if unknown and rows else row)
    return np.array(rows[::-1])


def least_kept(variant: Variant, budget: int) -> int:
    """The smallest budget that any layer has: up to that length, nothing is dropped."""
    made = variant.schedule([0], [budget])
    return min(int(row.min()) for row in (made.budgets, *(item.budgets for item in made.layers)))


# The schedule of a variant.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """The cheapest schedule of one variant, and what is predicted of its bins."""

    variant: Variant
    target: float
    table: Table
    bins: tuple[PlanBin, ...]
    schedule: Schedule

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.bins)

    @property
    def dense_seconds(self) -> float:
        return sum(one.dense_seconds for one in self.bins)

    @property
    def speed_up(self) -> float:
        return self.dense_seconds / self.seconds

    @property
    def budgets(self) -> tuple[int | None, ...]:
        return tuple(one.budget for one in self.bins)

    def limit(self, context: PlanningContext) -> Limit:
        return context.limit(self.variant, self.schedule)

    def notes(self, context: PlanningContext) -> tuple[str, ...]:
        """What was not measured or is in doubt, and where it does not pay, in words."""
        return (*_gaps(context, self.table), *_doubts(context, self), *_far(context, self))


def plan_options(
    context: PlanningContext,
    target: float,
    *,
    by: By = "low",
    allow_dense: bool = False,
    variants: Sequence[str] = (),
) -> list[Option]:
    """The cheapest schedule of every variant that reaches the target, the fastest first."""
    if not 0 < target < 1:
        raise ValueError(f"target {target}: allowed are numbers between 0 and 1")
    chosen = [context.surface.variant(name) for name in variants] or context.surface.variants
    found: list[Option] = []
    missed: list[Unreachable] = []
    unknown: list[Unmeasured] = []
    for variant in chosen:
        try:
            found.append(_option(context, variant, target, by, allow_dense))
        except Unreachable as error:
            missed.append(error)
        except Unmeasured as error:
            unknown.append(error)
    if not found:
        raise max(missed, key=lambda error: error.nearest) if missed else unknown[0]
    return sorted(found, key=lambda one: one.seconds)


def _option(
    context: PlanningContext, variant: Variant, target: float, by: By, allow_dense: bool
) -> Option:
    table = Table.of(context, variant, by)
    allowed = len(table.budgets) - (not allow_dense)
    reached = table.reached[:, :allowed]
    choice = cheapest(table.prices.seconds[:, :allowed], reached, target)
    if choice is None:
        raise _unreachable(table, variant, target, by, reached)
    bins = _bins(table, choice.places)
    budgets = [table.budgets[place] for place in choice.places]
    starts, kept = merged(table.edges[:-1], budgets)
    open_end = kept[-1] != DENSE  # what was not measured is not promised
    schedule = variant.schedule(
        [*starts, table.edges[-1]] if open_end else starts,
        [*kept, DENSE] if open_end else kept,
        name=f"{context.surface.model}-{target:g}",
        model=context.surface.model,
        family=context.surface.family,
        provenance=_provenance(context, variant, bins, target, by),
    )
    return Option(variant=variant, target=target, table=table, bins=bins, schedule=schedule)


def _bins(table: Table, places: Sequence[int]) -> tuple[PlanBin, ...]:
    costs = table.prices
    bins = []
    for i, ((start, stop), place) in enumerate(zip(pairwise(table.edges), places, strict=True)):
        cell = table.cells.get((start, table.budgets[place]))
        measured = ("p05", "low", "high", "mean", "prompts")
        bins.append(
            PlanBin(
                start=start,
                stop=stop,
                budget=_budget(table.budgets[place]),
                **{name: None if cell is None else getattr(cell, name) for name in measured},
                kept_share=costs.read[i, place] / max(costs.dense_read[i], 1),
                seconds=costs.seconds[i, place] + costs.fixed[i],
                dense_seconds=costs.dense_seconds[i],
            )
        )
    return tuple(bins)


def _budget(budget: int) -> int | None:
    return None if budget == DENSE else budget


def _unreachable(
    table: Table, variant: Variant, target: float, by: By, reached: FloatArray
) -> Unreachable:
    nearest = highest(reached)
    best = reached.max(axis=1)
    worst = int(best.argmin())
    what = "the lower end of the interval of p05" if by == "low" else "p05"
    place = f"lengths {table.edges[worst]} to {table.edges[worst + 1]}"
    why = f"no measured budget keeps {what} at {target} for {place} (best there: {best[worst]:.3f})"
    if best[worst] >= target:
        why = f"budgets that keep {what} at {target} in every bin would fall with the length"
    near = f"the nearest target that can be kept in every bin is {nearest:.3f}. Plan for that"
    if not np.isfinite(nearest):
        near = "none can be kept in every bin"
    return Unreachable(
        f"{variant.name}: {why}; {near}, measure larger budgets or more prompts, or let such bins "
        "run dense (--allow-dense)",
        nearest,
    )


# What a plan says of itself.


def _gaps(context: PlanningContext, table: Table) -> list[str]:
    """What was not measured."""
    said = []
    starts = {start for start, _ in table.cells}
    empty = [f"{start} on" for start in table.edges[:-1] if start not in starts]
    if empty:
        said.append(
            f"nothing was measured at lengths {', '.join(empty)}: those bins keep what the next "
            "one needs"
        )
    longest, last = int(context.workload.lengths.max()), table.edges[-1]
    if longest > last:
        said.append(
            f"lengths over {last} were not measured on {FEW} prompts: the schedule is dense there, "
            f"and the cost of lengths up to {longest} is counted as at the last budget"
        )
    return said


def _doubts(context: PlanningContext, option: Option) -> list[str]:
    """What the surface itself says against believing it."""
    surface, said = context.surface, []
    few = [
        f"{one.start} to {one.stop} ({one.prompts})"
        for one in option.bins
        if one.prompts is not None and one.prompts < LEAST_PROMPTS
    ]
    if few:
        places = ", ".join(few)
        said.append(f"fewer than {LEAST_PROMPTS} prompts, so too narrow intervals, at {places}")
    if surface.undecided:
        said.append(f"measuring ended with {len(surface.undecided)} cells in doubt")
    if not any(abs(option.target - known) < 1e-9 for known in surface.targets):
        aims = ", ".join(f"{known:g}" for known in surface.targets)
        said.append(f"samples were spent on a target of {aims}, not of {option.target:g}")
    return said


def _far(context: PlanningContext, option: Option) -> list[str]:
    """Where step times are extrapolated, and where sparse rollout does not pay."""
    rows = max(lengths.shape[1] for lengths in context.trace(option.variant).chunks())
    said = stretched(context.hardware, context.spec, rows)
    if option.seconds >= option.dense_seconds:
        said.append(
            f"on {context.hardware.name} the schedule is no faster than dense "
            f"({option.speed_up:.2f}x): choosing what to read costs more than reading less saves"
        )
    return said


def _provenance(
    context: PlanningContext, variant: Variant, bins: Sequence[PlanBin], target: float, by: By
) -> tuple[Note, ...]:
    surface = context.surface
    prompts = [one.prompts for one in bins if one.prompts is not None]
    what = "lower end of its 95 % interval over prompts" if by == "low" else "point estimate"
    count = f"{min(prompts)} to {max(prompts)} prompts in a bin" if prompts else "no bin was bound"
    last = bins[-1].stop
    notes = {
        "target": f"5th percentile (p05) of per-token acceptance at {target:g}: {what}",
        "weights": surface.fingerprint,
        "flow": variant.source,
        "measured": f"{surface.mode}, {surface.dtype} on {surface.device}, {surface.created}",
        "prompts": f"{surface.prompts} ({surface.prompts_digest}); {count}",
        "lengths": f"measured to {last} tokens; beyond, everything is kept",
        "sampling": f"temperature {surface.temperature:g}",
        "planned": f"{context.hardware.name}; {context.workload.describe()}",
        "check": "predicted from budgets that were constant over the length; check it with "
        "sparrow calibrate --schedule",
    }
    return tuple(Note(key=key, text=text) for key, text in notes.items())


# What stands beside it.


def _aside(options_for: Callable[[float], list[Option]], target: float) -> PlanAside:
    try:
        best = options_for(target)[0]
    except Unreachable as error:
        nearest = error.nearest if np.isfinite(error.nearest) else None
        return PlanAside(target=target, reached=False, nearest=nearest)
    name = best.variant.name
    return PlanAside(
        target=target, reached=True, budgets=best.budgets, speed_up=best.speed_up, variant=name
    )


def _compared(context: PlanningContext, best: Option, other: Schedule) -> Compared:
    """Another schedule on the same rollout, and what the surface says of its budgets."""
    plan = best.schedule
    fields = {"flow": "flow", "page": "page", "dense_layers": "dense layers"}
    differs = [
        f"{what} {getattr(other, field)!r} (the plan: {getattr(plan, field)!r})"
        for field, what in (fields | {"family": "model family"}).items()
        if getattr(other, field) != getattr(plan, field)
    ]
    return Compared(
        name=other.name,
        starts=tuple(other.lengths.tolist()),
        budgets=tuple(_budget(budget) for budget in other.budgets.tolist()),
        speed_up=best.dense_seconds / context.rollout(best.variant, other),
        differs=tuple(differs),
        bins=tuple(_known(context.surface, other, one.start) for one in best.bins),
    )


def _known(surface: Surface, other: Schedule, start: int) -> ComparedBin:
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
        for cell in believed(surface.cells)
        if cell.variant in alike and cell.start == start and (cell.budget or 0) <= budget
    ]
    near = max(below, key=lambda cell: cell.budget or 0, default=None)
    return ComparedBin(
        start=start,
        budget=_budget(budget),
        measured=None if near is None else near.budget,
        p05=None if near is None else near.p05,
    )


def _checked(context: PlanningContext, best: Option, check: Surface) -> tuple[CheckedBin, ...]:
    """The bins of a check run, of this plan's schedule on this plan's model and no other."""
    surface, schedules = context.surface, [variant.name for variant in check.variants]
    if check.fingerprint != surface.fingerprint or schedules != [best.schedule.name]:
        raise ValueError(
            f"the check is of {check.model}, {', '.join(schedules)}; the plan of "
            f"{surface.model}, {best.schedule.name}: give the check.json of its schedule"
        )
    fields = CheckedBin.model_fields
    return tuple(
        CheckedBin(**{name: getattr(cell, name) for name in fields}) for cell in check.cells
    )


def _eflops(context: PlanningContext, best: Option) -> float:
    """The speed-up in eFLOPs, our consistent form, over all sequences."""
    prompt = context.workload.shortest_prompt
    lengths, counts = np.unique(context.workload.lengths, return_counts=True)
    dense = sparse = 0.0
    intensity = context.hardware.intensity
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        work = eflops.consistent(
            context.spec,
            best.schedule,
            samples=count,
            prompt=prompt,
            output=length - prompt,
            field_bytes=best.variant.field_bytes,
        )
        dense += work.dense.eflops(intensity)
        sparse += work.sparse.eflops(intensity) + work.scoring.eflops(intensity)
    return dense / sparse


def _eflops_printed(context: PlanningContext, best: Option) -> float:
    """The same as the paper prints it: one mean length, one mean budget."""
    lengths, prompt = context.workload.lengths, context.workload.shortest_prompt
    steps = np.arange(prompt + 1, int(lengths.mean()) + 1)
    layers = range(context.spec.layers)
    kept = np.mean([best.schedule.kept(steps, layer).mean() for layer in layers])
    return eflops.printed(
        context.spec,
        samples=len(lengths),
        prompt=prompt,
        output=max(1, int(lengths.mean()) - prompt),
        budget=max(1, round(float(kept))),
        page=best.schedule.page,
    ).speed_up(context.hardware.intensity)
