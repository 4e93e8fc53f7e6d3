"""Rows to train and evaluate on, in an order that a position decides: of a file, or of a task.

Files (parquet, JSON lines, CSV with a header) and datasets of the hub hold rows in verl's schema:
data_source, prompt (a text or chat messages), reward_model.ground_truth, extra_info. Plain columns
do as well: prompt, question or problem, with ground_truth or answer; `ColumnsConfig` names others.
Unusable rows are left out and reported.
"""

import csv
import functools
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from sparrow.files import cache_folder, expanded, read_text, write_whole
from sparrow.schema.common import ColumnsConfig
from sparrow.tasks.base import (
    Example,
    Message,
    RowGenerator,
    check_json,
    keyed_random,
    optional_package,
)
from sparrow.tasks.code.humaneval import read_humaneval
from sparrow.tasks.code.problems import problem_columns

LINES = (".jsonl", ".json", ".ndjson")
TABLES = {".csv": ",", ".tsv": "\t"}  # with a header
PARQUET = ".parquet"
MOST_BYTES = 2**34  # of a file, which is read whole
HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w./-]+))?")
FORMS = "a .parquet, .jsonl, .json, .csv or .tsv file, or owner/name[:split] of the hub"
FEW = 5  # problems that an error lists
PROMPTS = ("prompt", "question", "problem")  # usual columns, the first that a row has
GSM8K = re.compile(r".*\s####[ \t]*(\S[^\n]*)", re.DOTALL)  # a solution, then the answer
NO_TRUTH = 'no reward_model.ground_truth, no "ground_truth" or "answer", and no tests of a program'
HUMANEVAL = "humaneval"
USUAL = ColumnsConfig()


def parse_row(
    row: Any, number: int, columns: ColumnsConfig = USUAL, *, source: str = ""
) -> Example:
    """Make an example of a row; ValueError names the column that is wrong.

    number: of the row, from 0. source: of rows that have no data_source.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object with named columns, got {row!r:.80}")
    prompt = read_prompt(row, columns)
    truth, usual_source = _answer(row, columns)
    named = columns.source or "data_source"
    extra = _typed(row, "extra_info", Mapping) or {}
    example = Example(
        id=f"row {number}",
        source=_typed(row, named, str) or source or usual_source,
        prompt=prompt,
        ground_truth=truth,
        extra=extra,
    )
    check_json(example.source, named)
    check_json(truth, columns.answer or "reward_model.ground_truth")
    check_json(extra, "extra_info")
    return example


def read_prompt(row: Any, columns: ColumnsConfig = USUAL) -> str | tuple[Message, ...]:
    """Return the prompt of a row, a text or chat messages; ValueError if it is neither."""
    names = PROMPTS if columns.prompt is None else (columns.prompt,)
    values = row if isinstance(row, Mapping) else {}
    name = next((name for name in names if values.get(name) is not None), None)
    if name is None:
        raise ValueError(f"no column {' or '.join(map(repr, names))}; {_has(values)}")
    prompt = values[name]
    check_json(prompt, name)
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise ValueError(
            f"column {name!r} must be a non-empty text, or chat messages with role and content, "
            f"got {prompt!r:.80}"
        )
    return tuple(prompt)


def _has(row: Mapping[str, Any]) -> str:
    return f"the row has {', '.join(repr(str(name)) for name in row) or 'none':.200}"


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    return all(isinstance(message.get(key), str) for key in ("role", "content"))


def _answer(row: Mapping[str, Any], columns: ColumnsConfig) -> tuple[Any, str]:
    """Return the ground truth, and the source that its form shows: GSM8K's ends with #### 72."""
    if columns.answer is not None:
        values = [row.get(columns.answer)]
        missing = f"no answer in column {columns.answer!r}; {_has(row)}"
    else:
        model = _typed(row, "reward_model", Mapping) or {}
        values = [model.get("ground_truth"), row.get("ground_truth"), row.get("answer")]
        values.append(problem_columns(row))
        missing = NO_TRUTH
    # Neither "" nor [] is an answer; 0 and False are.
    truth = next((value for value in values if value is not None and (value or value == 0)), None)
    if truth is None:
        raise ValueError(missing)
    final = GSM8K.fullmatch(truth.strip()) if isinstance(truth, str) else None
    return (truth, "") if final is None else (final[1].strip(), "gsm8k")


