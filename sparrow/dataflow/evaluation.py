"""`sparrow eval`: sample answers to rows, judge them, and estimate accuracy with intervals.

    parts = Part.of(rows, judge, count=64)
    evaluated = evaluate(backend, parts, language, params, model="tiny")
    evaluated.evaluation.cells[0].mean  # mean@k, and .passes for pass@k

All parts are answered in one batch, so that short answers fill up the batch of long ones.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sparrow.dataflow.backend import EngineBackend, RolloutBackend, Sampler, open_backend
from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.event_loop import run_coroutine
from sparrow.dataflow.language import Language
from sparrow.dataflow.run_files import CHECKPOINTS
from sparrow.engine.answer import DENSE, ResolvedDecoding, resolve_decoding
from sparrow.engine.pool import PAGE
from sparrow.files import expanded
from sparrow.models import Decoder, load
from sparrow.models.actor import load_actor
from sparrow.models.lora import Adapter
from sparrow.models.sources import policy_folders
from sparrow.schema.code import LIMITS, CodeConfig
from sparrow.schema.common import AttentionConfig, DecodingConfig
from sparrow.schema.episode import Group
from sparrow.schema.evaluation import (
    FILE_TOKENS,
    ROWS,
    EvalConfig,
    Evaluation,
    EvaluationCell,
    Outcome,
    PassAt,
    Reason,
    outcome,
    outcome_shares,
)
from sparrow.schema.loading import RESOLVED, read_resolved
from sparrow.schema.run_folder import MODEL
from sparrow.schema.sampling import Completion, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RowsConfig, TrainConfig, names_code
from sparrow.schema.types import Report
from sparrow.stats import attempts, mean_at_k, pass_at_k
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example, Examples, FailedVerdict, Judge, Verdict
from sparrow.tasks.choosing import is_task, open_judge, open_rows
from sparrow.tasks.judging import Unjudged
from sparrow.tasks.rows import FileRows

LENGTHS = (200, 500, 1000)  # of puzzles, by default
GYM_TOKENS = 512  # of an answer to reasoning-gym
ROOM = 2.5  # longest answer to a puzzle, as a multiple of its length
OnAnswer = Callable[[], None]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """An answer to a row, and the verdict on it."""

    example: Example
    completion: Completion
    verdict: Verdict

    @property
    def outcome(self) -> Outcome:
        return outcome(self.verdict.acc, self.completion.finish_reason == "length")

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
    """The evaluation, and the answers of each of its cells."""

    evaluation: Evaluation
    answers: list[list[Answered]]


# Rows and judges.


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that are evaluated together, and their judge."""

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
                raise ValueError(f"{rows.name} has {len(rows)} usable rows, none from {first} on")
            count = left if count is None else min(count, left)
        assert count is not None, "a task has no last row"
        by_source: dict[str, list[Example]] = {}
        for example in map(rows.at, range(first, first + count)):
            limited = replace(example, max_tokens=example.max_tokens or max_tokens)
            source = name or example.source or Path(rows.name).name
            by_source.setdefault(source, []).append(limited)
        return [
            cls(source=source, length=length, examples=tuple(examples), judge=judge)
            for source, examples in by_source.items()
        ]

    def __str__(self) -> str:
        return self.source if self.length is None else f"{self.source} of length {self.length}"


def open_parts(config: EvalConfig, judges: ExitStack) -> tuple[list[Part], tuple[str, ...]]:
    """Open the rows to evaluate; also return the problems of unusable rows of a file.

    A part for each task and length, or for each data_source of a file. `judges` closes the judges.
    """
    if config.rows is not None:
        given = {name: getattr(config, name) for name in ("rows", "columns", "reward", "code")}
        tokens = config.max_tokens or FILE_TOKENS
        part = {"first": config.skip, "count": config.prompts, "max_tokens": tokens}
        return _open([(RowsConfig(shuffle=False, **given), part)], judges)
    chosen: list[tuple[RowsConfig, Json]] = []
    for task in dict.fromkeys(config.task or PUZZLES):
        usual, room = (LENGTHS, ROOM) if task in PUZZLES else ((GYM_TOKENS,), 1.0)
        for length in dict.fromkeys(config.length or usual):
            tokens = config.max_tokens or round(length * room)
            part = {"first": config.skip, "count": config.prompts or ROWS, "max_tokens": tokens}
            rows = RowsConfig(task=task, length=length, first=0, code=config.code)
            chosen.append((rows, {**part, "length": length}))
    return _open(chosen, judges)


