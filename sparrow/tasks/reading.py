"""Rows as they stand in files: parquet, JSON lines, or a dataset of the hub."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrow.files import expanded, read_text

LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"
MOST_BYTES = 2**34  # of a file, which is read whole
HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w./-]+))?")
FORMS = "a .parquet or .jsonl file, or a dataset of the hub as owner/name[:split]"


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
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{file}: parquet needs pyarrow: pip install 'sparrow-rl[parquet]' ({error})"
        ) from error
    try:
        return pyarrow.parquet.read_table(file).to_pylist()
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
