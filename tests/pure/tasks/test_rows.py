"""Rows of files and of tasks: what is read, what is refused and named, and in which order."""

import json
import os
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support.damage import damaged
from support.rewards import CHAT, row_file, verl

from sparrow.schema.common import ColumnsConfig
from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example
from sparrow.tasks.rows import (
    NO_TRUTH,
    FileRows,
    TaskRows,
    parse_row,
    read_rows,
    rows_path,
)


def test_json_lines_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    text = '\ufeff{"prompt": "a\u2028b"}\n\n  \n{"prompt": 2}\r\n[3]'
    file.write_text(text, encoding="utf-8")
    assert read_rows(file) == [{"prompt": "a\u2028b"}, {"prompt": 2}, [3]]
    (tmp_path / "rows.json").write_text('[{"a": 1},\n {"a": 2}]')
    assert read_rows(tmp_path / "rows.json") == [{"a": 1}, {"a": 2}]


def test_parquet_and_back(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [verl(number) for number in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet") == rows
    result = FileRows.read(tmp_path / "rows.parquet", shuffle=False)
    assert [result.at(n).ground_truth for n in range(4)] == ["0", "1", "2", "0"]
    assert result.at(1).prompt == tuple(CHAT)
    assert result.at(1).extra == {"index": 1, "split": "train"}


TRAIN = ["data/train-00000-of-00002", "data/train-00001-of-00002"]
SPLITS = (*TRAIN[::-1], "data/test-00000-of-00001")
TWO = ("main/train", "other/train")


def test_splits_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = iter(range(100))

    def asked_of(files: tuple[str, ...], asked: str) -> list[str]:
        """The files whose rows are read, where a dataset of any name has these."""
        hub = tmp_path / str(next(places))
        for name in files:
            (hub / name).parent.mkdir(parents=True, exist_ok=True)
            row_file(hub / f"{name}.jsonl", [{"file": name}])

        def download(name: str, *, repo_type: str, allow_patterns: list[str]) -> str:
            assert (name, repo_type) == ("owner/name", "dataset")
            assert allow_patterns == ["*.parquet", "*.jsonl"]
            return str(hub)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        return [row["file"] for row in read_rows(f"owner/name{asked}")]

    for files, asked, result in (
        (SPLITS, "", TRAIN),
        (SPLITS, ":train", TRAIN),
        (SPLITS, ":test", [SPLITS[2]]),
        (("train", "test", "train_more"), "", ["train", "train_more"]),
        (("rows",), "", ["rows"]),
        (TWO, ":other/train", ["other/train"]),
        (("main/train/0", "main/test/0"), ":main/train", ["main/train/0"]),
        (("trains", "a/train"), "", ["a/train"]),
    ):
        assert asked_of(files, asked) == result
    for files, asked, message in (
        (SPLITS, ":dev", "'dev'"),
        (("a", "b"), "", "owner/name:SPLIT"),
        (TWO, "", "owner/name:FOLDER/SPLIT"),
        (TWO, ":third/train", "'third/train'"),
        ((), "", "none"),
    ):
        with pytest.raises(ValueError, match=message):
            asked_of(files, asked)

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match="no network"):
        read_rows("owner/name:train")


def test_verl_and_plain() -> None:
    result = parse_row(verl(7), 3)
    assert result == Example(
        id="row 3",
        source="openai/gsm8k",
        prompt=tuple(CHAT),
        ground_truth="7",
        extra={"index": 7, "split": "train"},
    )

    for row, truth in (
        ({"ground_truth": "7"}, "7"),
        ({"answer": 7}, 7),
        ({"answer": 0}, 0),
        ({"answer": False}, False),
        ({"answer": {"target": 24}}, {"target": 24}),
        ({"reward_model": {"ground_truth": "1"}, "answer": "2"}, "1"),
        ({"reward_model": {"ground_truth": None}, "answer": "2"}, "2"),
    ):
        result = parse_row({"prompt": "1 + 1?", **row}, 0)
        assert result == Example(id="row 0", source="", prompt="1 + 1?", ground_truth=truth)


def test_problems_are_named() -> None:
    """What could not go to another process as it is, too."""
    image = [{"role": "user", "content": [{"type": "image"}]}]
    strange = (datetime(2020, 1, 1), Decimal("1.5"), b"bytes", {1: "a"}, {1, 2}, float("nan"))
    strange = (*strange, float("inf"))
    deep = [{"deep": [value]} for value in (*strange, "half a character \ud800", {"\udfff": 1})]
    truths = [{"ground_truth": truth} for truth in ("", [], *deep)]
    for field, values in {
        "reward_model": ({"style": "rule"}, None, "7", *truths),
        "extra_info": ([1], *deep),
        "data_source": (5, "\ud800"),
        "prompt": (None, "", [], 5, ["text"], [{"role": "user"}], image, "a\udfff"),
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=field) as caught:
                parse_row(verl(**{field: value}), 17)
            str(caught.value).encode()
    for row in ([1, 2], None):
        with pytest.raises(ValueError, match="object"):
            parse_row(row, 17)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [verl(number) for number in range(20)]
    rows[4] = verl(reward_model={})
    return row_file(tmp_path / "rows.jsonl", rows)


def epoch(rows: FileRows, number: int = 0) -> list[str]:
    start = number * len(rows)
    return [rows.at(start + place).ground_truth for place in range(len(rows))]


def test_epochs_are_shuffled_whole_and_the_same_on_every_machine(file: Path) -> None:
    rows = FileRows.read(file, seed=3)
    first, second = epoch(rows), epoch(rows, 1)
    assert first != second
    assert sorted(first) == sorted(second) == sorted(epoch(rows, 1000))
    assert first == epoch(FileRows.read(file, seed=3))
    assert first != epoch(FileRows.read(file, seed=4))

    assert epoch(FileRows.read(file, seed=0))[:6] == ["19", "17", "2", "12", "6", "16"]


def test_digests_of_files(file: Path) -> None:
    rows = FileRows.read(file)
    same = FileRows.read(file)
    others = [FileRows.read(file, seed=1), FileRows.read(file, shuffle=False)]
    others.append(rows.keep(lambda example: "no" if example.id == "row 0" else None))
    row_file(file, [verl(number) for number in range(20)])
    others.append(FileRows.read(file))
    assert rows.digest == same.digest
    assert len({rows.digest, *(other.digest for other in others)}) == 5


def test_keep(file: Path) -> None:
    """Good rows only, and of these the ones that fit; the others are named."""
    long = {"row 2": "prompt of 900 tokens, at most 512"}
    rows = FileRows.read(file, shuffle=False).keep(lambda example: long.get(example.id))
    assert rows.problems == (f"row 4: {NO_TRUTH}", "row 2: prompt of 900 tokens, at most 512")
    assert epoch(rows) == [str(n) for n in range(20) if n not in (2, 4)]
    assert epoch(rows, 5) == epoch(rows)
    assert (len(rows), rows.name) == (18, str(file))
    with pytest.raises(ValueError, match=r"row 4: .*; row 2: .*; row 0: too long.*; \.\.\."):
        rows.keep(lambda _: "too long")


def task_rows(**changes: Any) -> TaskRows:
    settings = {"task": "countdown", "source": PUZZLES["countdown"], "length": 200, **changes}
    return TaskRows(**settings)


def test_by_seed() -> None:
    rows = task_rows(first=10)
    made = PUZZLES["countdown"].row(13, 200)
    assert rows.at(3) == Example(
        id=made.id,
        source="countdown",
        prompt=made.prompt,
        ground_truth={"family": "countdown", "seed": 13, "length": 200},
    )
    assert rows.problems == ()
    rows = task_rows(first=10, rows=4)
    assert [rows.at(n).ground_truth["seed"] for n in range(6)] == [10, 11, 12, 13, 10, 11]
    assert rows.name == "countdown, length 200, rows from 10 to 13"


def test_digests_of_tasks() -> None:
    others = [{"first": 1}, {"rows": 4}, {"length": 300}]
    others.append({"task": "graph", "source": PUZZLES["graph"]})
    digests = [task_rows(**other).digest for other in ({}, *others)]
    assert len(set(digests)) == 5
    assert task_rows().digest == digests[0]


# Damage: whatever is in a file, a ValueError or OSError names it.

ODD = {
    "nested": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "objects in objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "digits": b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}",
    "a long line": b'{"prompt": "' + b"a" * 10**7,
    "NUL": b'{"prompt": "a\x00b"}',
    "nothing": b"",
    "blank lines": b"\n \n\t\n",
    "lone surrogate": b'{"prompt": "\\ud800", "answer": 1}',
    "UTF-16": json.dumps(verl()).encode("utf-16"),
    "no objects": b"1\n2\nnull\n[]\n",
    "half a row": b'{"a": 1}\n{"a": \n',
    "no text": b"\xff\xfe\x00",
}


def read(file: Path, content: bytes) -> FileRows | None:
    """The rows, or None where a ValueError or OSError that names the file came out."""
    file.write_bytes(content)
    rows, message = None, ""
    try:
        rows = FileRows.read(file)
    except (ValueError, OSError) as error:
        message = str(error)
    assert rows is not None or file.name in message, message
    assert len(message) < 5000
    return rows


def test_damaged_files(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".json"):
        damage_lines(tmp_path, suffix)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for place in (tmp_path, tmp_path / "pipe.jsonl", "/dev/zero", "~nobody-at-all/rows.jsonl"):
        with pytest.raises(ValueError, match=Path(place).name):
            FileRows.read(place)
    for place in ("nowhere.jsonl", "no/where.parquet", "/no/where/at/all", ""):
        with pytest.raises(ValueError, match="rows are"):
            read_rows(place)


def damage_lines(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    rows = [verl(extra_info={"share": 0.5}), {"prompt": "é", "answer": 3}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    whole = (lines if suffix == ".jsonl" else json.dumps(rows)).encode()
    assert len(read(file, whole) or ()) == 2
    for seed in range(60):
        read(file, damaged(whole, seed))
    for name, content in ODD.items():
        assert read(file, content) is None, name


def test_damaged_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([verl()] * 20), file)
    whole = file.read_bytes()
    assert len(read(file, whole) or ()) == 20
    for seed in range(60):
        read(file, damaged(whole, seed))


# Plain columns.

GSM8K_ROW = {"question": "How many?", "answer": "48 / 2 = 24\n48 + 24 = 72\n#### 72"}


def test_columns_by_their_usual_names_and_by_a_mapping() -> None:
    example = parse_row(GSM8K_ROW, 0)
    assert (example.prompt, example.ground_truth, example.source) == ("How many?", "72", "gsm8k")
    assert parse_row({"problem": "1 + 1?", "answer": "#### in the text"}, 0).source == ""
    assert parse_row({"problem": "1 + 1?", "answer": "one more #### 2"}, 0).ground_truth == "2"
    assert parse_row({"prompt": "a", "question": "b", "answer": 1}, 0).prompt == "a"
    assert parse_row(GSM8K_ROW, 0, source="openai/gsm8k").source == "openai/gsm8k"
    row = {"prompt": "not this", "instruction": "1 + 1?", "solution": 2, "set": "sums", "answer": 3}
    columns = ColumnsConfig(prompt="instruction", answer="solution", source="set")
    example = parse_row(row, 0, columns)
    assert (example.prompt, example.ground_truth, example.source) == ("1 + 1?", 2, "sums")
    for missing in ("instruction", "solution"):
        rest = {name: value for name, value in row.items() if name != missing}
        with pytest.raises(ValueError, match=missing):
            parse_row(rest, 0, columns)


def test_csv_has_a_header_and_suffixes_are_known(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('\ufeffquestion,answer\n"Two lines,\nof ""text""?",7\n\n1 + 1?,2\n')
    rows = FileRows.read(file, shuffle=False)
    assert [example.prompt for example in rows.examples] == ['Two lines,\nof "text"?', "1 + 1?"]
    assert epoch(rows) == ["7", "2"]
    (tmp_path / "rows.TSV").write_text("prompt\tanswer\na, b\t7\n")
    assert read_rows(tmp_path / "rows.TSV") == [{"prompt": "a, b", "answer": "7"}]
    broken = {"a,b\n1,2\n1\n": "row 1", "a\n1,2\n": "row 0", 'a\n"1\n': "line 2", "a,a\n": "a, a"}
    for content, place in broken.items():
        file.write_text(content)
        with pytest.raises(ValueError, match=rf"rows\.csv.*{place}"):
            read_rows(file)
    (tmp_path / "rows.txt").write_text("{}")
    with pytest.raises(ValueError, match=r"rows\.txt.*\.csv"):
        read_rows(tmp_path / "rows.txt")


def test_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list, or anything that gives mappings, such as a Hugging Face dataset."""
    monkeypatch.setenv("SPARROW_HOME", str(tmp_path))
    rows = [GSM8K_ROW, {"question": "é\u2028?", "answer": [1, {"a": None}]}]
    path = rows_path(rows)
    assert read_rows(path) == rows
    assert Path(path).parent == tmp_path / "rows"
    assert rows_path(iter(rows)) == path != rows_path(rows[:1])
    assert rows_path("owner/name:train") == "owner/name:train"
    assert rows_path(tmp_path / "a.csv") == str(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"^your rows.*row 0"):
        FileRows.read(rows_path([{"prompt": "a"}]))
    for bad, message in (
        ([GSM8K_ROW, {"answer": b"x"}], r"row 1,.*'answer'"),
        ([{"answer": float("-inf")}], r"row 0,.*'answer'"),
        (["text"], "row 0"),
        ([{1: "a"}], "row 0"),
        ([], "empty"),
    ):
        with pytest.raises(ValueError, match=message):
            rows_path(bad)
