"""A study from its configuration to the last of its cells: plans, the rate, every arm and seed.

The rate is the largest at which every seed of the baseline gains enough. Cells begin with the
largest; where the baseline does not learn, they are set aside and all begins again with the next.
"""

import shutil
from collections.abc import Callable, Sequence

from sparrow.files import FolderLock, refuse_links, remove_unfinished
from sparrow.schema.loading import RESOLVED, read_resolved, save_resolved
from sparrow_recipes.study.config import StudyConfig
from sparrow_recipes.study.design import END, Cell, Study
from sparrow_recipes.study.files import CellEnd, StudyDesign, read_cell
from sparrow_recipes.study.outcome import judge
from sparrow_recipes.study.running import Job, run_jobs


class NoRate(Exception):
    """At none of the rates does every seed of the baseline learn."""


def open_study(config: StudyConfig) -> tuple[Study, FolderLock]:
    """See to it that the folder is this study's, and this process's until the lock is closed."""
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
    """Write down what the study is, unless its folder is another's; a part of it may begin then."""
    study.folder.mkdir(parents=True, exist_ok=True)
    refuse_links((*study.folder.glob("*"), *study.folder.glob("*/*")))
    refuse_other(study)
    fresh = not _begun(study)
    if fresh or not (study.folder / RESOLVED).exists():
        whole = study.config.model_copy(update={"out": study.folder.resolve()})
        save_resolved(whole, study.folder)
    if fresh or not study.design.exists():
        study.write_design(rate_of(study), command)


def _begun(study: Study) -> bool:
    """Whether there is a result that belongs to a design."""
    made = (study.folder / "cells", study.folder / "rejected")
    return any(folder.exists() for folder in made) or any(study.plans.glob("*.json"))


def refuse_other(study: Study) -> None:
    """A study does not go on with another design; how many run at a time may change.

    Before anything was planned or run, the design may change too.
    """
    if not (study.folder / RESOLVED).exists():
        if study.design.exists() or (study.folder / "cells").exists():
            raise ValueError(f"{study.folder} holds another study; name another out")
        return
    if not _begun(study):
        return
    before, now = dict(read_resolved(StudyConfig, study.folder)), dict(study.config)
    names = [name for name in now if before[name] != now[name] and name not in ("out", "parallel")]
    if names:
        raise ValueError(
            f"{study.folder} holds a study of another design ({', '.join(names)} differ); name "
            "another out, or remove that folder"
        )


def refuse_greedy(study: Study) -> None:
    """Runs that share a GPU must say how much of it each may take; an engine alone takes all."""
    from sparrow.models.checkpoint import pick_device

    train, parallel = study.config.train, study.config.parallel
    shared = parallel > 1 and pick_device(train.model.device).type == "cuda"
    if shared and train.rollout.kv_gib is None:
        raise ValueError(
            f"train.rollout.kv_gib: got none for {parallel} runs at a time on a GPU, allowed: the "
            "GiB that each may take for keys and values"
        )


def rate_of(study: Study) -> float:
    """The largest that was not rejected, which is tried or was taken."""
    rates = study.config.rates
    left = (rate for rate in rates if not study.rejected(rate).exists())
    return next(left, rates[-1])


def conduct(
    study: Study,
    command: str,
    *,
    stop: Callable[[], bool],
    event: Callable[[str], None],
    look: Callable[[Sequence[str]], None],
) -> bool:
    """Run what is left of the study; whether all of it is done. Raises JobFailed and NoRate."""
    refuse_greedy(study)
    while True:
        rate = rate_of(study)
        study.write_design(rate, command)
        ended = run_jobs(
            jobs_of(study),
            study.config.parallel,
            stop=lambda: stop() or not_learnt(study) is not None,
            event=event,
            look=look,
        )
        missed = not_learnt(study)
        if missed is None:
            study.write_design(rate, command)  # budgets are known by now
            return ended
        event(f"rate {rate:g}: {missed}")
        _set_aside(study, rate)


def jobs_of(study: Study) -> list[Job]:
    """The plans, and every cell; those that are sparse wait for the plans."""
    folder, logs = study.folder.resolve(), study.folder / "logs"
    words = ("study", str(folder / RESOLVED), f"--out={folder}")  # it may have been moved

    def job(cell: Cell) -> Job:
        return Job(
            name=cell.name,
            words=(*words, "--cell", cell.name),
            log=logs / f"{cell.name}.txt",
            done=lambda: study.ended(cell),
            ready=lambda: cell.arm.dense or study.planned(),
        )

    plans = Job("plans", (*words, "--plan"), logs / "plans.txt", study.planned, lambda: True)
    return [plans, *map(job, study.cells)]


def not_learnt(study: Study) -> str | None:
    """Which seed of the baseline gained too little; None while some run, or all have learnt."""
    if not all(map(study.ended, study.baseline_cells)):
        return None
    design, wanted = StudyDesign.load(study.design), study.config.outcome.gain
    for seed in design.baseline.seeds:
        cell = judge(read_cell(study.folder, design.baseline, seed), design)
        if cell.status != "done":
            return f"{cell.name} {cell.status}"
        if cell.gain is None:
            folder = study.folder / "cells" / cell.name
            raise ValueError(f"{folder / 'validation.jsonl'}: no start, or no evaluation after it")
        if cell.gain < wanted:
            return f"{cell.name} gained {cell.gain:+.3f}, wanted {wanted:+.2f}"
    return None


def _set_aside(study: Study, rate: float) -> None:
    """Keep the cells of a rate that failed, and go on to the next one."""
    rates = study.config.rates
    if rate == rates[-1]:
        raise NoRate(
            f"at none of the rates {', '.join(f'{rate:g}' for rate in rates)} every seed of "
            f"{study.config.baseline.name} gains {study.config.outcome.gain}: take an easier task, "
            "more steps or other rates"
        )
    aside = study.rejected(rate)
    aside.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(study.folder / "cells", aside)


def state_of(study: Study) -> dict[str, str]:
    """By cell: what became of it, or the steps that it has taken, or waiting."""
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
