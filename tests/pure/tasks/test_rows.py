"""Rows of files and of tasks: what is read, what is refused and named, and in which order."""

import json
import os
import shutil
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support.damage import damaged

from sparrow.tasks import PUZZLES
from sparrow.tasks.base import Example
from sparrow.tasks.rows import (
    NO_TRUTH,
    FileRows,
    TaskRows,
    example_of,
    read_rows,
)

CHAT = [{"role": "user", "content": "1 + 1?"}]


def verl(number: int = 0, **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number, "split": "train"},
    }
    return {**row, **changes}


def lines(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


class TestReading:
    def test_json_lines_and_lists(self, tmp_path: Path) -> None:
        file = tmp_path / "rows.jsonl"
        text = '\ufeff{"prompt": "a\u2028b"}\n\n  \n{"prompt": 2}\r\n[3]'
        file.write_text(text, encoding="utf-8")
        assert read_rows(file) == [{"prompt": "a\u2028b"}, {"prompt": 2}, [3]]
        (tmp_path / "rows.json").write_text('[{"a": 1},\n {"a": 2}]')
        assert read_rows(tmp_path / "rows.json") == [{"a": 1}, {"a": 2}]

    def test_parquet_and_back(self, tmp_path: Path) -> None:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        rows = [verl(number) for number in range(3)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        assert read_rows(tmp_path / "rows.parquet") == rows
        found = FileRows.read(tmp_path / "rows.parquet", shuffle=False)
        assert [found.at(n).ground_truth for n in range(4)] == ["0", "1", "2", "0"]
        assert found.at(1).prompt == tuple(CHAT)
        assert found.at(1).extra == {"index": 1, "split": "train"}

    def test_broken_files_and_none(self, tmp_path: Path) -> None:
        for content, told in ((b'{"a": 1}\n{"a": \n', "line 2"), (b"\xff\xfe\x00", "UTF-8")):
            (tmp_path / "rows.jsonl").write_bytes(content)
            with pytest.raises(ValueError, match=told):
                read_rows(tmp_path / "rows.jsonl")
        for place in ("nowhere.jsonl", "no/where.parquet", "/no/where/at/all", "", tmp_path):
            with pytest.raises(ValueError, match="rows are"):
                read_rows(place)


class TestHub:
    FILES = ("data/train-00001-of-00002", "data/train-00000-of-00002", "data/test-00000-of-00001")

    @pytest.fixture
    def hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A hub that has one dataset, whatever its name."""
        package = pytest.importorskip("huggingface_hub")

        def download(name: str, *, repo_type: str, allow_patterns: list[str]) -> str:
            assert repo_type == "dataset"
            assert allow_patterns == ["*.parquet", "*.jsonl"]
            return str(tmp_path)

        monkeypatch.setattr(package, "snapshot_download", download)
        return tmp_path

    def fill(self, hub: Path, *names: str) -> None:
        for entry in hub.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for name in names:
            file = hub / f"{name}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            lines(file, [{"file": name}])

    def test_splits(self, hub: Path) -> None:
        train = [self.FILES[1], self.FILES[0]]
        for files, asked, found in (
            (self.FILES, "owner/name", train),
            (self.FILES, "owner/name:train", train),
            (self.FILES, "owner/name:test", [self.FILES[2]]),
            (("train", "test", "train_more"), "owner/name", ["train", "train_more"]),
            (("rows",), "owner/name", ["rows"]),
            (("main/train", "other/train"), "owner/name:other/train", ["other/train"]),
            (("main/train/0", "main/test/0"), "owner/name:main/train", ["main/train/0"]),
            (("trains", "a/train"), "owner/name", ["a/train"]),
        ):
            self.fill(hub, *files)
            assert [row["file"] for row in read_rows(asked)] == found
        for files, asked, told in (
            (self.FILES, "owner/name:dev", "'dev'"),
            (("a", "b"), "owner/name", "owner/name:SPLIT"),
            (("main/train", "other/train"), "owner/name", "owner/name:FOLDER/SPLIT"),
            (("main/train", "other/train"), "owner/name:third/train", "'third/train'"),
            ((), "owner/name", "none"),
        ):
            self.fill(hub, *files)
            with pytest.raises(ValueError, match=told):
                read_rows(asked)

    def test_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        package = pytest.importorskip("huggingface_hub")

        def download(*_: Any, **__: Any) -> str:
            raise OSError("no network")

        monkeypatch.setattr(package, "snapshot_download", download)
        with pytest.raises(ValueError, match="no network"):
            read_rows("owner/name:train")


class TestExamples:
    def test_verl_and_plain(self) -> None:
        found = example_of(verl(7), 3)
        assert found == Example(
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
            found = example_of({"prompt": "1 + 1?", **row}, 0)
            assert found == Example(id="row 0", source="", prompt="1 + 1?", ground_truth=truth)

    def test_problems_are_named(self) -> None:
        image = [{"role": "user", "content": [{"type": "image"}]}]
        for field, values in {
            "reward_model": (
                {"style": "rule"},
                None,
                {"ground_truth": ""},
                {"ground_truth": []},
                "7",
            ),
            "extra_info": ([1],),
            "data_source": (5, "\ud800"),
            "prompt": (None, "", [], 5, ["text"], [{"role": "user"}], image, "a\udfff"),
        }.items():
            for value in values:
                with pytest.raises(ValueError, match=field):
                    example_of(verl(**{field: value}), 17)
        for row in ([1, 2], None):
            with pytest.raises(ValueError, match="object"):
                example_of(row, 17)

    def test_rows_that_could_not_go_to_another_process(self) -> None:
        for value in (
            datetime(2020, 1, 1),
            Decimal("1.5"),
            b"bytes",
            {1: "a key that is no text"},
            "half a character \ud800",
            {"\udfff": 1},
            {1, 2},
            float("nan"),
        ):
            for field, changes in (
                ("ground_truth", {"reward_model": {"ground_truth": {"deep": [value]}}}),
                ("extra_info", {"extra_info": {"deep": [value]}}),
            ):
                with pytest.raises(ValueError, match=field) as caught:
                    example_of(verl(**changes), 7)
                str(caught.value).encode()


class TestFileRows:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        rows = [verl(number) for number in range(20)]
        rows[4] = verl(reward_model={})
        return lines(tmp_path / "rows.jsonl", rows)

    def epoch(self, rows: FileRows, number: int = 0) -> list[str]:
        start = number * len(rows)
        return [rows.at(start + place).ground_truth for place in range(len(rows))]

    def test_good_rows_only(self, file: Path) -> None:
        rows = FileRows.read(file, shuffle=False)
        assert rows.problems == (f"row 4: {NO_TRUTH}",)
        assert self.epoch(rows) == [str(n) for n in range(20) if n != 4]
        assert self.epoch(rows, 5) == self.epoch(rows)
        assert rows.name == str(file)

    def test_epochs_are_shuffled_whole_and_the_same_on_every_machine(self, file: Path) -> None:
        rows = FileRows.read(file, seed=3)
        first, second = self.epoch(rows), self.epoch(rows, 1)
        assert first != second
        assert sorted(first) == sorted(second) == sorted(self.epoch(rows, 1000))
        assert first == self.epoch(FileRows.read(file, seed=3))
        assert first != self.epoch(FileRows.read(file, seed=4))

        assert self.epoch(FileRows.read(file, seed=0))[:6] == ["19", "17", "2", "12", "6", "16"]

    def test_digests(self, file: Path) -> None:
        rows = FileRows.read(file)
        same = FileRows.read(file)
        others = [FileRows.read(file, seed=1), FileRows.read(file, shuffle=False)]
        others.append(rows.keep(lambda example: "no" if example.id == "row 0" else None))
        lines(file, [verl(number) for number in range(20)])
        others.append(FileRows.read(file))
        assert rows.digest == same.digest
        assert len({rows.digest, *(other.digest for other in others)}) == 5

    def test_keep(self, file: Path) -> None:
        long = {"row 2": "prompt of 900 tokens, at most 512"}
        rows = FileRows.read(file, shuffle=False).keep(lambda example: long.get(example.id))
        assert rows.problems == (f"row 4: {NO_TRUTH}", "row 2: prompt of 900 tokens, at most 512")
        assert len(rows) == 18
        assert rows.at(2).id == "row 3"
        with pytest.raises(ValueError, match="too long"):
            rows.keep(lambda _: "too long")

    def test_no_good_row(self, tmp_path: Path) -> None:
        file = lines(tmp_path / "rows.jsonl", [verl(reward_model={})] * 7)
        with pytest.raises(ValueError, match=r"row 0: .*; row 4: .*; \.\.\."):
            FileRows.read(file)
        with pytest.raises(ValueError, match="none"):
            FileRows.read(lines(tmp_path / "rows.jsonl", []))


class TestTaskRows:
    def rows(self, **changes: Any) -> TaskRows:
        settings = {"task": "countdown", "source": PUZZLES["countdown"], "length": 200, **changes}
        return TaskRows(**settings)

    def test_by_seed(self) -> None:
        rows = self.rows(first=10)
        made = PUZZLES["countdown"].row(13, 200)
        assert rows.at(3) == Example(
            id=made.id,
            source="countdown",
            prompt=made.prompt,
            ground_truth={"family": "countdown", "seed": 13, "length": 200},
        )
        assert rows.problems == ()
        rows = self.rows(first=10, rows=4)
        assert [rows.at(n).ground_truth["seed"] for n in range(6)] == [10, 11, 12, 13, 10, 11]
        assert rows.name == "countdown, length 200, rows from 10 to 13"

    def test_digests(self) -> None:
        others = [{"first": 1}, {"rows": 4}, {"length": 300}]
        others.append({"task": "graph", "source": PUZZLES["graph"]})
        digests = [self.rows(**other).digest for other in ({}, *others)]
        assert len(set(digests)) == 5
        assert self.rows().digest == digests[0]

    def test_refused(self) -> None:
        for changes, field in (
            ({"length": 1}, "length"),
            ({"first": -1}, "seed"),
        ):
            with pytest.raises(ValueError, match=field):
                self.rows(**changes)


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


def test_damaged_files(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".json"):
        damage_lines(tmp_path, suffix)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for place in (tmp_path, tmp_path / "pipe.jsonl", "/dev/zero", "~nobody-at-all/rows.jsonl"):
        with pytest.raises(ValueError, match=Path(place).name):
            FileRows.read(place)


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
