"""Shared files: atomic writes, digests that are verified on reading, and locks.

A JSON document (schedule, surface, plan) has the sha256 of its content under "digest", whatever its
layout. A JSON line (metrics, rollouts) ends with a digest of its text, a configuration starts with
one; folders (models, finished runs) have SHA256SUMS. Files without a digest are older or written by
hand, and are read as they are; a digest that does not match is an error. A file is complete or does
not exist, also when the process is killed or the disk is full. Reading runs no code. Standard
library only.
"""

import base64
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import sleep
from typing import IO, Any

LOCK = ".lock"
LOOK_SECONDS = 0.05  # in which somebody who looks at a lock has let it go
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_BYTES = 2**30  # maximum size of a text file
UNFINISHED = re.compile(r"\..+\.(\d+)(-\d+)?\.unfinished")
SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
DIGEST = "digest"
# Terminal control: control characters except tab and newline, marks of text direction, and lone
# surrogates, which are not valid text.
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
CONTROL = re.compile(rf"[{_CONTROL}\ud800-\udfff]")
_OF_BELOW = " of the lines below"
_SEAL = re.compile(r', "digest": "([0-9a-f]{16})"\}')

Json = dict[str, Any]


def check_regular(path: str | Path, what: str = "file", most: int | None = MOST_BYTES) -> None:
    """Refuse folders, pipes and devices, which could block forever, and oversized files."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{what} {path} is not a regular file")
    if most is not None and status.st_size > most:
        raise ValueError(f"{what} {path} has {status.st_size} bytes, expected at most {most}")


def expanded(path: str | Path) -> Path:
    """Expand ~ in a path; unchanged where there is no such user."""
    return Path(os.path.expanduser(path))


def cache_folder(name: str) -> Path:
    """Return a folder for files that can be made again: under $SPARROW_HOME, else the cache."""
    if home := os.environ.get("SPARROW_HOME"):
        return expanded(home) / name
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "sparrow" / name


def sync(file: IO[bytes]) -> None:
    """Flush a file to disk, so that it survives a power loss."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: new files and renames survive only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, parts: Iterable[str | bytes]) -> None:
    """Write a file atomically: a reader sees the old content or the new, nothing in between.

    A link of that name is replaced, not followed.
    """
    unfinished = unfinished_path(path)
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # follows no link
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
            sync(file)
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except OSError as error:
        raise explain_full_disk(error, f"{path.name} in {path.parent}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def http_digest(data: bytes) -> str:
    """The value of the HTTP header Content-Digest (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def open_append(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a file for appending; links and pipes are refused."""
    return os.fdopen(_open_regular(path, os.O_WRONLY | os.O_APPEND), "ab", buffering)


def _open_regular(path: Path, flags: int, most_links: int | None = None) -> int:
    """Open or create a regular file; links, pipes and devices are refused."""
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a pipe without a reader
            raise
        raise ValueError(f"{path} is a link or not a regular file; remove it") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > (most_links or status.st_nlink):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file with a single name (a link?); remove it")
    return descriptor


def refuse_links(paths: Iterable[Path]) -> None:
    """Refuse symbolic links in a folder of unknown origin: writing would leave the folder."""
    for path in paths:
        if path.is_symlink():
            raise ValueError(f"{path} must be a file or folder, got a symbolic link")


def make_folder(folder: Path) -> None:
    """Create a folder inside a folder of unknown origin."""
    refuse_links([folder])
    folder.mkdir(parents=True, exist_ok=True)


def unfinished_path(path: Path) -> Path:
    """The temporary name of a file or folder that this thread writes."""
    writer = f"{os.getpid()}-{threading.get_native_id()}"
    return path.with_name(f".{path.name}.{writer}.unfinished")


def unfinished_paths(folder: Path) -> list[Path]:
    """Temporary files of processes that no longer run."""
    return [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := UNFINISHED.fullmatch(path.name)) and not _runs(int(match[1]))
    ]


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Remove temporary files of processes that no longer run; with `name`, of that file alone."""
    for path in unfinished_paths(folder):
        if name is not None and path.name.rsplit(".", 2)[0] != f".{name}":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return pid != os.getpid()


def explain_full_disk(error: OSError, what: str) -> OSError:
    """A clear error for a full disk, with its errno; other errors are unchanged."""
    if error.errno not in FULL:
        return error
    clear = OSError(f"no space left for {what}")
    clear.errno = error.errno
    return clear


# Locks.


class FolderLock:
    """An exclusive lock of a folder, released by the kernel when its process ends or is killed.

    Forked children do not hold it: a worker that outlives its killed parent must not block a
    restart of the run.
    """

    def __init__(self, folder: Path, setting: str = "run.out") -> None:
        self._file = open_lock(folder / LOCK)
        try:
            _lock(self._file)
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


def _lock(file: IO[str]) -> None:
    """Lock a file; a second attempt is for those who look at the lock, which takes an instant."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    sleep(LOOK_SECONDS)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_holder(folder: Path) -> int | None:
    """The id of the process that holds a folder's lock, 0 if unknown; None: nobody does.

    Nothing is written, and nothing is created.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # there is none, or it is a link
        return None
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 20).strip()
        return int(holder) if holder.isdigit() else 0
    finally:
        os.close(descriptor)
    return None


def open_lock(path: Path) -> IO[str]:
    """Open or create a lock file; links are refused, so that no other file is overwritten."""
    descriptor = _open_regular(path, os.O_RDWR, most_links=1)
    return os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")


def _close_in_children(lock: FolderLock) -> None:
    reference = weakref.ref(lock)

    def close() -> None:
        held = reference()
        if held is not None:
            held.close()

    os.register_at_fork(after_in_child=close)


def content_digest(document: Mapping[str, Any]) -> str:
    """The sha256 of the content of a JSON document, without its digest."""
    content = {key: value for key, value in document.items() if key != DIGEST}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{_sha256(text)}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# JSON documents.


def write_document(path: str | Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object with its digest: a line per key, and per object of a list."""
    write_whole(Path(path), [document_text(document)])


