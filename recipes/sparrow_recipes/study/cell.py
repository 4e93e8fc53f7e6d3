"""One cell of a study: a run of `sparrow train`, with its tail measured before and after it."""

import shutil
import time
from collections.abc import Sequence

import numpy as np

from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.messages import Diverged, Watcher
from sparrow.dataflow.local.metrics import LEAST, UNCERTAIN, p05
from sparrow.dataflow.local.run import Run, open_run
from sparrow.dataflow.stopping import Stopping
from sparrow.schema.base import Float32Array
from sparrow.schema.gate import Reading
from sparrow.schema.run_folder import MODEL
from sparrow.schema.types import Report
from sparrow.stats import TAIL as TAIL_SHARE
from sparrow.stats import quantile_interval
from sparrow_recipes.study.config import ProbeConfig
from sparrow_recipes.study.design import END, Cell, Study
from sparrow_recipes.study.files import CellEnd, CellTail, TailBin

START, TAIL = "start.json", "tail.json"
PLACE = 500_000  # where the probe's rows begin, the same for all runs of a seed; far from training


def run_cell(
    study: Study,
    cell: Cell,
    rate: float,
    *,
    watch: Watcher | None = None,
    stopping: Stopping | None = None,
    report: Report | None = None,
) -> None:
    """Train the cell to its end, or go on; raises Stopped where it is to end before.

    A run that diverges has an outcome too. Everything else that goes wrong is raised, and the cell
    is not ended.
    """
    if study.ended(cell):
        return
    begun, folder = time.monotonic(), study.folder_of(cell)
    if (folder / MODEL).exists():  # killed after its training: that ends once more, as it did
        shutil.rmtree(folder / MODEL)
    run = open_run(study.training(cell, rate), watch=watch, stopping=stopping, report=report)

    def measure_tail(name: str) -> None:
        run.watch.phase(f"measuring the tail: {name}")
        probe(run, study.config.probe, study.config.surface.bin).save(folder / name)

    diverged = ""
    with run:
        if run.step == 0 and not (folder / START).exists():
            measure_tail(START)
        try:
            train(run)
            measure_tail(TAIL)
        except Diverged as error:
            diverged = str(error)
    CellEnd(
        status="diverged" if diverged else "done",
        message=diverged,
        steps=run.step,
        seconds=round(time.monotonic() - begun, 1),  # of the session that ended it
        rate=run.config.optimiser.rate,
    ).save(folder / END)


def probe(run: Run, wanted: ProbeConfig, width: int) -> CellTail:
    """p05 by bin of `width` tokens with the weights and the schedule of now; nothing is learnt."""
    request = run.request().replace(
        position=PLACE,
        prompts=wanted.prompts,
        samples=wanted.samples,
        watched=wanted.prompts * wanted.samples,
    )
    batch = run.learner.read(run.rollout.play(request))
    schedule = run.gate.schedule
    return CellTail(
        step=run.step,
        schedule="dense" if schedule is None else schedule.name,
        entropy=float(np.concatenate([one.entropy for one in batch.reads]).mean()),
        length=float(np.mean([len(one.lengths) for one in batch.readings])),
        bins=tuple(bins_of(batch.readings, width)),
    )


def bins_of(readings: Sequence[Reading], width: int) -> list[TailBin]:
    """p05 with its interval over prompts in every bin with tokens enough, and of unsure tokens."""
    last = max((int(one.lengths.max()) for one in readings if len(one.lengths)), default=-1)
    starts = range(0, last + 1, width)
    return [own for start in starts if (own := _bin(readings, start, start + width)) is not None]


def _bin(readings: Sequence[Reading], start: int, stop: int) -> TailBin | None:
    by_prompt: dict[str, list[Float32Array]] = {}
    unsure: list[Float32Array] = []
    for one in readings:
        inside = (one.lengths >= start) & (one.lengths < stop)
        if inside.any():
            assert one.entropy is not None
            by_prompt.setdefault(one.prompt, []).append(one.alpha[inside])
            unsure.append(one.alpha[inside & (one.entropy > UNCERTAIN)])
    prompts = [np.concatenate(parts) for parts in by_prompt.values()]
    tokens = sum(map(len, prompts))
    if tokens < LEAST:
        return None
    tail, doubtful = quantile_interval(prompts, TAIL_SHARE), np.concatenate(unsure)
    return TailBin(
        start=start,
        stop=stop,
        tokens=tokens,
        prompts=len(prompts),
        p05=tail.value,
        low=tail.low,
        high=tail.high,
        uncertain=len(doubtful),
        p05_uncertain=p05(doubtful) if len(doubtful) else None,
    )
