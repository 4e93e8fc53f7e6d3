"""`sparrow eval`: rows answered through the engine, judged, and summed up with intervals.

    parts = [Part.of(rows, judge, count=64)]
    found = evaluate(engine, parts, language, params, model="tiny")
    found.evaluation.cells[0].mean  # mean@k, and .passes for pass@k

All parts are answered in one batch, so that short ones fill the places of long ones.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sparrow.dataflow.language import Language
from sparrow.engine.answer import Query, complete, placed_schedule
from sparrow.engine.engine import Engine
from sparrow.engine.loop import Output
from sparrow.engine.pool import PAGE
from sparrow.models import Decoder
from sparrow.schema.common import AttentionConfig
from sparrow.schema.evaluation import Evaluation, EvaluationCell, PassAt, Reason
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RowsConfig
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.flows.loading import load_flow
from sparrow.sparse.rule import Rule
from sparrow.stats import attempts, mean_at_k, pass_at_k
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example, Examples, Judge, Verdict, wrong
from sparrow.tasks.choosing import judge_of, rows_of
from sparrow.tasks.rows import FileRows

ROOM = 2.5  # an answer to a puzzle may be this many times as long as the dial says
OnAnswer = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """One answer, with its text, to one row, and the verdict on it."""

    example: Example
    completion: Completion
    verdict: Verdict

    def plain(self) -> dict[str, Any]:
        """What a reader wants of it, for a line of JSON; the row's data as the row has it."""
        completion, example = self.completion, self.example
        return {
            "id": example.id,
            "source": example.source,
            "prompt": example.prompt,
            "ground_truth": example.ground_truth,
            "text": completion.text,
            **self.verdict._asdict(),
            "tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "attention": completion.attention,
            "seed": completion.seed,
        }


class Evaluated(NamedTuple):
    """The figures, and the answers behind them, cell by cell."""

    evaluation: Evaluation
    answers: list[list[Answered]]


# Rows, and who judges them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that are summed up together, and who judges them."""

    source: str
    length: int | None
    examples: tuple[Example, ...]
    judge: Judge

    @classmethod
    def of(
        cls,
        rows: Examples,
        judge: Judge,
        *,
        count: int,
        first: int = 0,
        length: int | None = None,
        max_tokens: int | None = None,
    ) -> "list[Part]":
        """So many rows, a part for every source; max_tokens: of an answer, if rows say none."""
        by_source: dict[str, list[Example]] = {}
        for example in map(rows.at, range(first, first + count)):
            limited = replace(example, max_tokens=example.max_tokens or max_tokens)
            by_source.setdefault(example.source or rows.name, []).append(limited)
        return [
            cls(source=source, length=length, examples=tuple(examples), judge=judge)
            for source, examples in by_source.items()
        ]

    def __str__(self) -> str:
        return self.source if self.length is None else f"{self.source} of length {self.length}"


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
    room, parts = ROOM if task in PUZZLES else 1.0, list[Part]()
    for length, made in zip(lengths, chosen, strict=True):
        most = max_tokens or round(length * room)
        parts += Part.of(made, judge, first=first, count=rows, length=length, max_tokens=most)
    return parts


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
        attention = AttentionConfig(schedule=schedule, flow=flow, force=force)
        placed, named = placed_schedule(attention, model.spec.family)
        assert placed is not None
        return Engine(model, rule=Rule.of(placed, named)), placed
    if window is not None:
        return _windowed(model, window)
    if budget is None:
        return Engine(model, rule=None), None
    chosen = block_mean if flow is None else load_flow(flow)
    rule = Rule(flow=chosen, dense_layers=frozenset())
    return Engine(model, rule=rule), Schedule.fixed(budget, flow=chosen.name, dense_layers=())


