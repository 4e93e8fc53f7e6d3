"""Rows to learn from, in an order that a position decides: of a file, or made by a task.

Files (parquet, JSON lines, or a dataset of the hub) hold rows as verl has them: data_source, prompt
(chat messages, or a text), reward_model.ground_truth, extra_info. Rows that cannot be used are left
out, and named.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from sparrow.files import expanded, read_text
from sparrow.tasks.base import Example, Message, Source, check_json, drawn, optional_package

LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"
MOST_BYTES = 2**34  # of a file, which is read whole
HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w./-]+))?")
FORMS = "a .parquet or .jsonl file, or a dataset of the hub as owner/name[:split]"
FEW = 5  # problems that an error names one by one
NO_TRUTH = 'no reward_model.ground_truth, and no "ground_truth" or "answer"'


def example_of(row: Any, number: int) -> Example:
    """A row of a file as an example; ValueError where it is none. Rows are counted from 0."""
    if not isinstance(row, Mapping):
        raise ValueError(f"an object with named fields is wanted, got {row!r:.80}")
    example = Example(
        id=f"row {number}",
        source=_typed(row, "data_source", str) or "",
        prompt=prompt_of(row),
        ground_truth=_truth(row),
        extra=_typed(row, "extra_info", Mapping) or {},
    )
    check_json(example.source, "data_source")
    check_json(example.ground_truth, "reward_model.ground_truth")
    check_json(example.extra, "extra_info")
    return example


def prompt_of(row: Any) -> str | tuple[Message, ...]:
    """The prompt of a row: a text or chat messages; a ValueError where it is neither."""
    prompt = row.get("prompt") if isinstance(row, Mapping) else None
    check_json(prompt, "prompt")
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise ValueError(
            '"prompt" must be a text or chat messages with role and content, got '
            + ("none" if prompt is None else f"{prompt!r:.80}")
        )
    return tuple(prompt)


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    return all(isinstance(message.get(key), str) for key in ("role", "content"))


def _truth(row: Mapping[str, Any]) -> Any:
    model = _typed(row, "reward_model", Mapping) or {}
    for truth in (model.get("ground_truth"), row.get("ground_truth"), row.get("answer")):
        if truth is not None and (truth or truth == 0):  # neither "" nor [] is one; 0 and False are
            return truth
    raise ValueError(NO_TRUTH)


def _typed(row: Mapping[str, Any], key: str, kind: Any) -> Any:
    value = row.get(key)
    if value is not None and not isinstance(value, kind):
        wanted = "a text" if kind is str else "an object"
        raise ValueError(f"{key} must be {wanted}, got {value!r:.80}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRows:
    """The good rows of a file; each epoch has them all, in an order of its own.

    content: digest of the file's bytes
    problems: what was left out, and why
    """

    name: str
    content: str
    examples: tuple[Example, ...]
    problems: tuple[str, ...] = ()
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.examples:
            told = "; ".join([*self.problems[:FEW], *(["..."] if self.problems[FEW:] else [])])
            raise ValueError(f"{self.name}: no row can be used. {told or 'There is none'}")

    @classmethod
    def read(cls, place: str | Path, *, seed: int = 0, shuffle: bool = True) -> Self:
        """Rows of a .parquet or .jsonl file, or of a dataset of the hub."""
        files = files_of(place)
        examples, problems = [], []
        for number, row in enumerate(rows_in(files)):
            try:
                examples.append(example_of(row, number))
            except ValueError as error:
                problems.append(f"row {number}: {error}")
        return cls(
            name=str(place),
            content=digest_of(files),
            examples=tuple(examples),
            problems=tuple(problems),
            seed=seed,
            shuffle=shuffle,
        )

    @property
    def digest(self) -> str:
        """Of the bytes, of the rows that are used, and of their order."""
        order = f"shuffled by {self.seed}" if self.shuffle else "as they stand"
        return _digest([self.content, order, *(example.id for example in self.examples)])

    def __len__(self) -> int:
        return len(self.examples)

    def at(self, position: int) -> Example:
        """The row at a position, counted on through the epochs."""
        epoch, place = divmod(position, len(self.examples))
        if self.shuffle:
            place = _order(self.seed, epoch, len(self.examples))[place]
        return self.examples[place]

    def keep(self, fits: Callable[[Example], str | None]) -> Self:
        """Without the rows for which `fits` gives a reason; that joins the problems."""
        reasons = [fits(example) for example in self.examples]
        judged = list(zip(self.examples, reasons, strict=True))
        dropped = [f"{one.id}: {why}" for one, why in judged if why is not None]
        kept = tuple(example for example, why in judged if why is None)
        return replace(self, examples=kept, problems=(*self.problems, *dropped))


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    drawn("rows", seed, epoch).shuffle(order)
    return tuple(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """Rows that a task makes, by seed.

    task: what the source is called where it is chosen: countdown, gym/NAME
    first: the seed of the first row
    rows: so many different ones, then the same again; None: no end
    """

    task: str
    source: Source
    length: int
    first: int = 0
    rows: int | None = None
    problems: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.at(0)  # refuses a length that the task does not have

    @property
    def name(self) -> str:
        upto = "on" if self.rows is None else f"to {self.first + self.rows - 1}"
        return f"{self.task}, length {self.length}, rows from {self.first} {upto}"

    @property
    def digest(self) -> str:
        """Of the settings and of the first prompt, which changes where the task does."""
        return _digest([self.name, str(self.at(0).prompt)])

    def at(self, position: int) -> Example:
        """The row at a position. Its ground truth is what it can be made from again."""
        seed = self.first + (position if self.rows is None else position % self.rows)
        row = self.source.row(seed, self.length)
        return Example(
            id=row.id,
            source=self.task,
            prompt=row.prompt,
            ground_truth={"family": self.task, "seed": seed, "length": self.length},
        )


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


# Files.


def read_rows(place: str | Path) -> list[Any]:
    """All rows of a place, as the plain data that they are."""
    return rows_in(files_of(place))


def files_of(place: str | Path) -> list[Path]:
    """The files of a place; those of the hub are downloaded where they are not here."""
    path = expanded(place)
    if path.is_file():
        return [path]
    if path.is_dir():
        raise ValueError(f"{path} is a folder; rows are {FORMS}")
    hub = HUB.fullmatch(str(place))
    if hub is None or path.suffix in (*LINES, PARQUET):
        raise ValueError(f"{place}: no such file; rows are {FORMS}")
    return _chosen(_download(hub[1], str(place)), hub[1], hub[2])


def rows_in(files: Sequence[Path]) -> list[Any]:
    """The rows of files, one after the other."""
    return [row for file in files for row in _read(file)]


def _read(file: Path) -> list[Any]:
    """The rows of one file. JSON may also be one list of them."""
    if file.suffix == PARQUET:
        return _parquet(file)
    text = read_text(file, "rows", most=MOST_BYTES)
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return _json(text, str(file))
    lines = enumerate(text.split("\n"), 1)  # splitlines would also split inside of texts
    return [_json(line, f"{file}, line {number}") for number, line in lines if line.strip()]


def digest_of(files: Sequence[Path]) -> str:
    """A name for what the files hold."""
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from error


def _parquet(file: Path) -> list[Any]:
    pyarrow = optional_package("pyarrow", "parquet", f"{file}: parquet")
    parquet = import_module("pyarrow.parquet")
    try:
        return parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, ValueError, OSError, OverflowError) as error:
        raise ValueError(f"{file} is no parquet that can be read: {error}") from error


def _download(name: str, asked: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    wanted = [f"*{PARQUET}", "*.jsonl"]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{asked!r} is no file, and the hub could not give the dataset {name!r} "
            f"({type(error).__name__}: {error}). Download it where there is a network and name "
            "its file"
        ) from error


def _chosen(folder: Path, name: str, split: str | None) -> list[Path]:
    """The files of a split, in order. A folder may stand before it: main/train."""
    parquet, lines = (sorted(folder.rglob(f"*{end}")) for end in (PARQUET, ".jsonl"))
    files = parquet or lines
    shown = ", ".join(str(file.relative_to(folder)) for file in files[:8]) or "none"
    found = [file for file in files if _is_of(file.relative_to(folder), split or "train")]
    if split is None and not found and len(files) == 1:
        found = files
    if not found:
        told = "name one that is there" if split else f"name one, as {name}:SPLIT"
        raise ValueError(f"{name}: no rows of split {split or 'train'!r}; {told}. Files: {shown}")
    if len({file.parent for file in found}) > 1:
        raise ValueError(
            f"{name}: several folders have that split: name one, as {name}:FOLDER/SPLIT. "
            f"Files: {shown}"
        )
    return found


def _is_of(file: Path, split: str) -> bool:
    """Whether a file is of a split: train.parquet, train-00000-of-00002.parquet, train/0.parquet,
    each in any folder, or in the one that is named before the split.
    """
    *folders, wanted = split.split("/")
    named = re.match(rf"{re.escape(wanted)}([-_.]|$)", file.stem) is not None
    around = list(file.parent.parts)
    if not named and around and around[-1] == wanted:
        named = bool(around.pop())
    return named and (not folders or around[len(around) - len(folders) :] == folders)
