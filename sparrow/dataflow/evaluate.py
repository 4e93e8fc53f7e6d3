"""Accuracy of a model on puzzles: prompts through the engine, verdicts on what comes back."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sparrow.engine.answer import encode_prompt
from sparrow.engine.engine import Engine
from sparrow.engine.pool import PAGE
from sparrow.models import Decoder, load, load_tokenizer, shipped
from sparrow.records import Completion, SamplingParams
from sparrow.sparse.rule import Rule
from sparrow.sparse.schedule import Schedule
from sparrow.tasks import PUZZLES, words
from sparrow.tasks.base import Row, Source, Verdict
from sparrow.tasks.gym import Gym
from sparrow.tasks.words import WORDS

ROOM = 2.5  # an answer may be this many times as long as the dial says


class Language(NamedTuple):
    """How prompts become tokens, and tokens text."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    @classmethod
    def of(cls, tokenizer: Any, model: str) -> "Language":
        """That of a model with a tokenizer; prompts are a user's message where it can chat."""

        def encode(prompt: str) -> list[int]:
            return encode_prompt(tokenizer, prompt, chat=True, model=model)

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        return cls(encode, decode)


OnAnswer = Callable[[], None]
PUZZLE_LANGUAGE = Language(words.encode, words.decode)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """One answer with its row and the verdict on it."""

    row: Row
    prompt: tuple[int, ...]
    completion: Completion
    verdict: Verdict


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


def judge(
    engine: Engine,
    rows: Sequence[Row],
    params: SamplingParams,
    *,
    schedule: Schedule | None = None,
    room: float = ROOM,
    sources: Mapping[str, Source] = PUZZLES,
    language: Language = PUZZLE_LANGUAGE,
    on_answer: OnAnswer | None = None,
) -> list[Judged]:
    """Answers to every row, params.n each, in the order of the rows.

    A row's own length decides how many tokens its answers may have: `room` times as many.
    `on_answer` is called when one is complete.
    """
    prompts = [tuple(language.encode(row.prompt)) for row in rows]
    numbers = {}
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        own = replace(
            params,
            max_tokens=min(round(row.length * room), _left(engine, row, prompt)),
            seed=None if params.seed is None else params.seed + index,
        )
        numbers[engine.add(list(prompt), own, schedule=schedule)] = index
    found: dict[tuple[int, int], Judged] = {}
    for output in engine.stream():
        if (completion := output.completion) is None:
            continue
        if on_answer is not None:
            on_answer()
        index = numbers[output.request]
        row, text = rows[index], language.decode(completion.token_ids.tolist())
        found[index, output.sample] = Judged(
            row=row,
            prompt=prompts[index],
            completion=completion,
            verdict=sources[row.family].reward(row, text),
        )
    return [found[key] for key in sorted(found)]


def _left(engine: Engine, row: Row, prompt: Sequence[int]) -> int:
    """Tokens that the context has left for an answer."""
    left = engine.max_context - len(prompt)
    if left < 1:
        raise ValueError(
            f"the prompt of {row.id} has {len(prompt)} tokens, the model's context "
            f"{engine.max_context}: ask for shorter puzzles"
        )
    return left


def accuracy(judged: Sequence[Judged]) -> Accuracy:
    """Mean accuracy with its standard error over rows (answers to one row are not independent)."""
    by_row: dict[str, list[float]] = {}
    for one in judged:
        by_row.setdefault(one.row.id, []).append(one.verdict.acc)
    means = np.array([np.mean(row) for row in by_row.values()])
    error = float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan")
    completions = [one.completion for one in judged]
    return Accuracy(
        answers=len(judged),
        accuracy=float(means.mean()),
        error=error,
        tokens=float(np.mean([len(c.token_ids) for c in completions])),
        entropy=float(np.concatenate([c.entropies for c in completions]).mean()),
        unfinished=float(np.mean([c.finish_reason == "length" for c in completions])),
        reasons=dict(Counter(one.verdict.reason for one in judged).most_common()),
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
    tasks = [
        PUZZLES[family].row(seed, length)
        for family in families
        for length in lengths
        for seed in range(rows)
    ]
    params = SamplingParams(seed=0, temperature=temperature)
    cells: dict[tuple[str, int], list[Judged]] = {}
    for one in judge(engine, tasks, params, schedule=schedule, on_answer=on_answer):
        cells.setdefault((one.row.family, one.row.length), []).append(one)
    return {
        family: {length: accuracy(cells[family, length]) for length in lengths}
        for family in families
    }


def gym_accuracy(
    name: str, dataset: str, *, rows: int, tokens: int, temperature: float = 1.0, **placed: Any
) -> Accuracy:
    """Accuracy of a model with a real tokenizer on a dataset of reasoning-gym."""
    gym = Gym(dataset=dataset)
    model = load(name, **placed)
    language = Language.of(load_tokenizer(name), name)
    tasks = [gym.row(seed, tokens) for seed in range(rows)]
    params = SamplingParams(seed=0, temperature=temperature)
    engine = Engine(model, rule=None)
    judged = judge(engine, tasks, params, room=1.0, sources={gym.name: gym}, language=language)
    return accuracy(judged)


def attending(
    model: Decoder, *, budget: int | None = None, window: int | None = None
) -> tuple[Engine, Schedule | None]:
    """An engine, and the schedule for its requests; no layer stays dense.

    budget: the paper's rule keeps so many tokens. window: the last so many tokens and nothing
    else, without a first page and without a choice. Neither: dense.
    """
    if budget is not None and window is not None:
        raise ValueError("give a budget or a window, not both")
    if window is not None:
        if window < PAGE or window % PAGE:
            raise ValueError(f"a window is a multiple of {PAGE} tokens, got {window}")
        rule = Rule(first=0, last=window // PAGE, dense_layers=frozenset())
        kept = {"first": rule.first, "last": rule.last, "dense_layers": ()}
        return Engine(model, rule=rule), Schedule.fixed(window, **kept, name=f"window-{window}")
    if budget is None:
        return Engine(model, rule=None), None
    rule = Rule(dense_layers=frozenset())
    return Engine(model, rule=rule), Schedule.fixed(budget, dense_layers=())


def read_puzzles(model: Decoder) -> None:
    """Refuse a model that does not speak the language of the puzzles, word for word."""
    spoken: dict[str, int] = {}
    if model.source is not None and model.spec.vocabulary == len(WORDS):
        spoken = load_tokenizer(model.source).get_vocab()
    if spoken != {word: index for index, word in enumerate(WORDS)}:
        raise ValueError(
            f"{model.source or 'the model'} does not speak the language of the puzzles "
            f"({len(WORDS)} words): evaluate a model that `sparrow warmup` made, or "
            f"{' or '.join(shipped())}"
        )


def as_plain(found: Mapping[Any, Any]) -> dict[str, Any]:
    """Nested tables of records as JSON has them."""
    return {
        str(key): as_plain(value) if isinstance(value, Mapping) else asdict(value)
        for key, value in found.items()
    }