def document_text(document: Mapping[str, Any]) -> str:
    """The text of a JSON document with its digest; control characters are escaped."""
    plain = _printable(json.loads(json.dumps(dict(document))))  # as it will be read
    rows = [
        f"  {json.dumps(key)}: {_value_text(value)}"
        for key, value in {**plain, DIGEST: content_digest(plain)}.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def printable(text: str) -> str:
    """Escape the control characters of a text, so that it is safe on a terminal."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def _printable(value: Any) -> Any:
    """Escape every text in a JSON value."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value


def _value_text(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
    return json.dumps(value)


def read_document(path: str | Path, what: str = "file") -> Json:
    """Read a JSON object from a file and verify its digest; a ValueError names the file."""
    text = read_text(path, what)
    try:
        return parse_document(text)
    except ValueError as error:
        raise ValueError(f"{what} {path}: {error}") from error


def read_text(path: str | Path, what: str = "file", most: int = MOST_BYTES) -> str:
    """Read a text file; ValueError where it cannot be read, is too large or not UTF-8."""
    try:
        check_regular(path, what, most)
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path} is not UTF-8 text: {error}") from error


def parse_document(text: str) -> Json:
    """Parse a JSON object and verify its digest, which is left out."""
    document = _object(parse_json(text))
    try:
        for place, string in strings(document):
            if CONTROL.search(string):
                raise ValueError(f"control characters in {place or 'a key'}: {string[:80]!r}")
        digest = content_digest(document)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if document.pop(DIGEST, digest) != digest:
        raise ValueError(
            "its content does not match its digest: the file is damaged or was edited; if the edit "
            'is intended, remove the key "digest"'
        )
    return document


def parse_json(text: str) -> Any:
    """Parse JSON; ValueError where it is invalid, nested too deeply or repeats a key."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def _object(value: Any) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    """A JSON object with unique keys: duplicates are ambiguous."""
    unique: Json = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"keys must be unique, got {key!r} twice")
        unique[key] = value
    return unique


def strings(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a JSON value with its path; keys have no path."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield "", key
            yield from strings(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from strings(inner, f"{place}[{number}]")


# JSON lines.


def add_line_digest(line: str) -> str:
    """Add a digest of its text to a JSON line, as the last key."""
    return f'{line[:-1]}, "digest": "{_sha256(line)[:16]}"}}'


def strip_line_digest(line: str) -> str:
    """Verify and remove the digest of a JSON line; ValueError where it does not match."""
    seal = _SEAL.search(line, max(0, len(line) - 64))
    if seal is None or seal.end() != len(line):
        return line
    plain = line[: seal.start()] + "}"
    if _sha256(plain)[:16] != seal[1]:
        raise ValueError("the line does not match its digest: it is damaged or was edited")
    return plain


def parse_line(line: str) -> Json:
    """Parse a JSON line and verify its digest, which is left out."""
    data = _object(parse_json(strip_line_digest(line.rstrip("\n"))))
    if DIGEST in data:
        raise ValueError(f"invalid digest {data[DIGEST]!r}: the line is damaged")
    return data


def read_lines(path: str | Path, *, growing: bool = False) -> list[Json]:
    """Read a file of JSON lines; a ValueError names the file and the line.

    growing: a last line without a newline is still being written, and left out.
    """
    *lines, last = read_text(path).split("\n")
    objects = []
    for number, line in enumerate([*lines, last] if last and not growing else lines, 1):
        try:
            objects.append(parse_line(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return objects


# Text with a digest in its first line, a comment.


def add_digest_line(text: str) -> str:
    """Put a comment line (#) with the digest of a text above it."""
    return f"# sha256:{_sha256(text)}{_OF_BELOW}\n{text}"


def check_digest_line(text: str) -> None:
    """Verify the digest in the first line of a text, if it has one; ValueError on mismatch."""
    first, _, below = text.partition("\n")
    if not first.startswith("#") or ("sha256:" not in first and _OF_BELOW not in first):
        return
    if first != f"# sha256:{_sha256(below)}{_OF_BELOW}":
        raise ValueError(
            "its lines do not match the sha256 in the first one: the file is damaged or was "
            "edited; if the edit is intended, remove the first line"
        )


# SHA256SUMS: the digests of a folder's files, in the format of `sha256sum`.
#
# Written when a model or an adapter is saved and when a run ends; reading verifies every file that
# it reads. A folder without SHA256SUMS is not verified. `sha256sum -c SHA256SUMS` does the same.


def file_digest(path: str | Path) -> str:
    """The sha256 of a file, read in chunks."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a regular file")
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Add files of a folder to its SHA256SUMS; other entries stay."""
    sums = read_sums(folder) if has_sums(folder) else {}
    sums |= {name: file_digest(folder / name) for name in names}
    write_whole(folder / SUMS, (f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def has_sums(folder: Path) -> bool:
    return os.path.lexists(folder / SUMS)  # a dangling link counts: that is an error


def read_sums(folder: Path) -> dict[str, str]:
    """Read SHA256SUMS: digests by file name; ValueError where a line is malformed."""
    sums: dict[str, str] = {}
    for number, line in enumerate(read_text(folder / SUMS, "digests").splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None or not is_inside(match[2]) or match[2] in sums:
            raise ValueError(
                f"{folder / SUMS}, line {number}: expected a sha256, two spaces, and the unique "
                f"name of a file in this folder, got {line!r:.120}"
            )
        sums[match[2]] = match[1]
    return sums


def is_inside(name: str) -> bool:
    """Whether a relative path stays in its folder."""
    return not name.startswith("/") and "\0" not in name and ".." not in Path(name).parts


def verify(folder: Path, names: Iterable[str]) -> None:
    """Verify files against SHA256SUMS, if the folder has it.

    A ValueError names a file that differs, is not listed, or is listed but missing.
    """
    if not has_sums(folder):
        return
    sums = read_sums(folder)
    for name in names:
        file = folder / name
        if name in sums and not file.is_file():
            raise ValueError(f"{file} is listed in {SUMS} but missing; download the folder again")
        if not file.is_file():
            continue
        if sums.get(name) != cached_digest(file):
            problem = "does not match its digest" if name in sums else "is not listed"
            raise ValueError(
                f"{file} {problem} in {SUMS}: it is damaged or was edited; download the folder "
                f"again, or if the edit is intended, remove {folder / SUMS}"
            )


def cached_digest(file: Path) -> str:
    """The sha256 of a file, cached until the file changes."""
    state = file.stat()
    return _digest(file, state.st_size, state.st_ctime_ns, state.st_ino)


@lru_cache(maxsize=4096)
def _digest(file: Path, size: int, changed: int, inode: int) -> str:
    return file_digest(file)