def open_validation(
    run: TrainConfig, judges: ExitStack, **changes: int | None
) -> tuple[list[Part], tuple[str, ...]]:
    """Open the held-out rows of a run: those of `validation`, then a part for each of its sets.

    changes: of the first row, the count and max_tokens, in place of the run's. Otherwise as
    `open_parts`.
    """
    held = run.validation
    part = {"first": held.first, "count": held.prompts, "max_tokens": run.rollout.max_tokens}
    part |= {name: value for name, value in changes.items() if value}
    return _open([(rows, {**part, "name": name}) for name, rows in held_out(run).items()], judges)


def held_out(run: TrainConfig) -> dict[str, RowsConfig]:
    """Return settings of held-out rows by set: a task from its first seed on, or a file in order.

    Rows that are trained on say little: they are chosen only where there are no others.
    """
    held, data, chosen = run.validation, run.data, dict[str, RowsConfig]()
    own = held.rows or data.task or ("" if held.sets else data.rows)
    for name, place in {**({"": own} if own else {}), **held.sets}.items():
        changes: Json = {"rows": place, "task": None, "columns": held.columns or data.columns}
        if is_task(place):
            changes = {"rows": None, "task": place, "first": 0, "prompts": None, "reward": None}
        chosen[name] = data.model_copy(update={"shuffle": False, **changes})
    return chosen


def open_run_rows(
    run: TrainConfig, config: EvalConfig, judges: ExitStack, report: Report
) -> tuple[list[Part], tuple[str, ...]]:
    """Open the held-out rows of a run to evaluate, and report which they are.

    The run may be somebody else's: ValueError if its rows need a reward that names code.
    """
    code = _limited(run.data.code, config.code)
    if code != run.data.code:
        report("limits of programs are those of this evaluation (--code...), not of the run")
    run = run.model_copy(update={"data": run.data.model_copy(update={"code": code})})
    chosen = held_out(run).values()
    named = [text for rows in chosen for text in (rows.reward or "", rows.code.sandbox)]
    if found := [text for text in named if names_code(text)]:
        raise ValueError(
            f"{config.model}: the rows of the run are judged by {found[0]!r}, and code that a "
            "folder names is not run: pass --rows FILE --reward module:function"
        )
    names = ", ".join(rows.rows or rows.task or "" for rows in chosen)
    seen = " (trained on)" if run.data.rows == names else ""
    report(f"rows of the run{seen}: {names}; others by --task or --rows")
    changes = {"first": config.skip, "count": config.prompts, "max_tokens": config.max_tokens}
    return open_validation(run, judges, **changes)


def _limited(run: CodeConfig, here: CodeConfig) -> CodeConfig:
    """Rewards of programs as in a run, which may be somebody else's, with limits from here."""
    least = {name: min(getattr(run, name), getattr(here, name)) for name in LIMITS}
    return run.model_copy(update={**least, "cgroup": here.cgroup})


def find_run(model: str) -> TrainConfig | None:
    """Return the settings of a run by its folder or by a model in it; None: of no run."""
    folder = expanded(model)
    if MODEL in (folder.name, folder.parent.name):  # of one of several policies: model/NAME
        folder = folder.parent if folder.name == MODEL else folder.parents[1]
    return read_resolved(TrainConfig, folder) if (folder / RESOLVED).is_file() else None


def _open(
    chosen: Sequence[tuple[RowsConfig, Json]], judges: ExitStack
) -> tuple[list[Part], tuple[str, ...]]:
    """Open rows, each with the arguments of `Part.of`."""
    parts, problems = list[Part](), list[str]()
    for settings, part in chosen:
        rows = open_rows(settings, seed=0)
        judge = judges.enter_context(closing(open_judge(settings, rows)))
        parts += Part.of(rows, judge, **part)
        problems += rows.problems
    return parts, tuple(problems)


# The model and its attention.


def load_policy(
    run: Path,
    checkpoint: int | str,
    *,
    policy: str | None = None,
    dtype: str,
    device: str,
    report: Report | None = None,
) -> Decoder:
    """Load the policy of a run from a checkpoint, a step or latest, also while it runs.

    policy: its name in a run of several.
    """
    if not (run / CHECKPOINTS).is_dir():
        raise ValueError(f"{run}: expected the folder of a run with checkpoints; this has none")
    checkpoints = Checkpoints(run / CHECKPOINTS, 1)
    step = checkpoints.latest() if isinstance(checkpoint, str) else checkpoint
    if step is None:
        raise ValueError(f"{run} has no complete checkpoint yet")
    state = checkpoints.load(step)
    config = read_resolved(TrainConfig, run)
    learning = [name for name, own in config.policies.items() if not own.frozen]
    if policy is not None or learning:
        check_policy(run, policy, learning)
    name = (config if policy is None else config.policy(policy)).model.name
    model = load(name, dtype=dtype, device=device, report=report)
    try:
        own = (state if policy is None else state["policies"][policy])["learner"]
        weights, scaling = own["weights"], own.get("lora")
        if scaling is None:
            model.load_state_dict(weights)
        else:
            place: Json = {"dtype": torch.float32, "device": model.device}
            Adapter.from_state(model.spec, weights, **scaling, **place).merge_into(model)
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"step {step} in {run} holds no weights of {name}: {error}") from error
    if report is not None:
        report(f"{run}: weights after step {step}")
    return model


