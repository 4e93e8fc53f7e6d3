"""A plan as it is written: one JSON file for readers, and the schedule to use."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.calibrate.planning import eflops
from sparrow.calibrate.planning.plan import FEW, By, Plan, Unreachable, plan
from sparrow.calibrate.planning.pricing import Ground, rollout
from sparrow.files import remove_unfinished, write_document
from sparrow.schema.base import to_dict
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.surface import Surface, Variant

FORMAT = 1
PLAN, SCHEDULE = "plan.json", "schedule.json"
ASIDE = 0.02  # how far from the target the plan is looked at again

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what is shown beside it."""

    ground: Ground
    plans: list[Plan]  # the fastest first; others are of other variants
    sensitivity: list[Json]
    compare: Json | None
    check: list[Json] | None

    @property
    def best(self) -> Plan:
        return self.plans[0]


def make(
    ground: Ground,
    target: float,
    *,
    by: By = "low",
    allow_dense: bool = False,
    variants: Sequence[str] = (),
    compare: Schedule | None = None,
    check: Surface | None = None,
) -> Planned:
    """The plan, the same at targets a little aside, another schedule and a check run beside it."""
    plans = plan(ground, target, by=by, allow_dense=allow_dense, variants=variants)
    near = (round(target + change, 6) for change in (-ASIDE, ASIDE))
    aside = [_aside(ground, one, by, allow_dense, variants) for one in near if 0 < one < 1]
    return Planned(
        ground=ground,
        plans=plans,
        sensitivity=aside,
        compare=None if compare is None else _compared(ground, plans[0], compare),
        check=None if check is None else _checked(ground, plans[0], check),
    )


def _aside(
    ground: Ground, target: float, by: By, allow_dense: bool, variants: Sequence[str]
) -> Json:
    try:
        best = plan(ground, target, by=by, allow_dense=allow_dense, variants=variants)[0]
    except Unreachable as error:
        return {
            "target": target,
            "budgets": [],
            "speed_up": None,
            "reached": False,
            "variant": None,
            "nearest": error.nearest,
        }
    return {
        "target": target,
        "budgets": [_budget(budget) for budget in best.budgets],
        "speed_up": best.speed_up,
        "reached": True,
        "variant": best.variant.name,
        "nearest": None,
    }


def _compared(ground: Ground, best: Plan, other: Schedule) -> Json:
    """Another schedule on the same rollout, and what the surface says of its budgets."""
    seconds = rollout(ground, best.variant, other)
    differs = [
        f"{what} {theirs!r} (the plan: {ours!r})"
        for what, theirs, ours in (
            ("flow", other.flow, best.schedule.flow),
            ("page", other.page, best.schedule.page),
            ("dense layers", other.dense_layers, best.schedule.dense_layers),
            ("model family", other.family, best.schedule.family),
        )
        if theirs != ours
    ]
    return {
        "name": other.name,
        "starts": other.lengths.tolist(),
        "budgets": [_budget(budget) for budget in other.budgets.tolist()],
        "speed_up": best.dense_seconds / seconds,
        "differs": differs,
        "bins": [_known(ground.surface, other, each.start) for each in best.bins],
    }


def _known(surface: Surface, other: Schedule, start: int) -> Json:
    """Of the measured budgets that are no larger than the other's, the largest: a lower bound.

    Only where the surface has a variant of the other's own flow, dense layers and even budgets.
    """
    budget = other.budget(start)
    own = {one.name for one in surface.variants if _like(one, other)}
    below = [
        cell
        for cell in surface.cells
        if cell.variant in own
        and cell.start == start
        and cell.prompts >= FEW
        and cell.budget is not None
        and cell.budget <= budget
    ]
    near = max(below, key=lambda cell: cell.budget or 0, default=None)
    return {
        "start": start,
        "budget": _budget(budget),
        "measured": near and near.budget,
        "p05": near and near.p05,
    }


def _like(variant: Variant, other: Schedule) -> bool:
    rule = (other.flow, other.page, other.first, other.last, other.dense_layers)
    own = (variant.flow, variant.page, variant.first, variant.last, variant.dense_layers)
    return own == rule and not variant.shares and not other.layers


