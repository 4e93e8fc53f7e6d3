"""What is evaluated: rows of tasks and files with their judges; dense, sparse, through a window.

Also accuracy on puzzles by family and length, as studies of the shipped models tabulate it.
evaluation.py has the answering and the figures of `sparrow eval`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sparrow.dataflow.evaluation import Answered, OnAnswer, Part, answer
from sparrow.dataflow.language import PUZZLE_LANGUAGE
from sparrow.engine.answer import placed_schedule
from sparrow.engine.engine import Engine
from sparrow.engine.pool import PAGE
from sparrow.models import Decoder
from sparrow.schema.common import AttentionConfig
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RowsConfig
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.flows.loading import load_flow
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example
from sparrow.tasks.choosing import judge_of, puzzle_judge, rows_of
from sparrow.tasks.rows import FileRows

ROOM = 2.5  # an answer to a puzzle may be this many times as long as the dial says


# Rows, and who judges them.


def task_parts(
    task: str,
    lengths: Sequence[int],
    *,
    rows: int,
    first: int = 0,
    max_tokens: int | None = None,
    open_judges: ExitStack,
) -> list[Part]:
    """Rows of a puzzle family or of gym/NAME, from a seed on, a part for each length.

    max_tokens: of an answer; None: what a gym's row has as its length, and more than a puzzle's.
    The judge ends with `open_judges`.
    """
    chosen = [rows_of(RowsConfig(task=task, length=length, first=0), seed=0) for length in lengths]
    judge = judge_of(RowsConfig(task=task), chosen[0])
    open_judges.callback(judge.close)
    room = ROOM if task in PUZZLES else 1.0
    return [
        part
        for length, own in zip(lengths, chosen, strict=True)
        for part in Part.of(
            own,
            judge,
            first=first,
            count=rows,
            length=length,
            max_tokens=max_tokens or round(length * room),
        )
    ]


def file_parts(
    file: str,
    *,
    reward: str | None = None,
    rows: int | None = None,
    first: int = 0,
    max_tokens: int | None = None,
    open_judges: ExitStack,
) -> tuple[list[Part], tuple[str, ...]]:
    """Rows of a file in their order, a part for each data_source; and what was left out, and why.

    rows: so many at most; None: all. The judge ends with `open_judges`.
    """
    config = RowsConfig(file=file, reward=reward, shuffle=False)
    found = rows_of(config, seed=0)
    assert isinstance(found, FileRows)
    if first >= len(found):
        raise ValueError(f"{file} has {len(found)} rows that can be used: none from {first} on")
    judge = judge_of(config, found)
    open_judges.callback(judge.close)
    most = len(found) - first
    count = most if rows is None else min(rows, most)
    parts = Part.of(found, judge, first=first, count=count, max_tokens=max_tokens)
    return parts, found.problems


# How it attends.


def attending(
    model: Decoder,
    *,
    budget: int | None = None,
    window: int | None = None,
    schedule: str | None = None,
    flow: str | None = None,
    force: bool = False,
) -> tuple[Engine, Schedule | None]:
    """An engine, and the schedule for its requests.

    budget: the rule of a flow keeps so many tokens. window: the last so many tokens and nothing
    else, without a first page and without a choice. Neither has a dense layer. schedule: a file or
    a published one, refused where it was not made for this unless forced. None of them: dense.
    """
    given = {"budget": budget, "window": window, "schedule": schedule}
    several = [name for name, value in given.items() if value is not None]
    if len(several) > 1:
        raise ValueError(f"give one of a budget, a window and a schedule, got {several}")
    if flow is not None and budget is None and schedule is None:
        raise ValueError(f"flow {flow!r} goes with a budget or a schedule")
    if force and schedule is None:
        raise ValueError("force goes with a schedule")
    if schedule is not None:
        return _scheduled(model, AttentionConfig(schedule=schedule, flow=flow, force=force))
    if window is not None:
        return _windowed(model, window)
    if budget is None:
        return Engine(model, rule=None), None
    chosen = block_mean if flow is None else load_flow(flow)
    rule = Rule(flow=chosen, dense_layers=frozenset())
    return Engine(model, rule=rule), Schedule.fixed(budget, flow=chosen.name, dense_layers=())


def _scheduled(model: Decoder, attention: AttentionConfig) -> tuple[Engine, Schedule | None]:
    placed, flow = placed_schedule(attention, model.spec.family)
    assert placed is not None
    return Engine(model, rule=Rule.of(placed, flow)), placed


def _windowed(model: Decoder, window: int) -> tuple[Engine, Schedule]:
    if window < PAGE or window % PAGE:
        raise ValueError(f"a window is a multiple of {PAGE} tokens, got {window}")
    rule = Rule(first=0, last=window // PAGE, dense_layers=frozenset())
    kept = {"first": rule.first, "last": rule.last, "dense_layers": ()}
    return Engine(model, rule=rule), Schedule.fixed(window, **kept, name=f"window-{window}")


# Puzzles by family and length.


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What a set of answers comes to."""

    answers: int
    accuracy: float
    error: float  # standard error of it, over rows
    tokens: float  # mean length of an answer
    entropy: float  # nats per sampled token
    unfinished: float  # share that ran into the limit
    reasons: dict[str, int]