def _typed(row: Mapping[str, Any], key: str, kind: Any) -> Any:
    value = row.get(key)
    if value is not None and not isinstance(value, kind):
        expected = "a text" if kind is str else "an object"
        raise ValueError(f"{key} must be {expected}, got {value!r:.80}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRows:
    """The usable rows of a file; every epoch has them all, in another order.

    content: digest of the file's bytes
    problems: which rows were left out, and why
    """

    name: str
    content: str
    examples: tuple[Example, ...]
    problems: tuple[str, ...] = ()
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.examples:
            listed = "; ".join([*self.problems[:FEW], *(["..."] if self.problems[FEW:] else [])])
            raise ValueError(f"{self.name}: no usable row. {listed or 'It is empty'}")

    @classmethod
    def read(
        cls,
        place: str | Path,
        *,
        columns: ColumnsConfig = USUAL,
        seed: int = 0,
        shuffle: bool = True,
    ) -> Self:
        """Read the rows of a file, or of a dataset of the hub."""
        if place == HUMANEVAL:
            known = tuple(parse_row(row, n, columns) for n, row in enumerate(read_humaneval()))
            content = _digest([str(example) for example in known])
            return cls(name=place, content=content, examples=known, seed=seed, shuffle=shuffle)
        files = locate_files(place)
        hub = None if expanded(place).is_file() else HUB.fullmatch(str(place))
        source = hub[1] if hub else ""
        examples, problems = [], []
        for number, row in enumerate(read_files(files)):
            try:
                examples.append(parse_row(row, number, columns, source=source))
            except ValueError as error:
                problems.append(f"row {number}: {error}")
        return cls(
            name="your rows" if files[0].parent == cache_folder("rows") else str(place),
            content=files_digest(files),
            examples=tuple(examples),
            problems=tuple(problems),
            seed=seed,
            shuffle=shuffle,
        )

    @property
    def digest(self) -> str:
        """Digest of the bytes, of which rows are used, and of their order."""
        order = f"shuffled by {self.seed}" if self.shuffle else "as they stand"
        return _digest([self.content, order, *(example.id for example in self.examples)])

    def __len__(self) -> int:
        return len(self.examples)

    def at(self, position: int) -> Example:
        """Return the row at a position, counted through all epochs."""
        epoch, place = divmod(position, len(self.examples))
        if self.shuffle:
            place = _order(self.seed, epoch, len(self.examples))[place]
        return self.examples[place]

    def keep(self, fits: Callable[[Example], str | None]) -> Self:
        """Drop the rows for which `fits` returns a reason, which is added to the problems."""
        checked = [(example, fits(example)) for example in self.examples]
        dropped = [f"{example.id}: {reason}" for example, reason in checked if reason is not None]
        kept = tuple(example for example, reason in checked if reason is None)
        return replace(self, examples=kept, problems=(*self.problems, *dropped))


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    keyed_random("rows", seed, epoch).shuffle(order)
    return tuple(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """Rows that a task generates, by seed.

    task: its name in a configuration: countdown, gym/NAME
    first: the seed of the first row
    rows: how many different ones, then they repeat; None: endless
    """

    task: str
    source: RowGenerator
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
        """Digest of the settings and of the first prompt, which changes if the task does."""
        return _digest([self.name, str(self.at(0).prompt)])

    def at(self, position: int) -> Example:
        """Return the row at a position; its ground truth is what generates it again."""
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


# Rows in memory.


def rows_path(rows: Any) -> str:
    """Return a path or hub name as it is; write rows in memory to a file and return its path.

    Rows in memory are any mappings: a list of dicts, a Hugging Face dataset, a DataFrame. The file
    is JSON lines in the cache folder, named by the digest of its content.
    """
    if isinstance(rows, str | Path):
        return str(rows)
    if isinstance(rows, Mapping):
        raise ValueError(
            f"rows: expected a list of dicts, got a dict with {', '.join(map(repr, rows)):.80}; of "
            "several splits pass one, of columns pandas.DataFrame(rows)"
        )
    if type(rows).__name__ == "DataFrame":
        rows = rows.to_dict("records")
    text = "".join(_json_line(row, number) for number, row in enumerate(rows))
    if not text:
        raise ValueError("rows are empty")
    path = cache_folder("rows") / f"{_digest([text])}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [text])
    return str(path)


def _json_line(row: Any, number: int) -> str:
    if not isinstance(row, Mapping):
        raise ValueError(f"row {number}: expected a dict of columns, got {row!r:.80}")
    for column, value in row.items():
        check_json({column: value}, f"row {number}, column {column!r}")
    return json.dumps(dict(row), ensure_ascii=False) + "\n"


# Files.


def read_rows(place: str | Path) -> list[Any]:
    """Read all rows of a file or dataset as plain data."""
    return read_files(locate_files(place))


def locate_files(place: str | Path) -> list[Path]:
    """Return the files of a path or of a dataset of the hub, which is downloaded if necessary."""
    path = expanded(place)
    if path.is_file():
        return [path]
    if path.is_dir():
        raise ValueError(f"{path} is a folder; rows are {FORMS}")
    hub = HUB.fullmatch(str(place))
    if hub is None or path.suffix.lower() in (*LINES, *TABLES, PARQUET):
        raise ValueError(f"{place}: no such file; rows are {FORMS}")
    return _split_files(_download(hub[1], str(place)), hub[1], hub[2])


def read_files(files: Sequence[Path]) -> list[Any]:
    """Read the rows of files, one after the other."""
    return [row for file in files for row in _read(file)]


def _read(file: Path) -> list[Any]:
    """Read the rows of one file by its suffix; JSON may also be one list of them."""
    suffix = file.suffix.lower()
    if suffix == PARQUET:
        return _parquet(file)
    if suffix not in (*LINES, *TABLES):
        raise ValueError(f"{file}: unknown suffix {file.suffix!r}; rows are {FORMS}")
    text = read_text(file, "rows", most=MOST_BYTES)
    if suffix in TABLES:
        return _table(text, TABLES[suffix], str(file))
    if suffix == ".json" and text.lstrip().startswith("["):
        return _json(text, str(file))
    lines = enumerate(text.split("\n"), 1)  # splitlines would also split inside of texts
    return [_json(line, f"{file}, line {number}") for number, line in lines if line.strip()]


def _table(text: str, delimiter: str, where: str) -> list[dict[str, str]]:
    """Read CSV with a header: all values are text."""
    lines = io.StringIO(text.removeprefix("\ufeff"), newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        header = reader.fieldnames or ()
        if len({*header}) < len(header):
            raise ValueError(f"two columns have the same name: {', '.join(header):.200}")
        rows = list(reader)
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{where}, line {reader.reader.line_num}: {error}") from error
    for number, row in enumerate(rows):
        if None in row or None in row.values():  # what DictReader gives for too many or too few
            raise ValueError(f"{where}, row {number}: expected {len(header)} columns")
    return rows


def files_digest(files: Sequence[Path]) -> str:
    """Return a digest of the content of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error


def _parquet(file: Path) -> list[Any]:
    pyarrow = optional_package("pyarrow", "parquet", f"{file}: parquet")
    parquet = import_module("pyarrow.parquet")
    try:
        return parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, ValueError, OSError, OverflowError) as error:
        raise ValueError(f"{file}: not a readable parquet file: {error}") from error


def _download(name: str, place: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = [f"*{PARQUET}", "*.jsonl"]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{place!r} is not a file, and the dataset {name!r} could not be downloaded from the "
            f"hub ({type(error).__name__}: {error}). Download it where there is a network and "
            "give the path of its file"
        ) from error


def _split_files(folder: Path, name: str, split: str | None) -> list[Path]:
    """Return the files of a split, in order; a folder may precede it: main/train."""
    parquet, lines = (sorted(folder.rglob(f"*{end}")) for end in (PARQUET, ".jsonl"))
    files = parquet or lines
    listed = ", ".join(str(file.relative_to(folder)) for file in files[:8]) or "none"
    matching = [file for file in files if _in_split(file.relative_to(folder), split or "train")]
    if split is None and not matching and len(files) == 1:
        matching = files
    if not matching:
        hint = "choose one that exists" if split else f"choose one, as {name}:SPLIT"
        raise ValueError(f"{name}: no rows of split {split or 'train'!r}; {hint}. Files: {listed}")
    if len({file.parent for file in matching}) > 1:
        raise ValueError(
            f"{name}: several folders have that split: choose one, as {name}:FOLDER/SPLIT. "
            f"Files: {listed}"
        )
    return matching


def _in_split(file: Path, split: str) -> bool:
    """Whether a file belongs to a split: train.parquet, train-00000-of-00002.parquet,
    train/0.parquet, each in any folder, or in the folder that precedes the split's name.
    """
    *folders, name = split.split("/")
    named = re.match(rf"{re.escape(name)}([-_.]|$)", file.stem) is not None
    around = list(file.parent.parts)
    if not named and around and around[-1] == name:
        named = bool(around.pop())
    return named and (not folders or around[len(around) - len(folders) :] == folders)
