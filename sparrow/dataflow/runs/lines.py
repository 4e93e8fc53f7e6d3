"""Files of one JSON object a line, with a digest each, that grow with the steps of a run."""

import json
import os
from pathlib import Path
from typing import Any

from sparrow.files import check_regular, explained, open_append, parse_json, parse_line, sealed

Line = dict[str, Any]


class Lines:
    """Appends lines. Each is on the disk when `append` returns, or not in the file at all.

    So a checkpoint that is written afterwards never knows of steps that the file does not have.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_append(path, buffering=0)

    def append(self, line: Line) -> None:
        rest = memoryview(f"{sealed(json.dumps(line, allow_nan=False))}\n".encode())
        before = self._file.tell()
        try:
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(before)
            raise explained(error, f"another line of {self._path}") from error

    def close(self) -> None:
        self._file.close()


def lines_by_step(path: Path) -> list[tuple[int, str]]:
    """The lines with their steps; a last one that a killed process was writing is left out."""
    text = ""
    if path.exists():
        check_regular(path)
        text = path.read_bytes().decode(errors="replace")
    *lines, unfinished = text.split("\n")
    found: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append((_step(line), f"{line}\n"))
        except ValueError as error:
            last = number == len(lines) and not unfinished
            if not (last and _is_torn(line)):
                where = f"{path}, line {number}"
                raise ValueError(f"{where}: got {line[:80]!r}: {error}") from error
    return found


def _step(line: str) -> int:
    step = parse_line(line).get("step")
    if type(step) is not int:
        raise ValueError('allowed: a JSON object with a whole number "step"')
    return step


def _is_torn(line: str) -> bool:
    """Whether a loss of power can have left it: not where only its digest is another."""
    try:
        parse_json(line)
    except ValueError:
        return True
    return False
