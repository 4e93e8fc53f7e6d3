"""Files that people share: written whole or not at all, with a digest that is checked at reading.

A JSON document (schedule, surface, plan) holds the sha256 of its content under "digest", whatever
its layout. A JSON line (metrics, rollouts) ends with a digest of its own text. What has none is
older or made by hand, and is read as it is; a digest that does not match is an error. Reading runs
no code. Standard library alone.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

DIGEST = "digest"
LOCK = ".lock"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_BYTES = 2**30  # of a text that is read whole
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # and lone surrogates
UNFINISHED = re.compile(r"\..+\.(\d+)\.unfinished")
_SEAL = re.compile(r', "digest": "([0-9a-f]{16})"\}')

Json = dict[str, Any]


# Digests.


def file_digest(path: str | Path) -> str:
    """The sha256 of a file's bytes, read in pieces."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(document: Mapping[str, Any]) -> str:
    """The sha256 of what a JSON document says, its digest left out."""
    content = {key: value for key, value in document.items() if key != DIGEST}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# JSON documents.


def write_document(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object with its digest: a key a line, lists of objects an object a line."""
    write_whole(Path(path), [document_text(document)])


def document_text(document: Mapping[str, Any]) -> str:
    """What `write_document` writes."""
    plain = json.loads(json.dumps(dict(document)))  # as it will be read
    rows = [
        f"  {json.dumps(key)}: {_value_text(value)}"
        for key, value in {**plain, DIGEST: content_digest(plain)}.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _value_text(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
    return json.dumps(value)


def read_document(path: str | Path, what: str = "file") -> Json:
    """The JSON object in a file, without its digest; ValueError with the file and what is wrong."""
    text = read_text(path, what)
    try:
        return parse_document(text)
    except ValueError as error:
        raise ValueError(f"{what} {path}: {error}") from error


def read_text(path: str | Path, what: str = "file", most: int = MOST_BYTES) -> str:
    """The text of a file; ValueError where it cannot be read, is too large or is none."""
    try:
        check_regular(path, what, most)
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path} is not UTF-8 text: {error}") from error


def check_regular(path: str | Path, what: str = "file", most: int = MOST_BYTES) -> None:
    """Refuse a folder, a pipe or a device, which could wait for ever, and what is too large."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{what} {path} is not a regular file")
    if status.st_size > most:
        raise ValueError(f"{what} {path} has {status.st_size} bytes, allowed: at most {most}")


def expanded(path: str | Path) -> Path:
    """The path with ~ as a home folder; as it is where there is no such user."""
    return Path(os.path.expanduser(path))


def parse_document(text: str) -> Json:
    """The JSON object of a text, its digest checked and left out."""
    document = parse_json(text)
    if not isinstance(document, dict):
        raise ValueError(f"got {type(document).__name__}, allowed: a JSON object")
    try:
        for place, string in _strings(document):
            if CONTROL.search(string):
                raise ValueError(f"control characters in {place or 'a key'}: {string[:80]!r}")
        digest = content_digest(document)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if document.pop(DIGEST, digest) != digest:
        raise ValueError(
            "its content does not match its digest: the file is damaged, or was edited; where the "
            'edit is meant, remove the key "digest"'
        )
    return document


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError where it is none, too deep or repeats a key."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    """A JSON object whose keys differ: of two values for one key, neither can be the one meant."""
    unique: Json = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"got the key {key!r} twice, allowed: each key once")
        unique[key] = value
    return unique


def _strings(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a JSON value, with where it stands; keys are without a place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield "", key
            yield from _strings(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _strings(inner, f"{place}[{number}]")


def visible(text: str) -> str:
    """The text with control characters spelled out, so that a terminal shows and obeys none."""
    return HIDDEN.sub(lambda match: ascii(match[0])[1:-1], text)


# JSON lines.


def sealed(line: str) -> str:
    """A JSON object on one line, with a digest of its text as its last key."""
    return f'{line[:-1]}, "digest": "{_line_digest(line)}"}}'


def unsealed(line: str) -> str:
    """The line as it was before `sealed`; ValueError where it was changed since."""
    seal = _SEAL.search(line, max(0, len(line) - 64))
    if seal is None or seal.end() != len(line):
        return line
    plain = line[: seal.start()] + "}"
    if _line_digest(plain) != seal[1]:
        raise ValueError("the line does not match its digest: it is damaged, or was edited")
    return plain


def _line_digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


# Writing.


def sync(file: IO[bytes]) -> None:
    """See to it that what was written outlives a loss of power."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The same for the names in a folder: a file or a rename is there only when they are."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write beside, then rename: a reader sees the old file, the new one, and nothing between."""
    unfinished = unfinished_path(path)
    try:
        with unfinished.open("wb") as file:
            file.writelines(line.encode() for line in lines)
            sync(file)
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except OSError as error:
        raise explained(error, f"{path.name} in {path.parent}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def unfinished_path(path: Path) -> Path:
    """Where this process writes a file or folder before it gets its name."""
    return path.with_name(f".{path.name}.{os.getpid()}.unfinished")


def unfinished_paths(folder: Path) -> list[Path]:
    """What processes that no longer run were writing in a folder when they ended."""
    return [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := UNFINISHED.fullmatch(path.name)) and not _runs(int(match[1]))
    ]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return pid != os.getpid()


def explained(error: OSError, what: str) -> OSError:
    """A full disk in plain words, with its errno; any other error as it is."""
    if error.errno not in FULL:
        return error
    clear = OSError(f"no space left for {what}")
    clear.errno = error.errno
    return clear


# Locks.


class FolderLock:
    """One process at a time in a folder. The kernel lets go when the holder is gone, killed too.

    Processes that are forked while it is held do not hold it: a worker that outlives its
    killed parent must not keep the run from being started again.
    """

    def __init__(self, folder: Path, setting: str = "run.dir") -> None:
        self._file = open_lock(folder / LOCK)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = self._file.read().strip() or "unknown"
            self.close()
            raise ValueError(
                f"{folder} is in use by another process (id {holder}); "
                f"wait for it or end it, or give this run a directory of its own ({setting})"
            ) from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()
        _close_in_children(self)

    def close(self) -> None:
        self._file.close()


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, made where it is not there; links are refused, so that no other file is
    written in its place.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link, allowed: a file; remove it") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise ValueError(f"{path} is not a file of its own (a link, a pipe?); remove it")
    return os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")


def _close_in_children(lock: FolderLock) -> None:
    kept = weakref.ref(lock)

    def close() -> None:
        held = kept()
        if held is not None:
            held.close()

    os.register_at_fork(after_in_child=close)
