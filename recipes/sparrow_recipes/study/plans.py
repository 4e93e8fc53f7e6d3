"""What the runs of a study need: dense answers of the start model, and schedules.

Schedules: a surface, a plan for every target, fixed budgets of equal cost, given ones.
"""

import numpy as np
import numpy.typing as npt

from sparrow import api, load
from sparrow.dataflow.local.run import open_parts
from sparrow.files import make_folder
from sparrow.models import fingerprint
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface
from sparrow.schema.types import Progress, Report
from sparrow.sparse import named_schedule
from sparrow_recipes.study.cell import outcomes
from sparrow_recipes.study.config import ArmConfig
from sparrow_recipes.study.design import Study
from sparrow_recipes.study.files import StartAnswers

Lengths = npt.NDArray[np.int64]


def check_start(study: Study, *, report: Report = api.silent) -> None:
    """Evaluate the start model as its runs will, densely; ValueError if too many are cut off."""
    if not study.start.exists():
        train = study.config.train
        with open_parts(train, study.folder, report=report) as run:
            shares = outcomes(run.rollout.evaluate(None))
        answers = train.validation.prompts * train.validation.samples
        start = StartAnswers(model=train.model.name, answers=answers, **shares._asdict())
        start.save(study.start)
    if refusal := study.refusal():
        raise ValueError(refusal)


def make_plans(
    study: Study, *, progress: Progress | None = None, report: Report = api.silent
) -> None:
    """Write the schedule of every sparse arm; existing files are kept.

    Budgets are whole pages, the same in all layers; no layer is dense.
    """
    make_folder(study.plans)
    schedules: dict[str, Schedule] = {}
    if any(arm.target is not None for arm in study.config.arms):
        surface = open_surface(study, progress, report)
    for arm in sorted(study.config.arms, key=lambda arm: arm.target is None):  # targets first
        if arm.target is not None:
            schedules[arm.name] = planned_schedule(study, surface, arm)
        elif arm.like is not None:
            budget = equal_budget(schedules[arm.like], drawn_lengths(surface))
            schedules[arm.name] = Schedule.fixed(budget, name=arm.name, dense_layers=())
        elif arm.budget is not None:
            schedules[arm.name] = Schedule.fixed(arm.budget, name=arm.name, dense_layers=())
        elif arm.schedule is not None:
            schedules[arm.name] = named_schedule(arm.schedule)
        if not arm.dense and not study.plan_of(arm).exists():
            schedules[arm.name].save(study.plan_of(arm))


def open_surface(study: Study, progress: Progress | None, report: Report) -> Surface:
    """Measure the surface, or load the one that the configuration names, of the same weights.

    Every budget is measured on the same prompts; those of a file are training rows.
    """
    config, data, settings = study.config, study.config.train.data, study.config.surface
    chosen = config.train.model
    model = load(chosen.name, dtype=chosen.dtype, device=chosen.device, report=report)
    if settings.surface is None:
        return api.calibrate(
            model,
            out=study.calibration,
            task=data.task,
            length=data.length,
            rows=data.rows,
            skip=settings.first if data.task is not None else 0,
            max_tokens=config.train.rollout.max_tokens,
            budget=settings.budgets,
            bin=settings.bin,
            target=[arm.target for arm in config.arms if arm.target is not None],
            prompts=settings.prompts,
            first_round=settings.prompts,
            layer_groups=0,
            by_layer=False,
            progress=progress,
            report=report,
        )
    surface = Surface.load(settings.surface)
    if surface.fingerprint != fingerprint(model):
        raise ValueError(
            f"{settings.surface}: measured on weights {surface.fingerprint}, but {chosen.name} has "
            f"{fingerprint(model)}"
        )
    return surface


def planned_schedule(study: Study, surface: Surface, arm: ArmConfig) -> Schedule:
    """Plan the cheapest schedule of the plain variant; lengths without enough budget run dense."""
    plain = [v.name for v in surface.variants if not v.dense_layers and not v.shares]
    if not plain:
        raise ValueError("the surface has no variant with equal budgets in all layers")
    folder, by = study.plans / arm.name, study.config.surface.by
    make_folder(folder)
    options = {"target": arm.target, "by": by, "allow_dense": True, "variant": plain}
    return api.plan(surface, **options, out=folder).schedule


def drawn_lengths(surface: Surface) -> Lengths:
    """The total lengths at which the tokens of the surface's dense answers were sampled."""
    first = surface.prompt_tokens + 1
    return np.concatenate([np.arange(first, max(length, first + 1)) for length in surface.lengths])


def equal_budget(schedule: Schedule, lengths: Lengths, page: int = 16) -> int:
    """The budget, in whole pages, whose mean of kept tokens is nearest to the schedule's.

    Neither keeps more than there is, so this is above the schedule's mean of kept tokens.
    """

    def distance(budget: int) -> float:
        kept = Schedule.fixed(budget, dense_layers=()).kept(lengths, 0).mean()
        return abs(float(kept - schedule.kept(lengths, 0).mean()))

    return min(range(3 * page, int(lengths.max()) + page, page), key=distance)
