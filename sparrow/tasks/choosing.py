"""From a configuration to rows and their judge."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from sparrow.functions import HERE, resolve
from sparrow.schema.train import RowsConfig
from sparrow.tasks import PUZZLES, math
from sparrow.tasks.base import Example, Examples, Puzzle, Row, RowGenerator, Task, Verdict
from sparrow.tasks.code.judging import CodeJudges
from sparrow.tasks.code.problems import is_problem, parse_problem
from sparrow.tasks.environments.crafting.task import FORMS, Crafting, is_crafting
from sparrow.tasks.environments.reasoning_gym import GYM
from sparrow.tasks.environments.textarena import ARENA, TextArena
from sparrow.tasks.gym import Gym
from sparrow.tasks.judging import SETTING, SIGNATURES, InProcess, Judges
from sparrow.tasks.programming.tasks import ProgrammingTasks
from sparrow.tasks.rows import FileRows, TaskRows

MATH = "math"
CODE = "code"
MATH_SCORE = "sparrow.tasks.math:compute_score"
OWN_SCORE = "sparrow.tasks.choosing:compute_score"
# Words in the names of mathematical datasets.
MATH_SOURCE = re.compile(
    r"(^|[/_-])(math|gsm8k|aime|amc|numina|polaris|deepscaler|minerva|olympiad|hmmt)",
    re.IGNORECASE,
)
TRUTH = ("family", "seed", "length")  # what a row of a task is generated from


def is_task(name: str) -> bool:
    """Whether a name is that of a task, not of rows."""
    return _is_puzzle(name) or name == CODE or name.startswith((GYM, ARENA))


def _is_puzzle(name: str) -> bool:
    """Whether a task is judged by our own code, which takes no time and cannot fail."""
    return name in PUZZLES or is_crafting(name)


def find_puzzle(task: str) -> Puzzle | Crafting:
    """Return a task with gold answers: a puzzle, or one of the crafting world."""
    if is_crafting(task):
        return Crafting.named(task)
    if task not in PUZZLES:
        raise ValueError(f"task: expected {', '.join(PUZZLES)} or {FORMS}, got {task!r}")
    return PUZZLES[task]


def find_task(task: str) -> RowGenerator:
    """Return a puzzle, the programming tasks, gym/NAME of reasoning-gym, or textarena/NAME."""
    return ProgrammingTasks() if task == CODE else _find_judged(task)


def _find_judged(task: str) -> Task:
    """Return a task whose answers are judged without a sandbox."""
    if task.startswith(GYM):
        return Gym(dataset=task.removeprefix(GYM))
    if task.startswith(ARENA):
        return TextArena(game=task.removeprefix(ARENA))
    if not _is_puzzle(task):
        raise ValueError(
            f"unknown task {task!r}, expected {', '.join(PUZZLES)}, {FORMS}, {CODE}, {GYM}NAME or "
            f"{ARENA}NAME"
        )
    return find_puzzle(task)


def open_rows(config: RowsConfig, *, seed: int) -> FileRows | TaskRows:
    """Open the rows of a configuration; seed: of the order of rows of a file."""
    if config.rows is not None:
        columns, shuffle = config.columns, config.shuffle
        rows = FileRows.read(config.rows, columns=columns, seed=seed, shuffle=shuffle)
        return rows.keep(lambda example: _wrong_tests(config.reward, example.ground_truth))
    assert config.task is not None
    return TaskRows(
        task=config.task,
        source=find_task(config.task),
        length=config.length,
        first=config.first,
        rows=config.prompts,
    )


def _wrong_tests(reward: str | None, truth: Any) -> str | None:
    """What is wrong with the tests of a row; None: nothing, or it has none."""
    if reward != CODE and (reward is not None or not is_problem(truth)):
        return None
    try:
        parse_problem(truth)
    except ValueError as error:
        return str(error)
    return None


def open_judge(config: RowsConfig, rows: Examples) -> Judges | InProcess:
    """Open the judge of these rows: in this process for puzzles, else in worker processes.

    Without a reward function, the data_source of each row of a file decides.
    """
    if config.reward is not None:
        if config.task is not None:
            raise ValueError(f"{SETTING} is for rows; the task {config.task} has its own reward")
        if config.reward.startswith(f"{HERE}:"):
            return InProcess.of_function(resolve(config.reward, SETTING))
        if config.reward == CODE:
            return CodeJudges(config.code, config.workers)
        if config.reward != MATH:
            return _judges(config, config.reward)
        math.load()
        return _judges(config, MATH_SCORE, math.PACKAGE)
    samples = rows.examples if isinstance(rows, FileRows) else (rows.at(0),)
    kinds = {_kind(example) for example in samples}
    unknown = sorted(kinds - {"puzzle", "gym", "textarena", MATH, CODE})
    if unknown:
        named = ", ".join(unknown[:8])
        raise ValueError(
            f"{rows.name}: no built-in reward for rows of data_source {named}. Set the reward "
            f"({SETTING}, in eval --reward) to {MATH} or {CODE}, or to module:function with the "
            f"signature {SIGNATURES}"
        )
    if kinds == {CODE}:
        return CodeJudges(config.code, config.workers)
    if CODE in kinds:
        raise ValueError(f"{rows.name}: rows with tests of programs need a file of their own")
    if kinds == {"puzzle"}:
        return InProcess(lambda example, text: task_verdict(example.ground_truth, text))
    needed = {MATH: math.PACKAGE, "gym": "reasoning_gym", "textarena": "textarena"}
    if MATH in kinds:
        math.load()  # before any process starts: a missing package is reported at once
    return _judges(config, OWN_SCORE, *(needed[kind] for kind in kinds if kind in needed))


def _judges(config: RowsConfig, score: str, *preload: str) -> Judges:
    memory = None if config.memory_gib is None else int(config.memory_gib * 2**30)
    return Judges(score, config.workers, config.deadline, preload, memory=memory)


def _kind(example: Example) -> str:
    """Return puzzle, gym, textarena, math or code; otherwise the data_source in quotes."""
    if is_problem(example.ground_truth):
        return CODE
    family = _family(example.ground_truth)
    if family is not None:
        return "puzzle" if _is_puzzle(family) else family.partition("/")[0]
    return MATH if MATH_SOURCE.search(example.source) else repr(example.source)


def _family(truth: Any) -> str | None:
    """Return the task of a ground truth, by its keys: other datasets have a countdown too."""
    if not isinstance(truth, Mapping) or not set(TRUTH) <= set(truth):
        return None
    family = str(truth["family"])
    return family if is_task(family) else None


def task_verdict(truth: Mapping[str, Any], text: str) -> Verdict:
    """Judge an answer to a generated row, given by family, seed and length."""
    family, seed, length = (truth[key] for key in TRUTH)
    return _source(family).reward(_row(family, seed, length), text)


_source = functools.lru_cache(maxsize=64)(_find_judged)


@functools.lru_cache(maxsize=256)  # the answers to a prompt come together
def _row(family: str, seed: int, length: int) -> Row:
    return _source(family).row(seed, length)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> Any:
    """Score rows of tasks and of mathematics, mixed, for `Judges`."""
    if _family(ground_truth) is not None:
        return task_verdict(ground_truth, solution_str)._asdict()
    return math.compute_score(data_source, solution_str, ground_truth, extra_info)
