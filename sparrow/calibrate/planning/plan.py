"""From a surface to a schedule: the cheapest budgets that keep the tail, and what they promise.

Of every variant the cheapest schedule is found (`choosing`), its rollout priced (`hardware`), and
the cheapest of those is the plan. What a plan says of acceptance was measured with one budget at
all lengths; under the schedule earlier tokens kept less, so a check run has the last word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from sparrow.calibrate.arms import schedule_of
from sparrow.calibrate.planning.choosing import FloatArray, cheapest, highest, merged
from sparrow.calibrate.planning.cost import Limit
from sparrow.calibrate.planning.hardware import stretched
from sparrow.calibrate.planning.pricing import Ground, Prices, dense_seconds, limit_of, prices
from sparrow.schema.schedule import DENSE, Note, Schedule
from sparrow.schema.surface import LEAST_PROMPTS, Cell, Surface, Variant

By = Literal["low", "p05"]
FEW = 8  # prompts below which a cell says nothing


class Unmeasured(ValueError):
    """A variant of which too little is known to plan anything."""


class Unreachable(ValueError):
    """No schedule keeps the target; `nearest` is the greatest that one could keep."""

    def __init__(self, text: str, nearest: float) -> None:
        super().__init__(text)
        self.nearest = nearest


class Bin(NamedTuple):
    """One bin of a plan: what it keeps, what that reaches, what it costs."""

    start: int
    stop: int
    budget: int  # DENSE: everything
    cell: Cell | None  # measured with this budget; None: dense, or nothing was measured
    seconds: float
    dense_seconds: float
    kept_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule for a variant, with everything that is predicted of it."""

    variant: Variant
    target: float
    by: By
    bins: tuple[Bin, ...]
    schedule: Schedule
    seconds: float
    dense_seconds: float
    steps: int
    limit: Limit
    notes: tuple[str, ...]

    @property
    def speed_up(self) -> float:
        return self.dense_seconds / self.seconds

    @property
    def budgets(self) -> list[int]:
        return [each.budget for each in self.bins]


def plan(
    ground: Ground,
    target: float,
    *,
    by: By = "low",
    allow_dense: bool = False,
    variants: Sequence[str] = (),
) -> list[Plan]:
    """The plan of every variant that reaches the target, the fastest rollout first."""
    if not 0 < target < 1:
        raise ValueError(f"target {target}: allowed are numbers between 0 and 1")
    chosen = [ground.surface.variant(name) for name in variants] or ground.surface.variants
    found: list[Plan] = []
    missed: list[Unreachable] = []
    unknown: list[Unmeasured] = []
    for variant in chosen:
        try:
            found.append(plan_variant(ground, variant, target, by=by, allow_dense=allow_dense))
        except Unreachable as error:
            missed.append(error)
        except Unmeasured as error:
            unknown.append(error)
    if not found:
        raise max(missed, key=lambda error: error.nearest) if missed else unknown[0]
    return sorted(found, key=lambda one: one.seconds)


def plan_variant(
    ground: Ground, variant: Variant, target: float, *, by: By, allow_dense: bool
) -> Plan:
    """The cheapest schedule of one variant; Unreachable where there is none."""
    table = Table.of(ground, variant, by)
    budgets = table.budgets if allow_dense else table.budgets[:-1]
    seconds = table.prices.seconds[:, : len(budgets)]
    reached = table.reached[:, : len(budgets)]
    choice = cheapest(seconds, reached, target)
    if choice is None:
        raise _unreachable(table, variant, target, by, reached)
    return _plan(ground, variant, table, target, by, [budgets[place] for place in choice.places])


