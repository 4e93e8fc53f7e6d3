"""Interfaces of tasks: rows with a prompt, and a verdict on any text; the puzzle vocabulary.

A completion is a chain of thought, then one answer, then nothing:

    ... </think> <answer> ... </answer>

Only what stands between the last two tags is judged, whatever the chain says. A text of any other
form is wrong.
"""

import json
import random
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, Protocol

THINK, END_THINK, ANSWER, END_ANSWER = MARKS = "<think>", "</think>", "<answer>", "</answer>"
SPREAD = 1.5  # a gold chain should be within this factor of the requested length
Data = Mapping[str, Any]
Message = Mapping[str, str]  # role and content


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One generated problem: plain data that is all a verdict needs."""

    family: str
    seed: int
    length: int  # difficulty: about how many tokens a chain of thought has
    prompt: str
    data: Data

    @property
    def id(self) -> str:
        return f"{self.family}-{self.length}-{self.seed}"


class Verdict(NamedTuple):
    """The reward of a text, its accuracy (1: right), and the reason."""

    score: float
    acc: float
    reason: str


RIGHT = Verdict(1.0, 1.0, "right")


class FailedVerdict(Verdict):
    """A verdict of 0 because the answer could not be judged: its reward function failed."""

    fault = "errors"  # its kind: timeouts, crashes or errors


def wrong(reason: str) -> Verdict:
    return Verdict(0.0, 0.0, reason)


class Malformed(ValueError):
    """A text without an answer in the required form; the message is the verdict's reason."""


class RowGenerator(Protocol):
    """A generator of problems by seed and length."""

    @property
    def name(self) -> str: ...

    def row(self, seed: int, length: int) -> Row:
        """Generate the row of a seed: the same on every machine and in every process."""


class Task(RowGenerator, Protocol):
    """A generator of problems, with a verdict on what a model writes."""

    def reward(self, row: Row, text: str) -> Verdict:
        """Judge a completion (without the prompt). Never raises for what the text says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and its ground truth: plain data that can be sent to another process.

    max_tokens: longest answer; None: as long as the run allows.
    """

    id: str
    source: str  # data_source: which dataset or task it belongs to
    prompt: str | tuple[Message, ...]  # a text, or chat messages
    ground_truth: Any
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


class Examples(Protocol):
    """Rows by position, in an order that is the same in every process, run and resumed run."""

    @property
    def name(self) -> str:
        """Description for people."""

    @property
    def digest(self) -> str:
        """Digest of the content."""

    def at(self, position: int) -> Example:
        """Return the row at a position, counted through all epochs, without end."""


class Judge(Protocol):
    """Verdicts on texts; a verifier that is late or fails gives reward 0."""

    async def __call__(self, example: Example, text: str) -> Verdict: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle(ABC):
    """A task that also generates gold chains of thought, another for each seed."""

    name: ClassVar[str]
    lengths: ClassVar[tuple[int, int]] = (100, 8000)

    def row(self, seed: int, length: int) -> Row:
        check_seed(self.name, seed, length, self.lengths)
        question, data = self._draw(keyed_random(self.name, seed, length), length)
        prompt = f"{self.name} {question} {THINK}"
        return Row(family=self.name, seed=seed, length=length, prompt=prompt, data=data)

    def chain(self, row: Row, seed: int) -> str:
        """Generate a right completion: thoughts in random order and phrasing, and the answer.

        Searches are repeated until one has about the requested length: lengths vary a lot.
        """
        check_row(self.name, row)
        rng = keyed_random(self.name, row.seed, row.length, "chain", seed)
        thoughts, answer = self._think(rng, row.data, row.length / SPREAD, row.length * SPREAD)
        return " ".join([*thoughts, END_THINK, ANSWER, answer, END_ANSWER])

    def reward(self, row: Row, text: str) -> Verdict:
        check_row(self.name, row)
        try:
            reason = self._judge(row.data, answer_words(text))
        except Malformed as error:
            reason = str(error)
        return wrong(reason) if reason else RIGHT

    @abstractmethod
    def _draw(self, rng: random.Random, length: int) -> tuple[str, Data]:
        """Generate a question whose chains have about this length, and its data."""

    @abstractmethod
    def _think(
        self, rng: random.Random, data: Data, low: float, high: float
    ) -> tuple[list[str], str]:
        """Generate thoughts that lead to the answer, within these lengths if possible, and it."""

    @abstractmethod
    def _judge(self, data: Data, answer: list[str]) -> str:
        """Return what is wrong with the words of an answer; empty: nothing."""


