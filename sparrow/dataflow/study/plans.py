"""The schedules of a study: a surface, a plan for every target, fixed budgets of equal cost."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sparrow.calibrate.calibration import Settings
from sparrow.calibrate.collecting import Progress, Sampling
from sparrow.calibrate.planning.context import PlanningContext
from sparrow.calibrate.planning.hardware import Hardware
from sparrow.calibrate.planning.plan import plan, write
from sparrow.dataflow import prompts as sources
from sparrow.dataflow.calibrate import (
    Request,
    budgets_for,
    calibrate,
    edges_for,
    longest_of,
)
from sparrow.dataflow.study.design import Study
from sparrow.files import make_folder
from sparrow.models import Decoder, fingerprint, load
from sparrow.schema.schedule import Schedule
from sparrow.schema.study import ArmConfig
from sparrow.schema.surface import Surface

Report = Callable[[str], None]
Lengths = npt.NDArray[np.int64]
NO_LAYERS: tuple[int, ...] = ()


def planned(study: Study) -> bool:
    """Whether every arm has its schedule."""
    return all(arm.dense or study.plan_of(arm).exists() for arm in study.config.arms)


def make_plans(
    study: Study, *, progress: Progress | None = None, report: Report | None = None
) -> None:
    """Write the schedule of every arm that is not dense; what is there stays.

    Budgets in pages; no layer is left dense, and all layers of a schedule keep as much.
    """
    arms = [arm for arm in study.config.arms if not arm.dense]
    make_folder(study.plans)
    targets = [arm for arm in arms if arm.target is not None]
    surface = surface_of(study, progress, report) if targets else None
    made: dict[str, Schedule] = {}
    for arm in targets:
        assert surface is not None
        made[arm.name] = _plan(study, surface, arm)
    for arm in arms:
        if arm.target is None:
            made[arm.name] = _fixed(study, arm, surface, made)
    for arm in arms:
        if not study.plan_of(arm).exists():
            made[arm.name].save(study.plan_of(arm))


def surface_of(study: Study, progress: Progress | None, report: Report | None) -> Surface:
    """The surface: measured here, or one that the configuration names, of the same weights."""
    config = study.config
    model = load(
        config.train.model.name,
        dtype=config.train.model.dtype,
        device=config.train.model.device,
        report=report,
    )
    if config.surface.surface is None:
        return _measured(study, model, progress, report)
    given = Surface.load(config.surface.surface)
    if given.fingerprint != fingerprint(model):
        raise ValueError(
            f"{config.surface.surface}: measured on weights {given.fingerprint}, but "
            f"{config.train.model.name} has {fingerprint(model)}"
        )
    return given


def _measured(
    study: Study, model: Decoder, progress: Progress | None, report: Report | None
) -> Surface:
    """Every budget on the same prompts; those of a file are rows of training."""
    own, data = study.config.surface, study.config.train.data
    if data.task is not None:
        source = sources.of_task(
            model, data.task, length=data.length, count=own.prompts, skip=own.first
        )
    else:
        assert data.file is not None
        source = sources.of_rows(model, data.file, count=own.prompts)
    most = study.config.train.rollout.max_tokens
    longest = longest_of(source, model, most)
    settings = Settings(
        budgets=tuple(sorted(set(own.budgets or budgets_for(longest)))),
        edges=edges_for(longest, own.bin),
        targets=tuple(arm.target for arm in study.config.arms if arm.target is not None),
        first_round=own.prompts,
        more=own.prompts,
        layer_groups=0,
        by_layer=False,
    )
    sampling = Sampling(samples=1, max_tokens=most, temperature=1.0, seed=0)
    request, folder = Request(dense_layers=(NO_LAYERS,)), study.calibration
    return calibrate(
        model, source, request, settings, sampling, folder, progress=progress, report=report
    )


def _plan(study: Study, surface: Surface, arm: ArmConfig) -> Schedule:
    """The cheapest of the plain variant; lengths where no budget is enough run dense."""
    assert arm.target is not None
    plain = [one.name for one in surface.variants if not one.dense_layers and not one.shares]
    if not plain:
        raise ValueError("the surface has no variant without dense layers and layers' shares")
    context = PlanningContext.of(surface, Hardware.load("h200"))
    found = plan(context, arm.target, by=study.config.surface.by, allow_dense=True, variants=plain)
    folder = study.plans / arm.name
    make_folder(folder)
    write(found, folder)
    return found.schedule


def _fixed(
    study: Study, arm: ArmConfig, surface: Surface | None, made: dict[str, Schedule]
) -> Schedule:
    """A budget at all lengths: the given one, or that which reads as much as a schedule does."""
    if arm.budget is not None:
        return Schedule.fixed(arm.budget, name=arm.name, dense_layers=NO_LAYERS)
    assert arm.like is not None
    assert surface is not None
    lengths = drawn_lengths(surface)
    budget = equal_budget(made[arm.like], lengths)
    return Schedule.fixed(budget, name=arm.name, dense_layers=NO_LAYERS)


def drawn_lengths(surface: Surface) -> Lengths:
    """Every total length at which a token of the surface's dense answers was drawn."""
    first = surface.prompt_tokens + 1
    return np.concatenate([np.arange(first, max(length, first + 1)) for length in surface.lengths])


def equal_budget(schedule: Schedule, lengths: Lengths, page: int = 16) -> int:
    """The budget, in whole pages, whose mean of kept tokens is nearest to the schedule's.

    Both keep no more than there is, so this is more than the schedule's mean of kept tokens.
    """
    wanted = schedule.kept(lengths, 0).mean()
    candidates = np.arange(3 * page, int(lengths.max()) + page, page)
    kept = [
        Schedule.fixed(int(one), dense_layers=NO_LAYERS).kept(lengths, 0).mean()
        for one in candidates
    ]
    return int(candidates[int(np.abs(np.array(kept) - wanted).argmin())])