def _checked(ground: Ground, best: Plan, check: Surface) -> list[Json]:
    """The bins of a check run, of this plan's schedule on this plan's model and no other."""
    schedules = [one.name for one in check.variants]
    if check.fingerprint != ground.surface.fingerprint or schedules != [best.schedule.name]:
        raise ValueError(
            f"the check is of {check.model}, {', '.join(schedules)}; the plan of "
            f"{ground.surface.model}, {best.schedule.name}: give the check.json of its schedule"
        )
    return [
        {key: getattr(cell, key) for key in ("start", "stop", "p05", "low", "high", "prompts")}
        for cell in check.cells
    ]


def as_json(planned: Planned) -> Json:
    """Everything, in the format that docs/calibrate.md describes."""
    best, ground = planned.best, planned.ground
    return {
        "format": FORMAT,
        "model": ground.surface.model,
        "variant": best.variant.name,
        "target": best.target,
        "by": best.by,
        "bins": [
            {
                "start": each.start,
                "stop": each.stop,
                "budget": _budget(each.budget),
                **{key: each.cell and getattr(each.cell, key) for key in ("p05", "low", "high")},
                "mean": each.cell and each.cell.mean,
                "prompts": each.cell and each.cell.prompts,
                "kept_share": each.kept_share,
                "seconds": each.seconds,
                "dense_seconds": each.dense_seconds,
            }
            for each in best.bins
        ],
        "sensitivity": planned.sensitivity,
        "speed_up": best.speed_up,
        "limit": best.limit.speed_up,
        "eflops": _eflops(ground, best),
        "eflops_printed": _eflops_printed(ground, best),
        "seconds": best.seconds,
        "dense_seconds": best.dense_seconds,
        "steps": best.steps,
        "ms_step": 1e3 * best.seconds / best.steps,
        "dense_ms_step": 1e3 * best.dense_seconds / best.steps,
        "tokens": best.limit.tokens,
        "capacity": best.limit.capacity,
        "bytes": best.limit.sparse.total,
        "dense_bytes": best.limit.dense.total,
        "hardware": ground.hardware.name,
        "hardware_note": ground.hardware.note,
        "workload": ground.workload.describe(),
        "variants": [
            {"name": one.variant.name, "speed_up": one.speed_up, "limit": one.limit.speed_up}
            for one in planned.plans
        ],
        "compare": planned.compare,
        "check": planned.check,
        "notes": list(best.notes),
        "schedule": to_dict(best.schedule),
    }


def _eflops(ground: Ground, best: Plan) -> float:
    """The speed-up in eFLOPs, our consistent form, over all sequences."""
    prompt = ground.workload.shortest_prompt
    lengths, counts = np.unique(ground.workload.lengths, return_counts=True)
    dense = sparse = 0.0
    intensity = ground.hardware.intensity
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        work = eflops.consistent(
            ground.spec,
            best.schedule,
            samples=count,
            prompt=prompt,
            output=length - prompt,
            field_bytes=best.variant.field_bytes,
        )
        dense += work.dense.eflops(intensity)
        sparse += work.sparse.eflops(intensity) + work.scoring.eflops(intensity)
    return dense / sparse


def _eflops_printed(ground: Ground, best: Plan) -> float:
    """The same as the paper prints it: one mean length, one mean budget."""
    lengths, prompt = ground.workload.lengths, ground.workload.shortest_prompt
    steps = np.arange(prompt + 1, int(lengths.mean()) + 1)
    kept = np.mean([best.schedule.kept(steps, layer).mean() for layer in range(ground.spec.layers)])
    return eflops.printed(
        ground.spec,
        samples=len(lengths),
        prompt=prompt,
        output=max(1, int(lengths.mean()) - prompt),
        budget=max(1, round(float(kept))),
        page=best.schedule.page,
    ).speed_up(ground.hardware.intensity)


def write(planned: Planned, folder: str | Path) -> list[Path]:
    """The schedule to use and the plan to read."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    remove_unfinished(place)
    planned.best.schedule.save(place / SCHEDULE)
    write_document(place / PLAN, as_json(planned))
    return [place / SCHEDULE, place / PLAN]


def _budget(budget: int) -> int | None:
    return None if budget == DENSE else budget
