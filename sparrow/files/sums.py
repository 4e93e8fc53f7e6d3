"""SHA256SUMS: the digests of a folder's files, in the format of `sha256sum`.

Saving a model or an adapter and finishing a run list their files there, reading checks each file
that it reads. A folder without SHA256SUMS is not checked. `sha256sum -c SHA256SUMS` does the same
without Python.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from sparrow.files.disk import write_whole
from sparrow.files.documents import read_text

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def file_digest(path: str | Path) -> str:
    """The sha256 of a file's bytes, read in pieces."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a regular file")
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """List files of a folder with their digests; other files that are listed stay."""
    sums = read_sums(folder) if has_sums(folder) else {}
    sums |= {name: file_digest(folder / name) for name in names}
    write_whole(folder / SUMS, (f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def has_sums(folder: Path) -> bool:
    return os.path.lexists(folder / SUMS)  # a link that leads nowhere too: that is an error


def read_sums(folder: Path) -> dict[str, str]:
    """The listed digests by file name; ValueError where a line is malformed."""
    sums: dict[str, str] = {}
    for number, line in enumerate(read_text(folder / SUMS, "digests").splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None or not is_inside(match[2]) or match[2] in sums:
            raise ValueError(
                f"{folder / SUMS}, line {number}: got {line!r:.120}, allowed: a sha256, two "
                "spaces, and the name of a file in this folder, each once"
            )
        sums[match[2]] = match[1]
    return sums


def is_inside(name: str) -> bool:
    """Whether a relative path stays in its folder."""
    return not name.startswith("/") and "\0" not in name and ".." not in Path(name).parts


def verify(folder: Path, names: Iterable[str]) -> None:
    """Compare files with SHA256SUMS, where the folder has it; a ValueError names a file that
    differs, is there but not listed, or listed but not there.
    """
    if not has_sums(folder):
        return
    sums = read_sums(folder)
    for name in names:
        file = folder / name
        if name in sums and not file.is_file():
            raise ValueError(f"{file}: no such file, but {SUMS} lists it; get the folder again")
        if not file.is_file():
            continue
        if sums.get(name) != cached_digest(file):
            problem = "does not match its digest" if name in sums else "is not listed"
            raise ValueError(
                f"{file} {problem} in {SUMS}: it is damaged, or was edited; get the folder again, "
                f"or where the edit is meant, remove {folder / SUMS}"
            )


def cached_digest(file: Path) -> str:
    """The sha256 of a file, computed again only after the file has changed."""
    state = file.stat()
    return _digest(file, state.st_size, state.st_ctime_ns, state.st_ino)


@lru_cache(maxsize=4096)
def _digest(file: Path, size: int, changed: int, inode: int) -> str:
    return file_digest(file)
