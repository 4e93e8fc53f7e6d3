"""`sparrow eval`: rows answered through the engine, judged, and summed up with intervals.

    parts = [Part.of(rows, judge, count=64)]
    found = evaluate(backend, parts, language, params, model="tiny")
    found.evaluation.cells[0].mean  # mean@k, and .passes for pass@k

All parts are answered in one batch, so that short ones fill the places of long ones.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparrow.dataflow.backend import EngineBackend, RolloutBackend, Sampler, open_backend
from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.event_loop import run_coroutine
from sparrow.dataflow.language import Language
from sparrow.dataflow.run_files import CHECKPOINTS
from sparrow.engine.answer import placed_schedule
from sparrow.engine.pool import PAGE
from sparrow.models import Decoder, load
from sparrow.schema.common import AttentionConfig
from sparrow.schema.evaluation import (
    FILE_TOKENS,
    ROWS,
    EvalConfig,
    Evaluation,
    EvaluationCell,
    PassAt,
    Reason,
)
from sparrow.schema.loading import read_resolved
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RowsConfig, TrainConfig
from sparrow.schema.types import Report
from sparrow.sparse.flows.loading import load_flow
from sparrow.sparse.rule import Rule
from sparrow.stats import attempts, mean_at_k, pass_at_k
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example, Examples, Judge, Verdict, wrong
from sparrow.tasks.choosing import judge_of, rows_of
from sparrow.tasks.rows import FileRows

LENGTHS = (200, 500, 1000)  # of puzzles, where none is given
GYM_TOKENS = 512  # of an answer to reasoning-gym
ROOM = 2.5  # an answer to a puzzle may be this many times as long as the dial says
OnAnswer = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """One answer, with its text, to one row, and the verdict on it."""

    example: Example
    completion: Completion
    verdict: Verdict

    @property
    def outcome(self) -> str:
        """right, cut_off (by the token limit) or wrong."""
        if self.verdict.acc >= 1:
            return "right"
        return "cut_off" if self.completion.finish_reason == "length" else "wrong"

    def plain(self) -> dict[str, Any]:
        """Return it as a line of JSON, with the row's data."""
        completion, example = self.completion, self.example
        return {
            "id": example.id,
            "source": example.source,
            "prompt": example.prompt,
            "ground_truth": example.ground_truth,
            "text": completion.text,
            **self.verdict._asdict(),
            "outcome": self.outcome,
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
        count: int | None,
        first: int = 0,
        length: int | None = None,
        max_tokens: int | None = None,
        name: str = "",
    ) -> "list[Part]":
        """Take `count` rows, a part for each source; of a file as many as there are (None: all).

        max_tokens: of an answer, where rows have no limit. name: of all rows, instead of sources.
        """
        if isinstance(rows, FileRows):
            left = len(rows) - first
            if left < 1:
                raise ValueError(f"{rows.name} has {len(rows)} usable rows: none from {first} on")
            count = left if count is None else min(count, left)
        assert count is not None, "a task has no last row"
        by_source: dict[str, list[Example]] = {}
        for example in map(rows.at, range(first, first + count)):
            limited = replace(example, max_tokens=example.max_tokens or max_tokens)
            by_source.setdefault(name or example.source or rows.name, []).append(limited)
        return [
            cls(source=source, length=length, examples=tuple(examples), judge=judge)
            for source, examples in by_source.items()
        ]

    def __str__(self) -> str:
        return self.source if self.length is None else f"{self.source} of length {self.length}"


def open_parts(config: EvalConfig, judges: ExitStack) -> tuple[list[Part], tuple[str, ...]]:
    """The rows that are asked for, and what of a file is left out, and why.

    A part for each task and length, or for each data_source of a file. Judges end with `judges`.
    """
    if config.rows is not None:
        chosen = RowsConfig(
            rows=config.rows, columns=config.columns, reward=config.reward, shuffle=False
        )
        rows = rows_of(chosen, seed=0)
        judge = judges.enter_context(closing(judge_of(chosen, rows)))
        tokens = config.max_tokens or FILE_TOKENS
        parts = Part.of(rows, judge, first=config.skip, count=config.prompts, max_tokens=tokens)
        return parts, rows.problems
    parts = []
    for task in dict.fromkeys(config.task or PUZZLES):
        usual, room = (LENGTHS, ROOM) if task in PUZZLES else ((GYM_TOKENS,), 1.0)
        lengths = list(dict.fromkeys(config.length or usual))
        made = [RowsConfig(task=task, length=length, first=0) for length in lengths]
        judge = judges.enter_context(closing(judge_of(made[0], rows_of(made[0], seed=0))))
        for length, chosen in zip(lengths, made, strict=True):
            parts += Part.of(
                rows_of(chosen, seed=0),
                judge,
                first=config.skip,
                count=config.prompts or ROWS,
                length=length,
                max_tokens=config.max_tokens or round(length * room),
            )
    return parts, ()


# The model and its attention.


def load_policy(
    run: Path, checkpoint: int | str, *, dtype: str, device: str, report: Report
) -> Decoder:
    """Load the policy of a run from a checkpoint, a step or latest, also while it runs."""
    checkpoints = Checkpoints(run / CHECKPOINTS, 1, report=report)
    step = checkpoints.latest() if isinstance(checkpoint, str) else checkpoint
    if step is None:
        raise ValueError(f"{run} has no checkpoint yet")
    state = checkpoints.load(step)
    name = read_resolved(TrainConfig, run).model.name
    model = load(name, dtype=dtype, device=device, report=report)
    try:
        model.load_state_dict(state["learner"]["weights"])
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"step {step} in {run} holds no weights of {name}: {error}") from error
    report(f"{run}: weights after step {step}")
    return model


