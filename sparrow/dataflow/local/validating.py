"""Accuracy while a run goes: rows that are held out, answered every so many steps."""

from dataclasses import dataclass

from sparrow.dataflow.evaluation import Part, evaluate
from sparrow.dataflow.language import Language
from sparrow.engine.engine import Engine
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
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

    def measure(self, engine: Engine, language: Language, schedule: Schedule | None) -> Evaluation:
        """Accuracy by source, with its interval; dense unless it is to be as training is."""
        return evaluate(
            engine,
            self.parts,
            language,
            self.params,
            schedule=schedule if self.sparse else None,
            model=self.model,
        ).evaluation

    def close(self) -> None:
        self.judge.close()


def validation_of(config: TrainConfig) -> Validation | None:
    """None where none is asked for."""
    wanted = config.validation
    if not wanted.every:
        return None
    changes: dict[str, object] = {"first": wanted.first, "rows": None}
    if wanted.file is not None:  # in its order; else the training's rows from another place on
        changes = {"file": wanted.file, "task": None}
    chosen = config.data.model_copy(update={"shuffle": False, **changes})
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