def _windowed(model: Decoder, window: int) -> tuple[Engine, Schedule]:
    if window < PAGE or window % PAGE:
        raise ValueError(f"a window is a multiple of {PAGE} tokens, got {window}")
    rule = Rule(first=0, last=window // PAGE, dense_layers=frozenset())
    kept = {"first": rule.first, "last": rule.last, "dense_layers": ()}
    return Engine(model, rule=rule), Schedule.fixed(window, **kept, name=f"window-{window}")


# Answers and figures.


def evaluate(
    engine: Engine,
    parts: Sequence[Part],
    language: Language,
    params: SamplingParams,
    *,
    model: str,
    schedule: Schedule | None = None,
    left_out: Sequence[str] = (),
    on_answer: OnAnswer | None = None,
) -> Evaluated:
    """Answer the rows of all parts, params.n times each, and sum them up, a cell for each part.

    An answer has at most params.max_tokens, and what its row and the context allow. Row i draws by
    the seed params.seed + i. `on_answer` is called when one is complete. Rows whose prompts leave
    no room are named; a part of none but such is an error.
    """
    asked, skipped = _queries(engine, parts, language, params, schedule)

    def on_output(_: int, output: Output) -> None:
        if on_answer is not None and output.completion is not None:
            on_answer()

    queries = [query for *_, query in asked]
    found = complete(engine, queries, language.decode, on_output=on_output)
    pairs = [
        (place, example, completion)
        for (place, example, _), samples in zip(asked, found, strict=True)
        for completion in samples
    ]
    answers: list[list[Answered]] = [[] for _ in parts]
    for (place, *_), answered in zip(pairs, asyncio.run(_judged(parts, pairs)), strict=True):
        answers[place].append(answered)
    evaluation = Evaluation(
        model=model,
        attention="dense" if schedule is None else schedule.describe(),
        temperature=params.temperature,
        samples=params.n,
        seed=params.seed,
        left_out=tuple(left_out),
        cells=tuple(
            cell_of(part.source, part.length, own, problems)
            for part, own, problems in zip(parts, answers, skipped, strict=True)
        ),
    )
    return Evaluated(evaluation, answers)


def _queries(
    engine: Engine,
    parts: Sequence[Part],
    language: Language,
    params: SamplingParams,
    schedule: Schedule | None,
) -> tuple[list[tuple[int, Example, Query]], list[list[str]]]:
    """Of every row that fits the number of its part, itself and its query; others by part."""
    asked: list[tuple[int, Example, Query]] = []
    skipped: list[list[str]] = [[] for _ in parts]
    rows = [(place, example) for place, part in enumerate(parts) for example in part.examples]
    for row, (place, example) in enumerate(rows):
        ids = language.encode(example.prompt)
        room = engine.max_context - len(ids)
        if room < 1:
            told = f"has {len(ids)} tokens, the context {engine.max_context}"
            skipped[place].append(f"the prompt of {example.id} {told}")
            continue
        seed = None if params.seed is None else params.seed + row
        most = min(params.max_tokens, example.max_tokens or room, room)
        own = params.replace(max_tokens=most, seed=seed)
        asked.append((place, example, Query(ids, own, schedule)))
    for part, problems in zip(parts, skipped, strict=True):
        if len(problems) == len(part.examples):
            raise ValueError(f"no prompt of {part} leaves room for an answer: {problems[0]}")
    return asked, skipped


async def _judged(
    parts: Sequence[Part], asked: Sequence[tuple[int, Example, Completion]]
) -> list[Answered]:
    async def judged(place: int, example: Example, completion: Completion) -> Answered:
        if completion.error is not None:
            verdict = wrong(completion.error)
        else:
            verdict = await parts[place].judge(example, completion.text or "")
        return Answered(example=example, completion=completion, verdict=verdict)

    return await asyncio.gather(*(judged(*one) for one in asked))


def cell_of(
    source: str, length: int | None, answers: Sequence[Answered], skipped: Sequence[str] = ()
) -> EvaluationCell:
    """What judged answers come to; those to one row follow each other."""
    by_row: dict[str, list[float]] = {}
    for one in answers:
        by_row.setdefault(one.example.id, []).append(one.verdict.acc)
    accs = [np.array(row) for row in by_row.values()]
    correct, drawn = [int((row >= 1).sum()) for row in accs], [len(row) for row in accs]
    completions = [one.completion for one in answers]
    lengths = [len(one.token_ids) for one in completions]
    entropies = [one.entropies for one in completions if one.entropies is not None]
    reasons = Counter(one.verdict.reason for one in answers).most_common()
    return EvaluationCell(
        source=source,
        length=length,
        rows=len(accs),
        samples=min(drawn),
        mean=mean_at_k(accs),
        passes=tuple(
            PassAt(k=k, estimate=pass_at_k(correct, drawn, k)) for k in attempts(min(drawn))
        ),
        tokens=float(np.mean(lengths)),
        median=float(np.median(lengths)),
        entropy=float(np.concatenate(entropies).mean()) if sum(map(len, entropies)) else None,
        cut_off=float(np.mean([one.finish_reason == "length" for one in completions])),
        reasons=tuple(Reason(text=text, count=count) for text, count in reasons),
        skipped=tuple(skipped),
    )