def puzzles(family: str, length: int, rows: int, *, room: float = ROOM) -> list[Example]:
    """The first rows of a family; answers may have `room` times the length."""
    found = rows_of(RowsConfig(task=family, length=length, first=0), seed=0)
    return [replace(found.at(i), max_tokens=round(length * room)) for i in range(rows)]


def answer_puzzles(
    engine: Engine,
    rows: Sequence[Example],
    *,
    schedule: Schedule | None = None,
    temperature: float = 1.0,
    on_answer: OnAnswer | None = None,
) -> list[Answered]:
    """One answer to every row, seeded; the rows say how long it may be."""
    params = SamplingParams(seed=0, temperature=temperature, max_tokens=engine.max_context)
    return answer(
        engine,
        rows,
        puzzle_judge(),
        PUZZLE_LANGUAGE,
        params,
        schedule=schedule,
        on_answer=on_answer,
    )


def accuracies(
    model: Decoder,
    families: Sequence[str],
    lengths: Sequence[int],
    *,
    rows: int,
    temperature: float = 1.0,
    budget: int | None = None,
    window: int | None = None,
    on_answer: OnAnswer | None = None,
) -> dict[str, dict[int, Accuracy]]:
    """Accuracy on the first rows of each family and length: dense, sparse, or through a window."""
    engine, schedule = attending(model, budget=budget, window=window)
    cells = [(family, length) for family in families for length in lengths]
    found = answer_puzzles(
        engine,
        [row for family, length in cells for row in puzzles(family, length, rows)],
        schedule=schedule,
        temperature=temperature,
        on_answer=on_answer,
    )
    table: dict[str, dict[int, Accuracy]] = {family: {} for family in families}
    for number, (family, length) in enumerate(cells):
        table[family][length] = accuracy(found[number * rows : (number + 1) * rows])
    return table


def accuracy(answers: Sequence[Answered]) -> Accuracy:
    """Mean accuracy with its standard error over rows (answers to one row are not independent)."""
    by_row: dict[str, list[float]] = {}
    for one in answers:
        by_row.setdefault(one.example.id, []).append(one.verdict.acc)
    means = np.array([np.mean(row) for row in by_row.values()])
    error = float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan")
    completions = [one.completion for one in answers]
    return Accuracy(
        answers=len(answers),
        accuracy=float(means.mean()),
        error=error,
        tokens=float(np.mean([len(c.token_ids) for c in completions])),
        entropy=float(np.concatenate([c.entropies for c in completions]).mean()),
        unfinished=float(np.mean([c.finish_reason == "length" for c in completions])),
        reasons=dict(Counter(one.verdict.reason for one in answers).most_common()),
    )


def as_plain(found: Mapping[Any, Any]) -> dict[str, Any]:
    """Nested tables of records as JSON has them."""
    return {
        str(key): as_plain(value) if isinstance(value, Mapping) else asdict(value)
        for key, value in found.items()
    }