def attending(model: Decoder, config: EvalConfig) -> tuple[EngineBackend, Schedule | None]:
    """A backend, and the schedule for its requests.

    budget: the rule of a flow keeps so many tokens. window: the last so many tokens and nothing
    else, without a first page and without a choice. Neither has a dense layer. schedule: a file or
    a published one, refused where it was not made for this unless forced. None of them: dense.
    """
    several = [name for name in ("budget", "window", "schedule") if getattr(config, name)]
    if len(several) > 1:
        raise ValueError(f"give one of a budget, a window and a schedule, got {several}")
    if config.flow is not None and several not in (["budget"], ["schedule"]):
        raise ValueError(f"flow {config.flow!r} goes with a budget or a schedule")
    own_flow = None if config.budget else config.flow
    attention = AttentionConfig(schedule=config.schedule, flow=own_flow, force=config.force)
    schedule, flow = placed_schedule(attention, model.spec.family)
    if config.window is not None:
        kept = {"first": 0, "last": config.window // PAGE, "dense_layers": ()}
        schedule = Schedule.fixed(config.window, **kept, name=f"window-{config.window}")
    elif config.budget is not None:
        flow = load_flow(config.flow or "block_mean")
        schedule = Schedule.fixed(config.budget, flow=flow.name, dense_layers=())
    rule = None if schedule is None else Rule.like(schedule, flow)
    return open_backend(model, rule), schedule


# Answers and figures.


class AskedRow(NamedTuple):
    """A row in tokens, the number of its part, and how it is answered."""

    part: int
    example: Example
    ids: list[int]
    params: SamplingParams


def evaluate(
    backend: RolloutBackend,
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
    the seed params.seed + i. `on_answer` is called when one is judged. Rows whose prompts leave no
    room are named; a part of none but such is an error.
    """
    questions, skipped = _questions(backend.max_context, parts, language, params)

    answers: list[list[Answered]] = [[] for _ in parts]
    found = run_coroutine(_answers(backend, questions, parts, language, schedule, on_answer))
    for question, answered in zip(questions, found, strict=True):
        answers[question.part] += answered
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


async def _answers(
    backend: RolloutBackend,
    questions: Sequence[AskedRow],
    parts: Sequence[Part],
    language: Language,
    schedule: Schedule | None,
    on_answer: OnAnswer | None,
) -> list[list[Answered]]:
    async def judged(question: AskedRow, completion: Completion) -> Answered:
        text = language.decode(completion.token_ids.tolist())
        if completion.error is not None:
            verdict = wrong(completion.error)
        else:
            verdict = await parts[question.part].judge(question.example, text)
        if on_answer is not None:
            on_answer()
        told = completion.replace(text=text)
        return Answered(example=question.example, completion=told, verdict=verdict)

    async def answer(sampler: Sampler, question: AskedRow) -> list[Answered]:
        found = await sampler.generate(question.ids, question.params, schedule=schedule)
        return await asyncio.gather(*(judged(question, completion) for completion in found))

    async with backend.serving() as sampler:
        return await asyncio.gather(*(answer(sampler, question) for question in questions))


def _questions(
    context: int, parts: Sequence[Part], language: Language, params: SamplingParams
) -> tuple[list[AskedRow], list[list[str]]]:
    """Every row that fits; the others by part."""
    questions: list[AskedRow] = []
    skipped: list[list[str]] = [[] for _ in parts]
    rows = [(place, example) for place, part in enumerate(parts) for example in part.examples]
    for row, (place, example) in enumerate(rows):
        ids = language.encode(example.prompt)
        room = context - len(ids)
        if room < 1:
            told = f"has {len(ids)} tokens, the context {context}"
            skipped[place].append(f"the prompt of {example.id} {told}")
            continue
        seed = None if params.seed is None else params.seed + row
        most = min(params.max_tokens, example.max_tokens or room, room)
        own = params.replace(max_tokens=most, seed=seed)
        questions.append(AskedRow(place, example, ids, own))
    for part, problems in zip(parts, skipped, strict=True):
        if len(problems) == len(part.examples):
            raise ValueError(f"no prompt of {part} leaves room for an answer: {problems[0]}")
    return questions, skipped


def cell_of(
    source: str, length: int | None, answers: Sequence[Answered], skipped: Sequence[str] = ()
) -> EvaluationCell:
    """Summarise judged answers, of which those to one row follow each other."""
    by_row: dict[str, list[float]] = {}
    for one in answers:
        by_row.setdefault(one.example.id, []).append(one.verdict.acc)
    accs = [np.array(row) for row in by_row.values()]
    correct, drawn = [int((row >= 1).sum()) for row in accs], [len(row) for row in accs]
    outcomes = Counter(answer.outcome for answer in answers)
    completions = [answer.completion for answer in answers]
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
        **{name: outcomes[name] / len(answers) for name in ("right", "cut_off", "wrong")},
        reasons=tuple(Reason(text=text, count=count) for text, count in reasons),
        skipped=tuple(skipped),
    )
