"""How right a model is: rows answered through the engine, judged, and summed up with intervals.

    parts = [Part.of(rows, judge, count=64)]
    found = evaluate(engine, parts, language, params, model="tiny")
    found.evaluation.cells[0].mean  # mean@k, and .passes for pass@k

All parts are answered in one batch, so that short ones fill the places of long ones.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sparrow.dataflow.language import Language
from sparrow.engine.engine import Engine
from sparrow.schema.evaluation import Evaluation, EvaluationCell, PassAt, Reason
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.stats import attempts, mean_at_k, pass_at_k
from sparrow.tasks.base import Verdict, wrong
from sparrow.tasks.example import Example, Examples, Judge

OnAnswer = Callable[[], None]
OnSkip = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """One answer, with its text, to one row, and the verdict on it."""

    example: Example
    prompt_ids: tuple[int, ...]
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
        found: dict[str, list[Example]] = {}
        for position in range(first, first + count):
            example = rows.at(position)
            own = replace(example, max_tokens=example.max_tokens or max_tokens)
            found.setdefault(example.source or rows.name, []).append(own)
        return [
            cls(source=source, length=length, examples=tuple(own), judge=judge)
            for source, own in found.items()
        ]

    def __str__(self) -> str:
        return self.source if self.length is None else f"{self.source} of length {self.length}"


def answer(
    engine: Engine,
    examples: Sequence[Example],
    judge: Judge,
    language: Language,
    params: SamplingParams,
    *,
    schedule: Schedule | None = None,
    on_answer: OnAnswer | None = None,
    on_skip: OnSkip | None = None,
) -> list[Answered]:
    """Judged answers to every row, params.n each, in the order of the rows.

    An answer has at most params.max_tokens, and what its row and the context allow. Row i draws by
    the seed params.seed + i. `on_answer` is called when one is complete. A prompt that leaves no
    room is told to `on_skip`, and an error where there is none, or where none fits.
    """
    fitting = _fitting(examples, language, engine.max_context)
    problems = [one for one in fitting if isinstance(one, str)]
    if problems and (on_skip is None or len(problems) == len(examples)):
        raise ValueError(f"{len(problems)} of {len(examples)} prompts do not fit: {problems[0]}")
    for problem in problems:
        assert on_skip is not None
        on_skip(problem)
    judges = [judge] * len(examples)
    found = _answered(engine, examples, fitting, judges, language, params, schedule, on_answer)
    return [one for row in found for one in row]


def _fitting(
    examples: Sequence[Example], language: Language, context: int
) -> list[tuple[int, ...] | str]:
    """The tokens of every prompt, or what is wrong where they leave no room for an answer."""
    found: list[tuple[int, ...] | str] = []
    for example in examples:
        ids = tuple(language.encode(example.prompt))
        told = f"the prompt of {example.id} has {len(ids)} tokens, the context {context}"
        found.append(ids if len(ids) < context else told)
    return found


def _answered(
    engine: Engine,
    examples: Sequence[Example],
    prompts: Sequence[tuple[int, ...] | str],
    judges: Sequence[Judge],
    language: Language,
    params: SamplingParams,
    schedule: Schedule | None,
    on_answer: OnAnswer | None,
) -> list[list[Answered]]:
    """Of every row its answers; none where it has no prompt."""
    found = [
        (index, prompt_ids, one.replace(text=language.decode(one.token_ids.tolist())))
        for index, prompt_ids, one in _completions(
            engine, examples, prompts, params, schedule, on_answer
        )
    ]
    verdicts = asyncio.run(_verdicts((judges[i], examples[i], one) for i, _, one in found))
    rows: list[list[Answered]] = [[] for _ in examples]
    for (i, prompt_ids, one), verdict in zip(found, verdicts, strict=True):
        rows[i].append(
            Answered(example=examples[i], prompt_ids=prompt_ids, completion=one, verdict=verdict)
        )
    return rows


def _completions(
    engine: Engine,
    examples: Sequence[Example],
    prompts: Sequence[tuple[int, ...] | str],
    params: SamplingParams,
    schedule: Schedule | None,
    on_answer: OnAnswer | None,
) -> list[tuple[int, tuple[int, ...], Completion]]:
    """Row by row, with its prompt, and of a row in the order of its samples."""
    numbers: dict[int, tuple[int, tuple[int, ...]]] = {}
    for index, (example, prompt) in enumerate(zip(examples, prompts, strict=True)):
        if isinstance(prompt, str):
            continue
        most = (params.max_tokens, example.max_tokens, engine.max_context - len(prompt))
        own = params.replace(
            max_tokens=min(limit for limit in most if limit is not None),
            seed=None if params.seed is None else params.seed + index,
        )
        number = engine.add(list(prompt), own, schedule=schedule, streamed=False)
        numbers[number] = (index, prompt)
    found: dict[tuple[int, int], Completion] = {}
    for output in engine.stream():
        if output.completion is not None:
            found[output.request, output.sample] = output.completion
            if on_answer is not None:
                on_answer()
    return [(*numbers[request], found[request, sample]) for request, sample in sorted(found)]


async def _verdicts(asked: Iterable[tuple[Judge, Example, Completion]]) -> list[Verdict]:
    return await asyncio.gather(*(_verdict(*one) for one in asked))


async def _verdict(judge: Judge, example: Example, completion: Completion) -> Verdict:
    if completion.error is not None:
        return wrong(completion.error)
    return await judge(example, completion.text or "")


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
    """Answer the rows of all parts, and sum them up, a cell for each; see `answer`."""
    examples = [example for part in parts for example in part.examples]
    judges = [part.judge for part in parts for _ in part.examples]
    fitting = _fitting(examples, language, engine.max_context)
    skipped = [[one for one in own if isinstance(one, str)] for own in _by_part(parts, fitting)]
    for part, problems in zip(parts, skipped, strict=True):
        if len(problems) == len(part.examples):
            raise ValueError(f"no prompt of {part} leaves room for an answer: {problems[0]}")
    rows = _answered(engine, examples, fitting, judges, language, params, schedule, on_answer)
    answers = [[one for row in own for one in row] for own in _by_part(parts, rows)]
    cells = (
        cell_of(part.source, part.length, own, problems)
        for part, own, problems in zip(parts, answers, skipped, strict=True)
    )
    evaluation = Evaluation(
        model=model,
        attention="dense" if schedule is None else schedule.describe(),
        temperature=params.temperature,
        samples=params.n,
        seed=params.seed,
        left_out=tuple(left_out),
        cells=tuple(cells),
    )
    return Evaluated(evaluation, answers)


def _by_part(parts: Sequence[Part], rows: Sequence[T]) -> list[list[T]]:
    """What belongs to the rows of all parts, part by part."""
    remaining = iter(rows)
    return [[next(remaining) for _ in part.examples] for part in parts]


def cell_of(
    source: str, length: int | None, answers: Sequence[Answered], skipped: Sequence[str] = ()
) -> EvaluationCell:
    """What judged answers come to; those to one row follow each other."""
    by_row: dict[str, list[float]] = {}
    for one in answers:
        by_row.setdefault(one.example.id, []).append(one.verdict.acc)
    accs = [np.array(row) for row in by_row.values()]
    samples = min(len(row) for row in accs)
    completions = [one.completion for one in answers]
    lengths = [len(one.token_ids) for one in completions]
    return EvaluationCell(
        source=source,
        length=length,
        rows=len(accs),
        samples=samples,
        mean=mean_at_k(accs),
        passes=_passes(accs, samples),
        tokens=float(np.mean(lengths)),
        median=float(np.median(lengths)),
        entropy=_entropy(completions),
        cut_off=float(np.mean([one.finish_reason == "length" for one in completions])),
        reasons=_reasons(answers),
        skipped=tuple(skipped),
    )


def _passes(accs: Sequence[np.ndarray[Any, Any]], samples: int) -> tuple[PassAt, ...]:
    correct, drawn = [int((row >= 1).sum()) for row in accs], [len(row) for row in accs]
    return tuple(PassAt(k=k, estimate=pass_at_k(correct, drawn, k)) for k in attempts(samples))


def _entropy(completions: Sequence[Completion]) -> float | None:
    found = [one.entropies for one in completions if one.entropies is not None]
    return float(np.concatenate(found).mean()) if sum(map(len, found)) else None


def _reasons(answers: Sequence[Answered]) -> tuple[Reason, ...]:
    counted = Counter(one.verdict.reason for one in answers).most_common()
    return tuple(Reason(text=text, count=count) for text, count in counted)
