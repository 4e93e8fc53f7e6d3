"""The stages of a study: the start model's answers, plans, the learning rate, every arm and seed.

The rate is the largest at which every seed of the baseline gains enough. Cells start with the
largest; if the baseline does not learn, they are moved aside and start again with the next.
"""

import shutil
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from sparrow import __version__
from sparrow.files import FolderLock, refuse_links, remove_unfinished
from sparrow.schema.loading import RESOLVED, read_resolved, save_resolved
from sparrow_recipes.study.config import StudyConfig
from sparrow_recipes.study.design import END, Cell, Study
from sparrow_recipes.study.files import CellEnd, StudyDesign, StudyRun, read_cell
from sparrow_recipes.study.judging import judge
from sparrow_recipes.study.running import Job, run_jobs

MAY_CHANGE = ("out", "parallel", "allow_cut_off")  # settings that are not part of the design


class NoRate(Exception):
    """No rate at which every seed of the baseline learns."""


def open_study(config: StudyConfig) -> tuple[Study, FolderLock]:
    """Open or create the folder of a study, locked for this process."""
    study = Study(config)
    study.folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(study.folder, setting="out")
    try:
        for folder in (study.folder, study.plans):
            remove_unfinished(folder)
        prepare(study)
    except BaseException:
        lock.close()
        raise
    return study, lock


def prepare(study: Study, command: str = "") -> None:
    """Write the design of the study; ValueError if its folder holds another study or run."""
    study.folder.mkdir(parents=True, exist_ok=True)
    refuse_links((*study.folder.glob("*"), *study.folder.glob("*/*")))
    refuse_other(study)
    fresh = not _has_results(study)
    if fresh and _changed(study):
        study.start.unlink(missing_ok=True)  # of another model, or other rows
    if fresh or not (study.folder / RESOLVED).exists():
        whole = study.config.model_copy(update={"out": study.folder.resolve()})
        save_resolved(whole, study.folder)
    begun, here = study.run(), _this_run(study)
    same = begun is not None and (begun.version, begun.device) == (here.version, here.device)
    if fresh or not study.design.exists():
        study.write_design(rate_of(study), command, begun if same else here)
    elif not same:
        by = "an older version" if begun is None else f"sparrow {begun.version} on {begun.device}"
        raise ValueError(
            f"{study.folder} holds runs of {by}, this is sparrow {here.version} on {here.device}: "
            "only runs of one study are compared; choose another out"
        )


def _this_run(study: Study) -> StudyRun:
    """A new identity of a study's run, on the device that is here."""
    import torch

    from sparrow.models.checkpoint import pick_device

    device = pick_device(study.config.train.model.device)
    return StudyRun(
        id=uuid.uuid4().hex,
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    )


def _has_results(study: Study) -> bool:
    """Whether there is a plan or a cell."""
    results = (study.folder / "cells", study.folder / "rejected")
    return any(folder.exists() for folder in results) or any(study.plans.glob("*.json"))


def refuse_other(study: Study) -> None:
    """Raise if the folder holds a study of another design.

    Before the first plan or run the design may change too.
    """
    if not (study.folder / RESOLVED).exists():
        if study.design.exists() or (study.folder / "cells").exists():
            raise ValueError(f"{study.folder} holds another study; choose another out")
        return
    if _has_results(study) and (names := _changed(study)):
        raise ValueError(
            f"{study.folder} holds a study of another design ({', '.join(names)} differ); choose "
            "another out, or remove that folder"
        )


def _changed(study: Study) -> list[str]:
    """Settings of the design that differ from those of the folder."""
    if not (study.folder / RESOLVED).exists():
        return []
    before, now = dict(read_resolved(StudyConfig, study.folder)), dict(study.config)
    return [name for name in now if before[name] != now[name] and name not in MAY_CHANGE]


