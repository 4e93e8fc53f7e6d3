"""A plan's inputs, machines and workloads: damage is a ValueError that names the file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import surfaces
from support.damage import damaged, value_or_message

from sparrow.calibration.planning.context import Workload, workload
from sparrow.calibration.planning.cost import published_lengths
from sparrow.calibration.planning.hardware import Hardware
from sparrow.schema.calibrate import PlanConfig
from sparrow.schema.surface import Surface

ODD = [b"", b"\x00", b"\xff\xfe", b"[" * 5000, b"{", b"null", b"[]", b"{}", b"[true]", b"[1.5]"]
ODD += [b"[-1]", b'["5"]', b"[1e400]", b"[NaN]", b"[" + b"9" * 400 + b"]", b"9" * 5000]
ODD += [b"1e400", b"inf"]


def refused(read: Callable[[Path], object], file: Path, content: bytes) -> bool:
    """Whether a ValueError that names the file came out; any other error fails."""
    file.write_bytes(content)
    result = value_or_message(lambda: read(file))
    assert not isinstance(result, str) or str(file) in result, result
    return isinstance(result, str)


def test_machines(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    Hardware.load("h200").save(file)
    whole = file.read_bytes()
    assert not refused(Hardware.load, file, whole)
    for seed in range(100):
        refused(Hardware.load, file, damaged(whole, seed))
    for content in ODD:
        assert refused(Hardware.load, file, content), content
    known = json.loads(whole)
    del known["digest"]  # values are refused by themselves
    for value in (10**400, -1, "x", None, [], True, float("nan"), float("inf"), 1e300):
        for key in ("bytes_per_s", "flops_per_s", "memory", "reserve"):
            assert refused(Hardware.load, file, json.dumps({**known, key: value}).encode()), value


def work(lengths: str | Path | None, stop: int = 2000, **settings: Any) -> Workload:
    measured = settings.pop("measured", (700,))
    surface = Surface(**surfaces.surface(bins=(0, stop), lengths=measured, prompt_tokens=0))
    given = None if lengths is None else str(lengths)
    return workload(surface, PlanConfig(surface=Path("s.json"), lengths=given, **settings))


def test_lengths(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    for whole in (b"[40, 50, 60]", b"40\n50\n60\n"):
        assert not refused(work, file, whole)
        assert work(file).lengths.tolist() == [40, 50, 60]
        for seed in range(50):
            refused(work, file, damaged(whole, seed))
    for content in ODD:
        assert refused(work, file, content), content
        assert refused(lambda path: work(path, prompts=2), file, content), content


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for name in ("pipe.json", "folder.json", "gone.json"):
        for read in (Hardware.load, work):
            with pytest.raises(ValueError, match=name):
                read(tmp_path / name)


def test_workloads() -> None:
    made = work("published", stop=40_000)
    np.testing.assert_array_equal(made.lengths, published_lengths())
    assert made.shortest_prompt == 16
    made = work(None, measured=[100, 300], prompts=4, samples=8, batch=16, stop=200)
    assert len(made.lengths) == 32
    assert set(made.lengths.tolist()) == {100, 200}
    assert made.describe().startswith("surface, cut at 200 tokens: 32 sequences")
    assert work(None, measured=[5, 100]).shortest_prompt == 4
    for name, settings, told in (
        ("surface", {"measured": []}, "lengths"),
        ("published", {"prompts": 2**16, "samples": 2**16}, "16384"),
        ("surface", {"measured": [100] * 20_000}, "20000"),
        ("surface", {"measured": [1]}, "2 to"),
    ):
        with pytest.raises(ValueError, match=told):
            work(name, **settings)
