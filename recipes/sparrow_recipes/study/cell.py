"""A cell of a study: a training run, with acceptance p05 measured before and after it."""

import shutil
import time
from collections.abc import Sequence

import numpy as np

from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.messages import Callbacks, Diverged
from sparrow.dataflow.local.metrics import LEAST, UNCERTAIN, p05
from sparrow.dataflow.local.run import Run, open_run
from sparrow.dataflow.stopping import GracefulShutdown
from sparrow.schema.base import Float32Array
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.gate import AcceptanceReading
from sparrow.schema.run_folder import MODEL, Outcomes
from sparrow.schema.types import Report
from sparrow.stats import TAIL as TAIL_SHARE
from sparrow.stats import quantile_interval
from sparrow_recipes.study.config import ProbeConfig
from sparrow_recipes.study.design import END, Cell, Study
from sparrow_recipes.study.files import CellEnd, CellTail, TailBin

START, TAIL = "start.json", "tail.json"
PROBE_ROW = 500_000  # first row of the probe, the same for all runs of a seed; not trained on


def run_cell(
    study: Study,
    cell: Cell,
    rate: float,
    *,
    callbacks: Callbacks | None = None,
    stopping: GracefulShutdown | None = None,
    report: Report | None = None,
) -> None:
    """Train or resume the cell to its end; raises Stopped on a graceful shutdown.

    A run that diverges is an outcome too. Every other error is raised, and the cell has not ended.
    """
    if study.ended(cell):
        return
    begun, folder, own = time.monotonic(), study.folder_of(cell), study.run()
    study_id = None if own is None else own.id
    if (folder / MODEL).exists():  # killed after training: write the model again
        shutil.rmtree(folder / MODEL)
    run = open_run(
        study.training(cell, rate), callbacks=callbacks, stopping=stopping, report=report
    )

    def measure_tail(name: str) -> None:
        run.callbacks.phase(f"measuring the tail: {name}")
        tail = probe(run, study.config.probe, study.config.surface.bin)
        tail.replace(study=study_id, outcomes=sparse_outcomes(run)).save(folder / name)

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
        study=study_id,
    ).save(folder / END)


def sparse_outcomes(run: Run) -> Outcomes | None:
    """Evaluate the sparse actor on the validation rows; None if it is dense."""
    if run.gate.schedule is None:
        return None
    return outcomes(run.rollout.evaluate(run.gate.schedule, sparse=True))


def outcomes(evaluation: Evaluation) -> Outcomes:
    """Shares right, cut off and wrong of an evaluation of one source."""
    (cell,) = evaluation.cells
    assert cell.right is not None
    assert cell.wrong is not None
    return Outcomes(cell.right, cell.cut_off, cell.wrong)


def probe(run: Run, config: ProbeConfig, width: int) -> CellTail:
    """Measure p05 by bins of `width` tokens with the current weights and schedule; no update."""
    request = run.request().replace(
        position=PROBE_ROW,
        prompts=config.prompts,
        samples=config.samples,
        watched=config.prompts * config.samples,
    )
    decoding = run.rollout.decoding(request.schedule)
    batch = run.learner.score(run.rollout.generate(request), decoding)
    schedule = run.gate.schedule
    return CellTail(
        step=run.step,
        schedule="dense" if schedule is None else schedule.name,
        entropy=float(np.concatenate([scores.entropy for scores in batch.scores]).mean()),
        length=float(np.mean([len(reading.lengths) for reading in batch.readings])),
        answers=len(batch.readings),
        bins=tuple(tail_bins(batch.readings, width)),
    )


def tail_bins(readings: Sequence[AcceptanceReading], width: int) -> list[TailBin]:
    """p05 with its interval over prompts in every bin with enough tokens."""
    last = max((int(r.lengths.max()) for r in readings if len(r.lengths)), default=-1)
    starts = range(0, last + 1, width)
    bins = (_bin(readings, start, start + width) for start in starts)
    return [tail for tail in bins if tail is not None]


def _bin(readings: Sequence[AcceptanceReading], start: int, stop: int) -> TailBin | None:
    by_prompt: dict[str, list[Float32Array]] = {}
    uncertain: list[Float32Array] = []
    for reading in readings:
        inside = (reading.lengths >= start) & (reading.lengths < stop)
        if inside.any():
            assert reading.entropy is not None
            by_prompt.setdefault(reading.prompt, []).append(reading.alpha[inside])
            uncertain.append(reading.alpha[inside & (reading.entropy > UNCERTAIN)])
    prompts = [np.concatenate(parts) for parts in by_prompt.values()]
    tokens = sum(map(len, prompts))
    if tokens < LEAST:
        return None
    tail, alpha = quantile_interval(prompts, TAIL_SHARE), np.concatenate(uncertain)
    return TailBin(
        start=start,
        stop=stop,
        tokens=tokens,
        prompts=len(prompts),
        answers=len(uncertain),
        p05=tail.value,
        low=tail.low,
        high=tail.high,
        uncertain=len(alpha),
        p05_uncertain=p05(alpha) if len(alpha) else None,
    )
