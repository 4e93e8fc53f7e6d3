"""Files that are whole or not there, whenever the process is killed or the disk is full."""

import errno
import fcntl
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import IO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOCK = ".lock"


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
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
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


def explained(error: OSError, what: str) -> OSError:
    """A full disk in plain words, with its errno; any other error as it is."""
    if error.errno not in FULL:
        return error
    clear = OSError(f"no space left for {what}")
    clear.errno = error.errno
    return clear


class FolderLock:
    """One process at a time in a folder. The kernel lets go when the holder is gone, killed too.

    Processes that are forked while it is held do not hold it: a worker that outlives its
    killed parent must not keep the run from being started again.
    """

    def __init__(self, folder: Path, setting: str = "run.dir") -> None:
        self._file = (folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
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


def _close_in_children(lock: FolderLock) -> None:
    kept = weakref.ref(lock)

    def close() -> None:
        held = kept()
        if held is not None:
            held.close()

    os.register_at_fork(after_in_child=close)