def check_policy(run: Path, policy: str | None, learning: Sequence[str]) -> None:
    """Refuse a name that is none of the policies of a run which learn."""
    if policy not in learning:
        several = f"several policies: {', '.join(learning)}; give one of them as --policy"
        none = "no models that --policy chooses from, or has not ended (then --checkpoint latest)"
        raise ValueError(f"{run} has {several if learning else none}")


def policy_folder(run: Path, policy: str | None) -> Path:
    """The model of one of several policies of a run that has ended."""
    folders = {folder.name: folder for folder in policy_folders(run)}
    check_policy(run, policy, list(folders))
    return folders[str(policy)]


def open_engine(model: Decoder, config: EvalConfig) -> tuple[EngineBackend, ResolvedDecoding]:
    """Open a backend, and return the decoding of its requests.

    budget: tokens that a flow keeps. window: only the last tokens are attended, no first page and
    no selection. Both are for all layers. schedule: a file or preset, refused if it is for another
    model unless forced. None of them: dense.
    """
    names = ("budget", "schedule", "flow", "force")
    chosen = DecodingConfig(
        decoding=config.decoding,
        attention=AttentionConfig(**{name: getattr(config, name) for name in names}),
        speculative=SpeculativeParams(draft_tokens=config.draft_tokens),
    )
    decoding = resolve_decoding(chosen, model.spec.family)
    if config.window is not None:
        kept = {"first": 0, "last": config.window // PAGE, "dense_layers": ()}
        schedule = Schedule.fixed(config.window, **kept, name=f"window-{config.window}")
        decoding = decoding._replace(schedule=schedule)
    backend = open_backend(model, decoding.rule, decoding.speculative)
    if config.adapter is not None:
        backend.set_actor(load_actor(config.adapter, model).adapter)
        decoding = decoding._replace(adapter=str(config.adapter))
    return backend, decoding


# Answers and figures.


class Question(NamedTuple):
    """A row in tokens, the number of its part, and its sampling parameters."""

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
    decoding: ResolvedDecoding = DENSE,
    left_out: Sequence[str] = (),
    on_answer: OnAnswer | None = None,
) -> Evaluated:
    """Sample params.n answers to each row of all parts, judge them, and make a cell for each part.

    An answer has at most params.max_tokens, less if its row or the context allow less. Row i has
    the seed params.seed + i. `on_answer` is called after each verdict. Rows whose prompts leave no
    room for an answer are reported; a part without other rows is an error. Unjudged if every
    verdict failed.
    """
    questions, skipped = _questions(backend.max_context, parts, language, params)

    answers: list[list[Answered]] = [[] for _ in parts]
    judged = run_coroutine(_answers(backend, questions, parts, language, decoding, on_answer))
    for question, answered in zip(questions, judged, strict=True):
        answers[question.part] += answered
    verdicts = [answer.verdict for answered in answers for answer in answered]
    if all(isinstance(verdict, FailedVerdict) for verdict in verdicts):
        raise Unjudged(f"every verdict of the evaluation failed: {verdicts[0].reason}")
    evaluation = Evaluation(
        model=model,
        attention=decoding.describe(),
        temperature=params.temperature,
        samples=params.n,
        seed=params.seed,
        left_out=tuple(left_out),
        isolation=next((text for p in parts if (text := getattr(p.judge, "isolation", ""))), ""),
        cells=tuple(
            summarise(part.source, part.length, answered, problems)
            for part, answered, problems in zip(parts, answers, skipped, strict=True)
        ),
    )
    return Evaluated(evaluation, answers)


