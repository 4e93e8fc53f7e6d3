"""The schedules of a study: a surface, a plan for every target, fixed budgets of equal cost."""

import numpy as np
import numpy.typing as npt

from sparrow import api
from sparrow.files import make_folder
from sparrow.models import fingerprint, load
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface
from sparrow.schema.types import Progress, Report
from sparrow_recipes.study.config import ArmConfig
from sparrow_recipes.study.design import Study

Lengths = npt.NDArray[np.int64]


def make_plans(
    study: Study, *, progress: Progress | None = None, report: Report = api.silent
) -> None:
    """Write the schedule of every arm that is not dense; what is there stays.

    Budgets in pages; no layer is left dense, and all layers of a schedule keep as much.
    """
    make_folder(study.plans)
    made: dict[str, Schedule] = {}
    if any(arm.target is not None for arm in study.config.arms):
        surface = surface_of(study, progress, report)
    for arm in sorted(study.config.arms, key=lambda arm: arm.target is None):  # plans come first
        if arm.target is not None:
            made[arm.name] = planned_schedule(study, surface, arm)
        elif arm.like is not None:
            budget = equal_budget(made[arm.like], drawn_lengths(surface))
            made[arm.name] = Schedule.fixed(budget, name=arm.name, dense_layers=())
        elif arm.budget is not None:
            made[arm.name] = Schedule.fixed(arm.budget, name=arm.name, dense_layers=())
        if not arm.dense and not study.plan_of(arm).exists():
            made[arm.name].save(study.plan_of(arm))


def surface_of(study: Study, progress: Progress | None, report: Report) -> Surface:
    """The surface: measured here, or one that the configuration names, of the same weights.

    Every budget is measured on the same prompts; those of a file are rows of training.
    """
    config, data, own = study.config, study.config.train.data, study.config.surface
    wanted = config.train.model
    model = load(wanted.name, dtype=wanted.dtype, device=wanted.device, report=report)
    if own.surface is None:
        return api.calibrate(
            model,
            out=study.calibration,
            task=data.task,
            length=data.length,
            rows=data.rows,
            skip=own.first if data.task is not None else 0,
            max_tokens=config.train.rollout.max_tokens,
            budget=own.budgets,
            bin=own.bin,
            target=[arm.target for arm in config.arms if arm.target is not None],
            prompts=own.prompts,
            first_round=own.prompts,
            layer_groups=0,
            by_layer=False,
            progress=progress,
            report=report,
        )
    given = Surface.load(own.surface)
    if given.fingerprint != fingerprint(model):
        raise ValueError(
            f"{own.surface}: measured on weights {given.fingerprint}, but {wanted.name} has "
            f"{fingerprint(model)}"
        )
    return given


def planned_schedule(study: Study, surface: Surface, arm: ArmConfig) -> Schedule:
    """The cheapest of the plain variant; lengths where no budget is enough run dense."""
    plain = [one.name for one in surface.variants if not one.dense_layers and not one.shares]
    if not plain:
        raise ValueError("the surface has no variant without dense layers and layers' shares")
    folder, by = study.plans / arm.name, study.config.surface.by
    make_folder(folder)
    options = {"target": arm.target, "by": by, "allow_dense": True, "variant": plain}
    return api.plan(surface, **options, out=folder).schedule


def drawn_lengths(surface: Surface) -> Lengths:
    """Every total length at which a token of the surface's dense answers was drawn."""
    first = surface.prompt_tokens + 1
    return np.concatenate([np.arange(first, max(length, first + 1)) for length in surface.lengths])


def equal_budget(schedule: Schedule, lengths: Lengths, page: int = 16) -> int:
    """The budget, in whole pages, whose mean of kept tokens is nearest to the schedule's.

    Both keep no more than there is, so this is more than the schedule's mean of kept tokens.
    """

    def distance(budget: int) -> float:
        kept = Schedule.fixed(budget, dense_layers=()).kept(lengths, 0).mean()
        return abs(float(kept - schedule.kept(lengths, 0).mean()))

    return min(range(3 * page, int(lengths.max()) + page, page), key=distance)