def require_memory_limit(study: Study) -> None:
    """Raise if runs share a GPU without a limit of memory: one engine would take all of it."""
    from sparrow.models.checkpoint import pick_device

    train, parallel = study.config.train, study.config.parallel
    shared = parallel > 1 and pick_device(train.model.device).type == "cuda"
    if shared and train.rollout.kv_gib is None:
        raise ValueError(
            f"train.rollout.kv_gib: expected the GiB of keys and values of each run, as {parallel} "
            "runs share a GPU; got none"
        )


def rate_of(study: Study) -> float:
    """The rate in use: the largest that was not rejected."""
    rates = study.config.rates
    left = (rate for rate in rates if not study.rejected(rate).exists())
    return next(left, rates[-1])


def conduct(
    study: Study,
    command: str,
    *,
    stop: Callable[[], bool],
    event: Callable[[str], None],
    show: Callable[[Sequence[str]], None],
) -> bool:
    """Run the remaining jobs; return whether all are done. Raises JobFailed and NoRate."""
    require_memory_limit(study)
    while True:
        rate = rate_of(study)
        study.write_design(rate, command)
        ended = run_jobs(
            list_jobs(study),
            study.config.parallel,
            stop=lambda: stop() or failed_baseline(study) is not None,
            event=event,
            show=show,
        )
        failure = failed_baseline(study)
        if failure is None:
            study.write_design(rate, command)  # with the planned budgets
            return ended
        event(f"rate {rate:g}: {failure}")
        _set_aside(study, rate)


def list_jobs(study: Study) -> list[Job]:
    """The start and plans, and every cell; all wait for the start, sparse ones for the plans."""
    folder, logs = study.folder.resolve(), study.folder / "logs"
    allowed = ("--allow-cut-off",) if study.config.allow_cut_off else ()
    words = ("study", str(folder / RESOLVED), f"--out={folder}", *allowed)  # it may have been moved

    def job(cell: Cell) -> Job:
        return Job(
            name=cell.name,
            words=(*words, "--cell", cell.name),
            log=logs / f"{cell.name}.txt",
            done=lambda: study.ended(cell),
            ready=lambda: study.started() and (cell.arm.dense or study.planned()),
        )

    def planned() -> bool:
        return study.started() and study.planned()

    plans = Job("plans", (*words, "--plan"), logs / "plans.txt", planned, lambda: True)
    return [plans, *map(job, study.cells)]


def failed_baseline(study: Study) -> str | None:
    """The seed of the baseline that gained too little; None while some run, or if all learnt."""
    if study.config.outcome.gain == -1 or not all(map(study.ended, study.baseline_cells)):
        return None
    design, expected = StudyDesign.load(study.design), study.config.outcome.gain
    for seed in design.baseline.seeds:
        cell = judge(read_cell(study.folder, design.baseline, seed), design)
        if cell.status != "done":
            return f"{cell.name} {cell.status}"
        if cell.gain is None:
            folder = study.folder / "cells" / cell.name
            raise ValueError(f"{folder / 'validation.jsonl'}: no start, or no evaluation after it")
        if cell.gain < expected:
            return f"{cell.name} gained {cell.gain:+.3f}, expected {expected:+.2f}"
    return None


def _set_aside(study: Study, rate: float) -> None:
    """Move the cells of a failed rate aside, for the next rate to start."""
    rates = study.config.rates
    if rate == rates[-1]:
        raise NoRate(
            f"no rate of {', '.join(f'{rate:g}' for rate in rates)} at which every seed of "
            f"{study.config.baseline.name} gains {study.config.outcome.gain}: choose an "
            "easier task, more steps or other rates"
        )
    aside = study.rejected(rate)
    aside.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(study.folder / "cells", aside)


def state_of(study: Study) -> dict[str, str]:
    """The state of every cell: its outcome, its steps so far, or waiting."""
    return {cell.name: _state(study, cell) for cell in study.cells}


def _state(study: Study, cell: Cell) -> str:
    folder = study.folder_of(cell)
    if study.ended(cell):
        return CellEnd.load(folder / END).status
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return "waits"
    lines = metrics.read_bytes().count(b"\n")
    return f"{lines} of {study.config.train.run.steps} steps"