def _unreachable(
    table: "Table", variant: Variant, target: float, by: By, reached: FloatArray
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


# What is known by bin and budget.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Of one variant, by bin and budget (the last is DENSE): acceptance reached, seconds."""

    edges: tuple[int, ...]
    budgets: tuple[int, ...]
    cells: dict[tuple[int, int], Cell]  # by start and budget
    reached: FloatArray
    prices: Prices
    notes: tuple[str, ...]

    @classmethod
    def of(cls, ground: Ground, variant: Variant, by: By) -> "Table":
        surface = ground.surface
        own = [cell for cell in surface.cells if cell.variant == variant.name]
        known = [cell for cell in own if cell.prompts >= FEW and cell.budget is not None]
        if not known:
            raise Unmeasured(f"{variant.name}: no cell has {FEW} prompts, nothing can be planned")
        edges = tuple(e for e in surface.bins if e <= _measured_to(known))
        budgets = (*sorted({cell.budget for cell in known if cell.budget is not None}), DENSE)
        cells = {(cell.start, cell.budget): cell for cell in known if cell.budget is not None}
        return cls(
            edges=edges,
            budgets=budgets,
            cells=cells,
            reached=_reached(surface, variant, edges, budgets, cells, by),
            prices=prices(ground, variant, edges, budgets),
            notes=tuple(_gaps(ground, edges, cells, own)),
        )


def _measured_to(known: Sequence[Cell]) -> int:
    """Where the largest budget was measured last: beyond, only answers of worse ones got there."""
    largest = max(cell.budget or 0 for cell in known)
    return max(cell.stop for cell in known if cell.budget == largest)


def measured_to(surface: Surface) -> int:
    """The length up to which some variant of a surface was measured."""
    known = [cell for cell in surface.cells if cell.prompts >= FEW and cell.budget is not None]
    return _measured_to(known) if known else surface.bins[-1]


def _reached(
    surface: Surface,
    variant: Variant,
    edges: Sequence[int],
    budgets: Sequence[int],
    cells: dict[tuple[int, int], Cell],
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
    made = schedule_of(variant, [0], [budget])
    return min(int(row.min()) for row in (made.budgets, *(item.budgets for item in made.layers)))


def _gaps(
    ground: Ground,
    edges: Sequence[int],
    cells: dict[tuple[int, int], Cell],
    own: Sequence[Cell],
) -> list[str]:
    """What was not measured, in words."""
    said = []
    starts = {start for start, _ in cells}
    empty = [start for start in edges[:-1] if start not in starts]
    if empty:
        said.append(
            f"nothing was measured at lengths {', '.join(f'{s} on' for s in empty)}: those bins "
            "keep what the next one needs"
        )
    longest = int(ground.workload.lengths.max())
    if longest > edges[-1]:
        said.append(
            f"lengths over {edges[-1]} were not measured on {FEW} prompts: the schedule is dense "
            f"there, and the cost of lengths up to {longest} is counted as at the last budget"
        )
    return said


# The plan itself.


def _plan(
    ground: Ground, variant: Variant, table: Table, target: float, by: By, budgets: list[int]
) -> Plan:
    starts, kept = merged(table.edges[:-1], budgets)
    open_end = [DENSE] if kept[-1] != DENSE else []  # what was not measured is not promised
    schedule = schedule_of(
        variant,
        [*starts, *([table.edges[-1]] if open_end else [])],
        kept + open_end,
        name=f"{ground.surface.model}-{target:g}",
        model=ground.surface.model,
        family=ground.surface.family,
        provenance=_provenance(ground, variant, table, target, by, budgets),
    )
    places = [table.budgets.index(budget) for budget in budgets]
    costs, dense = table.prices, dense_seconds(ground, variant, table.edges)
    bins = tuple(
        Bin(
            start=start,
            stop=stop,
            budget=budget,
            cell=table.cells.get((start, budget)),
            seconds=float(costs.seconds[i, places[i]] + costs.fixed[i]),
            dense_seconds=float(dense[i]),
            kept_share=float(costs.read[i, places[i]] / max(costs.dense_read[i], 1)),
        )
        for i, ((start, stop), budget) in enumerate(
            zip(pairwise(table.edges), budgets, strict=True)
        )
    )
    return Plan(
        variant=variant,
        target=target,
        by=by,
        bins=bins,
        schedule=schedule,
        seconds=sum(each.seconds for each in bins),
        dense_seconds=sum(each.dense_seconds for each in bins),
        steps=ground.trace(variant).steps,
        limit=limit_of(ground, variant, schedule),
        notes=(
            *table.notes,
            *_doubts(ground, table, target, budgets),
            *_far(ground, variant),
            *_slow(
                ground.hardware.name,
                sum(e.seconds for e in bins),
                sum(e.dense_seconds for e in bins),
            ),
        ),
    )


def _doubts(ground: Ground, table: Table, target: float, budgets: Sequence[int]) -> list[str]:
    """What the surface itself says against believing it."""
    surface, said = ground.surface, []
    used = [table.cells.get((s, b)) for s, b in zip(table.edges[:-1], budgets, strict=True)]
    few = [cell for cell in used if cell is not None and cell.prompts < LEAST_PROMPTS]
    if few:
        places = ", ".join(f"{cell.start} to {cell.stop} ({cell.prompts})" for cell in few)
        said.append(f"fewer than {LEAST_PROMPTS} prompts, so too narrow intervals, at {places}")
    if surface.undecided:
        said.append(f"measuring ended with {len(surface.undecided)} cells in doubt")
    if not any(abs(target - known) < 1e-9 for known in surface.targets):
        aims = ", ".join(f"{known:g}" for known in surface.targets)
        said.append(f"samples were spent on a target of {aims}, not of {target:g}")
    return said


def _far(ground: Ground, variant: Variant) -> list[str]:
    rows = max(lengths.shape[1] for lengths in ground.trace(variant).chunks())
    return stretched(ground.hardware, ground.spec, rows)


def _slow(machine: str, seconds: float, dense: float) -> list[str]:
    """A word where sparse rollout does not pay."""
    if seconds < dense:
        return []
    said = f"on {machine} the schedule is no faster than dense ({dense / seconds:.2f}x)"
    return [f"{said}: choosing what to read costs more than reading less saves"]


def _provenance(
    ground: Ground, variant: Variant, table: Table, target: float, by: By, budgets: Sequence[int]
) -> tuple[Note, ...]:
    surface = ground.surface
    used = [table.cells.get((s, b)) for s, b in zip(table.edges[:-1], budgets, strict=True)]
    prompts = [cell.prompts for cell in used if cell is not None]
    what = "lower end of its 95 % interval over prompts" if by == "low" else "point estimate"
    count = f"{min(prompts)} to {max(prompts)} prompts in a bin" if prompts else "no bin was bound"
    notes = {
        "target": f"5th percentile (p05) of per-token acceptance at {target:g}: {what}",
        "weights": surface.fingerprint,
        "flow": variant.source,
        "measured": f"{surface.mode}, {surface.dtype} on {surface.device}, {surface.created}",
        "prompts": f"{surface.prompts} ({surface.prompts_digest}); {count}",
        "lengths": f"measured to {table.edges[-1]} tokens; beyond, everything is kept",
        "sampling": f"temperature {surface.temperature:g}",
        "planned": f"{ground.hardware.name}; {ground.workload.describe()}",
        "check": "predicted from budgets that were constant over the length; check it with "
        "sparrow calibrate --schedule",
    }
    return tuple(Note(key=key, text=text) for key, text in notes.items())
