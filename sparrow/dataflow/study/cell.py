"""One cell of a study: a run of `sparrow train`, with its tail measured before and after it."""

import time
from collections.abc import Callable

from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.opening import close_run, open_run
from sparrow.dataflow.local.run import Diverged, Run
from sparrow.dataflow.local.watching import Watcher
from sparrow.dataflow.stopping import Stopping
from sparrow.dataflow.study.design import END, Cell, Study
from sparrow.dataflow.study.probing import probe, write

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
    begun, folder = time.monotonic(), study.folder_of(cell)
    run = open_run(study.training(cell, rate), watch=watch, stopping=stopping, report=report)
    status, message = "done", ""
    try:
        if run.step == 0 and not (folder / START).exists():
            _look(study, run, START)
        try:
            train(run)
        except Diverged as error:
            status, message = "diverged", str(error)
        if status == "done":
            _look(study, run, TAIL)
    finally:
        close_run(run)
    seconds = round(time.monotonic() - begun, 1)
    write(
        folder / END,
        {
            "status": status,
            "message": message,
            "steps": run.step,
            "seconds": seconds,  # of the session that ended it
            "rate": run.config.optimiser.rate,
        },
    )


def _look(study: Study, run: Run, name: str) -> None:
    run.watch.phase(f"measuring the tail: {name}")
    found = probe(run, study.config.probe, study.config.surface.bin)
    write(study.folder_of(study.cell(run.config.run.name)) / name, found)
