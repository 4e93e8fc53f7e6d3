"""Damaged files of rows: whatever is in them, a ValueError or OSError names the file."""

import json
import os
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support.damage import damaged

from sparrow.tasks.base import Example
from sparrow.tasks.rows import FileRows, Problem, example_of

ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"ground_truth": "2"},
    "extra_info": {"index": 1, "share": float("nan")},
}
ODD = {
    "nested": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "objects in objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "digits": b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}",
    "a long line": b'{"prompt": "' + b"a" * 10**7,
    "NUL": b'{"prompt": "a\x00b"}',
    "nothing": b"",
    "blank lines": b"\n \n\t\n",
    "lone surrogate": b'{"prompt": "\\ud800", "answer": 1}',
    "UTF-16": json.dumps(ROW).encode("utf-16"),
    "no objects": b"1\n2\nnull\n[]\n",
}


def read(file: Path, content: bytes) -> FileRows | None:
    """The rows, or None where a ValueError or OSError that names the file came out."""
    file.write_bytes(content)
    rows, told = None, ""
    try:
        rows = FileRows.read(file)
    except (ValueError, OSError) as error:
        told = str(error)
    assert rows is not None or file.name in told, told
    assert len(told) < 5000
    return rows


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_damaged_lines(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{suffix}"
    rows = [ROW, {"prompt": "é", "answer": 3}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    whole = (lines if suffix == ".jsonl" else json.dumps(rows)).encode()
    assert len(read(file, whole) or ()) == 2
    for seed in range(100):
        read(file, damaged(whole, seed))
    for name, content in ODD.items():
        assert read(file, content) is None, name


def test_damaged_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([ROW] * 20), file)
    whole = file.read_bytes()
    assert len(read(file, whole) or ()) == 20
    for seed in range(100):
        read(file, damaged(whole, seed))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for place in (tmp_path, tmp_path / "pipe.jsonl", "/dev/zero", "~nobody-at-all/rows.jsonl"):
        with pytest.raises(ValueError, match=Path(place).name):
            FileRows.read(place)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def test_rows_that_could_not_go_to_another_process() -> None:
    for value in (
        datetime(2020, 1, 1),
        Decimal("1.5"),
        b"bytes",
        {1: "a key that is no text"},
        "half a character \ud800",
        {"\udfff": 1},
        {1, 2},
        nested(100),
    ):
        for changes in (
            {"reward_model": {"ground_truth": {"deep": [value]}}},
            {"extra_info": {"deep": [value]}},
        ):
            found = example_of({**ROW, **changes}, 7)
            assert isinstance(found, Problem), value
            assert found.row == 7
            assert found.reason.startswith(("ground_truth.deep", "extra_info.deep"))
            assert json.dumps(found.reason)
            found.reason.encode()
    for changes in ({"data_source": "\ud800"}, {"prompt": "a\udfff"}):
        assert isinstance(example_of({**ROW, **changes}, 0), Problem)
    whole = example_of(ROW, 0)
    assert isinstance(whole, Example)
    json.dumps([whole.ground_truth, whole.extra])
