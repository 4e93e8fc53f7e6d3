"""Files that are whole or not there, whenever the process is killed or the disk is full; locks."""

import errno
import fcntl
import os
import re
import shutil
import stat
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import IO

LOCK = ".lock"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_BYTES = 2**30  # of a text that is read whole
UNFINISHED = re.compile(r"\..+\.(\d+)\.unfinished")


def check_regular(path: str | Path, what: str = "file", most: int | None = MOST_BYTES) -> None:
    """Refuse a folder, a pipe or a device, which could wait for ever, and what is too large."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{what} {path} is not a regular file")
    if most is not None and status.st_size > most:
        raise ValueError(f"{what} {path} has {status.st_size} bytes, allowed: at most {most}")


def expanded(path: str | Path) -> Path:
    """The path with ~ as a home folder; as it is where there is no such user."""
    return Path(os.path.expanduser(path))


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


def write_whole(path: Path, parts: Iterable[str | bytes]) -> None:
    """Write beside, then rename: a reader sees the old file, the new one, and nothing between.

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
        raise explained(error, f"{path.name} in {path.parent}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def open_append(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a file to append to it; a link or a pipe of that name is refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a pipe without a reader
            raise
        raise ValueError(f"{path} is a link or no regular file; remove it") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a regular file; remove it")
    return file


def refuse_links(paths: Iterable[Path]) -> None:
    """Refuse symbolic links inside a folder that may be a stranger's, by which we would write
    outside it.
    """
    for path in paths:
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link, allowed: a file or folder of its own")


def make_folder(folder: Path) -> None:
    """Make a folder inside one that may be a stranger's."""
    refuse_links([folder])
    folder.mkdir(parents=True, exist_ok=True)


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


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Remove what such processes left in a folder, where `name` is given that file or folder's."""
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
