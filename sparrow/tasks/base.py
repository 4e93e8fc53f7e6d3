"""What every task gives: rows with a prompt, and a verdict on any text.

A completion is a chain of thought, then one answer, then nothing:

    ... </think> <answer> ... </answer>

Only what stands between the last two marks is judged, whatever the chain says. A text that is not
of this form is wrong.
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
SPREAD = 1.5  # how far a gold chain should be at most from the length asked for, as a factor
Data = Mapping[str, Any]
Message = Mapping[str, str]  # role and content


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task: plain data, from which a verdict needs nothing else."""

    family: str
    seed: int
    length: int  # the dial: about how many tokens a chain of thought has
    prompt: str
    data: Data

    @property
    def id(self) -> str:
        return f"{self.family}-{self.length}-{self.seed}"


class Verdict(NamedTuple):
    """The reward of a text, whether it is right (0 or 1), and why."""

    score: float
    acc: float
    reason: str


RIGHT = Verdict(1.0, 1.0, "right")


def wrong(reason: str) -> Verdict:
    return Verdict(0.0, 0.0, reason)


class Malformed(ValueError):
    """A text that holds no answer in the form asked for; its message is the verdict's reason."""


class Source(Protocol):
    """Endless rows by seed and length, and a verdict on what a model wrote."""

    @property
    def name(self) -> str: ...

    def row(self, seed: int, length: int) -> Row:
        """The row of that seed: the same on every machine and in every process."""

    def reward(self, row: Row, text: str) -> Verdict:
        """Judge a completion (without the prompt). Never raises for what the text says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and what its answers are judged by: plain data, so it can go to another process.

    max_tokens: how long an answer to it may be; None: as long as the run allows.
    """

    id: str
    source: str  # data_source: which task it belongs to, and so who judges it
    prompt: str | tuple[Message, ...]  # a text, or chat messages
    ground_truth: Any
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


class Examples(Protocol):
    """Rows in an order that a position decides: the same for every process, run and resume."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    @property
    def digest(self) -> str:
        """A name for the content: another one where rows differ."""

    def at(self, position: int) -> Example:
        """The row at a position, from 0 on without end: epochs follow each other, each shuffled."""


class Judge(Protocol):
    """Verdicts on texts. A verdict comes back whatever happens: late or broken verifiers give 0."""

    async def __call__(self, example: Example, text: str) -> Verdict: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle(ABC):
    """A source that also knows how to think: gold chains, another one for every seed."""

    name: ClassVar[str]
    lengths: ClassVar[tuple[int, int]] = (100, 8000)

    def row(self, seed: int, length: int) -> Row:
        check_dial(self.name, seed, length, self.lengths)
        question, data = self._draw(drawn(self.name, seed, length), length)
        prompt = f"{self.name} {question} {THINK}"
        return Row(family=self.name, seed=seed, length=length, prompt=prompt, data=data)

    def chain(self, row: Row, seed: int) -> str:
        """A right completion of the row: thoughts in a drawn order and phrasing, and the answer.

        Searches are drawn until one is about as long as asked for: their lengths vary a lot.
        """
        check_row(self.name, row)
        rng = drawn(self.name, row.seed, row.length, "chain", seed)
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
        """A question whose chains are about that long, and its data."""

    @abstractmethod
    def _think(
        self, rng: random.Random, data: Data, low: float, high: float
    ) -> tuple[list[str], str]:
        """The words of a way to the answer, if possible within these bounds, and the answer."""

    @abstractmethod
    def _judge(self, data: Data, answer: list[str]) -> str:
        """What is wrong with the words of an answer, or nothing."""


def optional_package(name: str, extra: str, what: str) -> Any:
    """A package that only some tasks need; a ValueError says which of our extras has it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{what} needs {name}: pip install 'sparrow-rl[{extra}]' ({error})"
        ) from error


def drawn(*key: object) -> random.Random:
    """Randomness that belongs to a key, in every process alike; tests pin what comes of it."""
    return random.Random("/".join(map(str, key)))


def check_dial(name: str, seed: int, length: int, lengths: tuple[int, int]) -> None:
    """Refuse seeds and lengths that a family was not made for."""
    for what, value in (("seed", seed), ("length", length)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}: {what} must be a whole number, got {value!r}")
    if seed < 0:
        raise ValueError(f"{name}: seed must be at least 0, got {seed}")
    if not lengths[0] <= length <= lengths[1]:
        raise ValueError(f"{name}: length must be {lengths[0]} to {lengths[1]}, got {length}")


def check_json(value: Any, where: str) -> None:
    """Refuse what JSON does not carry as it is: dates, bytes, half characters, keys of no text."""
    try:
        text = json.dumps(value, ensure_ascii=False)
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
    """Refuse a row of another family: its data would be misread."""
    if row.family != name:
        raise ValueError(f"{name}: got a row of {row.family}; ask that family")


def answer_text(text: str) -> str:
    """The answer, or `Malformed`: exactly one, after the thoughts, at the very end.

    Thoughts may mention the marks of an answer: it is clear where thoughts end.
    """
    if text.count(END_THINK) != 1:
        raise Malformed(f"{text.count(END_THINK)} x {END_THINK}, wanted exactly 1")
    if THINK in text:
        raise Malformed(f"{THINK} belongs to the prompt, not to a completion")
    final = text.partition(END_THINK)[2].strip()
    if not final.startswith(ANSWER):
        raise Malformed(f"{END_THINK} is not followed by {ANSWER}")
    if final.count(ANSWER) != 1 or final.count(END_ANSWER) != 1:
        raise Malformed(f"wanted one {ANSWER} and one {END_ANSWER}")
    if not final.endswith(END_ANSWER):
        raise Malformed(f"the text does not end with {END_ANSWER}")
    answer = final.removeprefix(ANSWER).removesuffix(END_ANSWER).strip()
    if not answer:
        raise Malformed("the answer is empty")
    return answer


def answer_words(text: str) -> list[str]:
    """The words of the answer, or `Malformed`; thoughts of puzzles hold no answer of their own."""
    answer = answer_text(text)
    if text.count(ANSWER) != 1 or text.count(END_ANSWER) != 1:
        raise Malformed(f"wanted one {ANSWER} and one {END_ANSWER}, and none in the thoughts")
    return answer.split()


# The language of the puzzles: 512 words, each one token; numbers and names are words. Text is words
# with one space between; ids are places in `WORDS`. The order is part of every shipped model: a new
# word takes the place of the first spare one, and no word is ever moved.

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
# The rest is room for words to come: a model may utter it, so it must have a spelling.
WORDS = _IN_USE + tuple(f"<spare{i}>" for i in range(VOCABULARY - len(_IN_USE)))


IDS = {word: index for index, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    """Token ids of a text; a word that the language lacks is an error."""
    try:
        return [IDS[word] for word in text.split()]
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} is no word of the puzzle language") from None


def decode(ids: Iterable[int]) -> str:
    """The text of token ids, end and padding left out."""
    return " ".join(WORDS[index] for index in ids if index not in (0, 1))


def number(word: str) -> int | None:
    """The number that a word is, or None; only what the language itself writes counts."""
    return int(word) if word.isascii() and word.isdigit() and word in IDS else None


def puzzle_tokenizer() -> Any:
    """A transformers tokenizer; a word that the language lacks raises when it is encoded.

    The model names no word for unknown ones, so that there is nothing to fall back to: this is
    saved with every model and holds there too.
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
