"""Accuracy while a run goes: rows that are held out, answered every so many steps."""

from collections.abc import Mapping
from dataclasses import dataclass

from sparrow.dataflow.evaluation import Part, evaluate
from sparrow.dataflow.language import Language
from sparrow.engine.engine import Engine
from sparrow.schema.evaluation import EvaluationCell as Cell
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RowsConfig, TrainConfig
from sparrow.tasks.choosing import judge_of, rows_of
from sparrow.tasks.judging import InProcess, Judges
from sparrow.tasks.rows import FileRows

SEED = 2**40  # where the seeds of validation begin: rows of a run never use them


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Rows with their judge, and how they are answered: always alike, so that points compare."""

    model: str
    parts: tuple[Part, ...]
    judge: Judges | InProcess
    params: SamplingParams
    sparse: bool

    def measure(
        self, engine: Engine, language: Language, schedule: Schedule | None
    ) -> dict[str, float]:
        """Accuracy by source, with its interval; dense unless it is to be as training is."""
        chosen = schedule if self.sparse else None
        found = evaluate(
            engine, self.parts, language, self.params, schedule=chosen, model=self.model
        )
        named: dict[str, float] = {}
        for cell in found.evaluation.cells:
            named |= _named(cell, self.params.n)
        return named

    def close(self) -> None:
        if isinstance(self.judge, Judges):
            self.judge.close()


def _named(cell: Cell, samples: int) -> dict[str, float]:
    name = f"val-core/{cell.source}/acc"
    found = {f"{name}/mean@{samples}": cell.mean.value}
    if cell.mean.low is not None and cell.mean.high is not None:
        found |= {f"{name}/low": cell.mean.low, f"{name}/high": cell.mean.high}
    return found | {
        f"val-aux/{cell.source}/length/mean": cell.tokens,
        f"val-aux/{cell.source}/length/median": cell.median,
        f"val-aux/{cell.source}/cut_off": cell.cut_off,
    }


def told(named: Mapping[str, float]) -> str:
    """What was measured, for people."""
    found = []
    for name, value in named.items():
        place, _, samples = name.rpartition("/mean@")
        if place:
            source = place.removeprefix("val-core/").removesuffix("/acc")
            ends = [named.get(f"{place}/{end}") for end in ("low", "high")]
            between = "" if None in ends else f" [{ends[0]:.2f}, {ends[1]:.2f}]"
            tokens, cut = (named[f"val-aux/{source}/{key}"] for key in ("length/mean", "cut_off"))
            accuracy = f"{source}: mean@{samples} {value:.3f}{between}"
            found.append(f"{accuracy}, {tokens:.0f} tokens an answer, {cut:.0%} cut off")
    return "; ".join(found)


def validation_of(config: TrainConfig) -> Validation | None:
    """None where none is asked for."""
    wanted = config.validation
    if not wanted.every:
        return None
    chosen = _rows_config(config)
    rows = rows_of(chosen, seed=config.run.seed)
    first, count = 0, wanted.rows
    if isinstance(rows, FileRows):
        first, count = wanted.first, min(wanted.rows, len(rows) - wanted.first)
        if count < 1:
            raise ValueError(f"validation.first {first}: {rows.name} has {len(rows)} rows")
    judge = judge_of(chosen, rows)
    return Validation(
        model=config.model.name,
        parts=tuple(Part.of(rows, judge, count=count, first=first)),
        judge=judge,
        params=SamplingParams(n=wanted.samples, max_tokens=config.rollout.max_tokens, seed=SEED),
        sparse=wanted.sparse,
    )


def _rows_config(config: TrainConfig) -> RowsConfig:
    """The training's rows from another place on, or another file, in its order."""
    wanted = config.validation
    changes: dict[str, object] = {"shuffle": False}
    if wanted.file is not None:
        changes |= {"file": wanted.file, "task": None}
    else:
        changes |= {"first": wanted.first, "rows": None}
    return config.data.model_copy(update=changes)
