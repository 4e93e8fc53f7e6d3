"""Accuracy while a run goes: rows that are held out, answered every so many steps."""

from collections.abc import Callable

from sparrow.config import RowsConfig, TrainConfig
from sparrow.dataflow.evaluation import Part, evaluate
from sparrow.dataflow.local.run import Run
from sparrow.records import SamplingParams
from sparrow.tasks.choosing import judge_of, rows_of

SEED = 2**40  # where the seeds of validation begin: rows of a run never use them


def validation_of(config: TrainConfig) -> Callable[[Run], dict[str, float]] | None:
    """What measures accuracy by the run's engine; None where none is asked for."""
    wanted = config.validation
    if not wanted.every:
        return None
    rows = rows_of(_rows_config(config), seed=config.run.seed)
    judge = judge_of(_rows_config(config), rows)
    first = 0 if config.data.task is not None and wanted.file is None else wanted.first
    parts = Part.of(rows, judge, count=wanted.rows, first=first)

    def measure(run: Run) -> dict[str, float]:
        params = SamplingParams(n=wanted.samples, max_tokens=config.rollout.max_tokens, seed=SEED)
        schedule = run.gate.schedule if wanted.sparse else None
        found = evaluate(
            run.engine, parts, run.language, params, schedule=schedule, model=config.model.name
        )
        named: dict[str, float] = {}
        for cell in found.evaluation.cells:
            name = f"val-core/{cell.source}/acc"
            named[f"{name}/mean@{wanted.samples}"] = cell.mean.value
            if cell.mean.low is not None and cell.mean.high is not None:
                named |= {f"{name}/low": cell.mean.low, f"{name}/high": cell.mean.high}
            named[f"val-aux/{cell.source}/length/mean"] = cell.tokens
            named[f"val-aux/{cell.source}/cut_off"] = cell.cut_off
        return named

    return measure


def _rows_config(config: TrainConfig) -> RowsConfig:
    """The training's rows from another place on, or another file, in its order."""
    wanted = config.validation
    changes: dict[str, object] = {"shuffle": False}
    if wanted.file is not None:
        changes |= {"file": wanted.file, "task": None}
    else:
        changes |= {"first": wanted.first, "rows": None}
    return config.data.model_copy(update=changes)
