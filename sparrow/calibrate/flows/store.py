"""What `sparrow flow score` keeps: measured cells in a run folder, and the leaderboard."""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparrow.files import FolderLock, open_append, read_lines, refuse_links, sealed

CELLS = "cells.jsonl"
Row = dict[str, Any]


class Store:
    """Measured figures by what they were measured of: JSON lines in a run folder.

    One process at a time has the folder, from the beginning until `close`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.file = Path(folder) / CELLS
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.file.parent, setting="--out")
        self._found: dict[str, Row] = {}
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._lock.close()

    def get(self, key: Mapping[str, Any]) -> Row | None:
        return self._found.get(_name(key))

    def put(self, key: Mapping[str, Any], figures: Row) -> Row:
        """Keep figures, on the disk before anything else is measured."""
        with open_append(self.file) as file:
            file.write(f"{sealed(json.dumps({'key': dict(key), 'figures': figures}))}\n".encode())
        return self._found.setdefault(_name(key), figures)

    def _read(self) -> None:
        """A last line without its end is of a run that was killed while it wrote."""
        refuse_links([self.file])
        if not self.file.exists():
            return
        data = self.file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.file, len(whole))
        for number, cell in enumerate(read_lines(self.file), 1):
            if cell.keys() != {"key", "figures"} or not isinstance(cell["figures"], dict):
                raise ValueError(f"{self.file}, line {number}: not a measured cell")
            self._found[_name(cell["key"])] = cell["figures"]


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


# The leaderboard.


def leaderboard_lines(result: Mapping[str, Any]) -> list[Row]:
    """One line for every flow that was submitted and every budget.

    gained_by_formula        p05 above the block mean's in the same configuration
    gained_by_configuration  what the block mean itself gains from that configuration over the
                             reference: page 16, first 1, last 2, dense layers 0 and 1
    """
    about = {key: result[key] for key in ("model", "fingerprint", "dtype", "device", "tokens")}
    about["texts"] = {text["name"]: text["sha256"] for text in result["texts"]}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return [
        {
            "when": when,
            "formula": {key: row[key] for key in ("flow", "digest", "bytes", "of_mean")},
            "configuration": {key: row[key] for key in CONFIGURATION},
            "p05": _interval(row, "p05"),
            "gained_by_formula": _interval(row, "gain"),
            "gained_by_configuration": _interval(row, "configuration_gain"),
            **{key: row[key] for key in ("recall", "mass", "error")},
            **about,
        }
        for row in result["rows"]
        if row["submitted"]
    ]


CONFIGURATION = ("page", "first", "last", "dense_layers", "budget")


def append_leaderboard(file: str | Path, result: Mapping[str, Any]) -> int:
    """Append the lines of a result to a leaderboard; how many they are."""
    lines = leaderboard_lines(result)
    place = Path(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    return len(lines)


def _interval(row: Row, name: str) -> Row:
    return {"mean": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}