def optional_package(name: str, extra: str, what: str) -> Any:
    """Import a package that only some tasks need; ValueError names the extra that installs it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{what} needs {name}: pip install 'sparrow-rl[{extra}]' ({error})"
        ) from error


def keyed_random(*key: object) -> random.Random:
    """Return a random generator seeded by a key, the same in every process."""
    return random.Random("/".join(map(str, key)))


def check_seed(name: str, seed: int, length: int, lengths: tuple[int, int]) -> None:
    """Refuse seeds and lengths that a task does not support."""
    for what, value in (("seed", seed), ("length", length)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}: {what} must be a whole number, got {value!r}")
    if seed < 0:
        raise ValueError(f"{name}: seed must be at least 0, got {seed}")
    if not lengths[0] <= length <= lengths[1]:
        raise ValueError(f"{name}: length must be {lengths[0]} to {lengths[1]}, got {length}")


def check_json(value: Any, where: str) -> None:
    """Refuse values that JSON does not preserve: dates, bytes, lone surrogates, inf, other keys."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        same = json.loads(text) == value
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise ValueError(
            f"{where} must be JSON data (lists, objects with text keys, text, finite numbers, "
            f"true, false, null), got {reprlib.repr(value)}"
        )


def check_row(name: str, row: Row) -> None:
    """Refuse a row of another task: its data would be misread."""
    if row.family != name:
        raise ValueError(f"{name}: got a row of {row.family}")


def answer_text(text: str) -> str:
    """Return the only answer, at the very end after the thoughts; raise `Malformed` otherwise.

    Thoughts may mention the answer tags: it is clear where thoughts end.
    """
    if text.count(END_THINK) != 1:
        raise Malformed(f"{text.count(END_THINK)} x {END_THINK}, expected exactly 1")
    if THINK in text:
        raise Malformed(f"{THINK} belongs to the prompt, not to a completion")
    final = text.partition(END_THINK)[2].strip()
    if not final.startswith(ANSWER):
        raise Malformed(f"{END_THINK} is not followed by {ANSWER}")
    if final.count(ANSWER) != 1 or final.count(END_ANSWER) != 1:
        raise Malformed(f"expected one {ANSWER} and one {END_ANSWER}")
    if not final.endswith(END_ANSWER):
        raise Malformed(f"the text does not end with {END_ANSWER}")
    answer = final.removeprefix(ANSWER).removesuffix(END_ANSWER).strip()
    if not answer:
        raise Malformed("the answer is empty")
    return answer


def answer_words(text: str) -> list[str]:
    """Return the words of a puzzle's answer; the thoughts may not contain answer tags."""
    answer = answer_text(text)
    if text.count(ANSWER) != 1 or text.count(END_ANSWER) != 1:
        raise Malformed(f"expected one {ANSWER} and one {END_ANSWER}, and none in the thoughts")
    return answer.split()


# The language of the puzzles: 512 words, each one token; numbers and names are words. Text is words
# with one space between; ids are indices into `WORDS`. The order is part of every shipped model: a
# new word replaces the first spare one, and no word is ever moved.

NUMBERS = 128  # 0 to 127
NAMES = 320  # x0 to x319
VOCABULARY = 512
PAD, EOS = "<pad>", "<eos>"
SIGNS = ("=", "+", "-", "*", "/", ";", ":", ",", "?", "(", ")")
OTHERS = (
    *("assignments", "countdown", "graph", "mod", "find", "from", "to", "reach", "with"),
    *("no", "yes", "so", "then", "now", "next", "end", "path", "by", "try", "take"),
)

_IN_USE = (
    PAD,
    EOS,
    *MARKS,
    *SIGNS,
    *OTHERS,
    *(str(number) for number in range(NUMBERS)),
    *(f"x{name}" for name in range(NAMES)),
)
# The rest is room for later words: a model may sample them, so each has a spelling.
WORDS = _IN_USE + tuple(f"<spare{i}>" for i in range(VOCABULARY - len(_IN_USE)))


IDS = {word: index for index, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    """Encode a text of the puzzle language; ValueError for other words."""
    try:
        return [IDS[word] for word in text.split()]
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} is not a word of the puzzle language") from None


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids, without end and padding."""
    return " ".join(WORDS[index] for index in ids if index not in (0, 1))


def number(word: str) -> int | None:
    """Return the number that a word of the puzzle language is, or None."""
    return int(word) if word.isascii() and word.isdigit() and word in IDS else None


def puzzle_tokenizer() -> Any:
    """Make a transformers tokenizer of the puzzle language, which raises on unknown words.

    It has no token for unknown words, so nothing is replaced silently, also in saved models.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocab=IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