async def _answers(
    backend: RolloutBackend,
    questions: Sequence[Question],
    parts: Sequence[Part],
    language: Language,
    decoding: ResolvedDecoding,
    on_answer: OnAnswer | None,
) -> list[list[Answered]]:
    async def judged(question: Question, completion: Completion) -> Answered:
        text = language.decode(completion.token_ids.tolist())
        if completion.error is not None:
            verdict: Verdict = FailedVerdict(0.0, 0.0, completion.error)
        else:
            verdict = await parts[question.part].judge(question.example, text)
        if on_answer is not None:
            on_answer()
        completion = completion.replace(text=text)
        return Answered(example=question.example, completion=completion, verdict=verdict)

    async def answer(sampler: Sampler, question: Question) -> list[Answered]:
        completions = await sampler.generate(question.ids, question.params, **decoding.request)
        return await asyncio.gather(*(judged(question, completion) for completion in completions))

    async with backend.serving() as sampler:
        return await asyncio.gather(*(answer(sampler, question) for question in questions))


def _questions(
    context: int, parts: Sequence[Part], language: Language, params: SamplingParams
) -> tuple[list[Question], list[list[str]]]:
    """Encode the rows; those whose prompts do not fit are reported by part."""
    questions: list[Question] = []
    skipped: list[list[str]] = [[] for _ in parts]
    rows = [(place, example) for place, part in enumerate(parts) for example in part.examples]
    for row, (place, example) in enumerate(rows):
        ids = language.encode(example.prompt)
        room = context - len(ids)
        if room < 1:
            problem = f"has {len(ids)} tokens, the context {context}"
            skipped[place].append(f"the prompt of {example.id} {problem}")
            continue
        seed = None if params.seed is None else params.seed + row
        limit = min(params.max_tokens, example.max_tokens or room, room)
        limited = params.replace(max_tokens=limit, seed=seed)
        questions.append(Question(place, example, ids, limited))
    for part, problems in zip(parts, skipped, strict=True):
        if len(problems) == len(part.examples):
            raise ValueError(f"no prompt of {part} leaves room for an answer: {problems[0]}")
    return questions, skipped


def summarise(
    source: str, length: int | None, answers: Sequence[Answered], skipped: Sequence[str] = ()
) -> EvaluationCell:
    """Summarise judged answers, of which those to one row follow each other."""
    completions = [answer.completion for answer in answers]
    entropies = [c.entropies for c in completions if c.entropies is not None]
    verdicts = [answer.verdict for answer in answers]
    faults = [verdict.reason for verdict in verdicts if isinstance(verdict, FailedVerdict)]
    return _cell(
        [(answer.example.id, answer.verdict.acc) for answer in answers],
        [len(completion.token_ids) for completion in completions],
        [answer.outcome for answer in answers],
        [verdict.reason for verdict in verdicts],
        source=source,
        length=length,
        entropy=float(np.concatenate(entropies).mean()) if sum(map(len, entropies)) else None,
        skipped=tuple(skipped),
        failed=len(faults),
        fault=faults[0] if faults else "",
    )


def summarise_plays(source: str, length: int | None, groups: Sequence[Group]) -> EvaluationCell:
    """Summarise plays of an episode: the accuracy of their first trajectories, tokens of all."""
    plays = [(group.prompt_id, play) for group in groups for play in group.plays()]
    first = [play[0] for _, play in plays]
    return _cell(
        [(row, one.acc or 0.0) for (row, _), one in zip(plays, first, strict=True)],
        [sum(int(one.loss_mask.sum()) for one in play) for _, play in plays],
        [outcome(one.acc or 0.0, one.truncated) for one in first],
        [one.note or "" for one in first],
        source=source,
        length=length,
        entropy=None,
        skipped=(),
    )


def _cell(
    accs: Sequence[tuple[str, float]],
    lengths: Sequence[int],
    outcomes: Sequence[Outcome],
    reasons: Sequence[str],
    **known: Any,
) -> EvaluationCell:
    """A cell of answers, by row: accuracies, tokens, outcomes and the reasons of verdicts."""
    by_row: dict[str, list[float]] = {}
    for row, acc in accs:
        by_row.setdefault(row, []).append(acc)
    rows = [np.array(row) for row in by_row.values()]
    correct, sampled = [int((row >= 1).sum()) for row in rows], [len(row) for row in rows]
    counts = Counter(reasons).most_common()
    return EvaluationCell(
        rows=len(rows),
        samples=min(sampled),
        mean=mean_at_k(rows),
        passes=tuple(
            PassAt(k=k, estimate=pass_at_k(correct, sampled, k)) for k in attempts(min(sampled))
        ),
        tokens=float(np.mean(lengths)),
        median=float(np.median(lengths)),
        reasons=tuple(Reason(text=text, count=count) for text, count in counts),
        **outcome_shares(outcomes) | known,
    )
