"""One cell of a study: a run of `sparrow train`, with its tail measured before and after it."""

import shutil
import time
from collections.abc import Callable
from typing import Literal

from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.opening import close_run, open_run
from sparrow.dataflow.local.run import MODEL, Diverged, Run
from sparrow.dataflow.local.watching import Watcher
from sparrow.dataflow.stopping import Stopping
from sparrow.dataflow.study.design import END, Cell, Study
from sparrow.dataflow.study.probing import probe
from sparrow.schema.study_files import CellEnd

START, TAIL = "start.json", "tail.json"


def run_cell(
    study: Study,
    cell: Cell,
    rate: float,
    *,
    watch: Watcher | None = None,
    stopping: Stopping | None = None,
    report: Callable[[str], None] | None = None,
) -> None:
    """Train the cell to its end, or go on; raises Stopped where it is to end before.

    A run that diverges has an outcome too. Everything else that goes wrong is raised, and the cell
    is not ended.
    """
    if study.ended(cell):
        return
    begun = time.monotonic()
    model = study.folder_of(cell) / MODEL
    if model.exists():  # killed after its training: that ends once more, from its last checkpoint
        shutil.rmtree(model)
    run = open_run(study.training(cell, rate), watch=watch, stopping=stopping, report=report)
    try:
        if run.step == 0 and not (study.folder_of(cell) / START).exists():
            _look(study, run, START)
        status, message = _trained(run)
        if status == "done":
            _look(study, run, TAIL)
    finally:
        close_run(run)
    end = CellEnd(
        status=status,
        message=message,
        steps=run.step,
        seconds=round(time.monotonic() - begun, 1),
        rate=run.config.optimiser.rate,
    )
    end.save(study.folder_of(cell) / END)


def _trained(run: Run) -> tuple[Literal["done", "diverged"], str]:
    """How the training ended, and what is to be said of it."""
    try:
        train(run)
    except Diverged as error:
        return "diverged", str(error)
    return "done", ""


def _look(study: Study, run: Run, name: str) -> None:
    run.watch.phase(f"measuring the tail: {name}")
    found = probe(run, study.config.probe, study.config.surface.bin)
    found.save(study.folder_of(study.cell(run.config.run.name)) / name)
