"""Curves of training runs: what is read, what is drawn, what is refused."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from sparrow.report.run_plots import Curve, curves, plot_runs

ACC = "val-core/assignments/acc"


def written(folder: Path, name: str, lines: list[dict[str, float | None]]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def run(folder: Path, name: str = "dense") -> Curve:
    steps = [
        {"step": n, "critic/score/mean": n / 10, "sparse/accept_p05": None if n else 0.9}
        for n in range(4)
    ]
    points = [{"step": 2, f"{ACC}/mean@2": 0.5, f"{ACC}/low": 0.4, f"{ACC}/high": 0.6}]
    return Curve.read(
        name,
        written(folder, "metrics.jsonl", steps),
        written(folder, "validation.jsonl", points),
    )


def test_values_leave_out_what_is_unknown(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert found.values("critic/score/mean") == ([0, 1, 2, 3], [0, 0.1, 0.2, 0.3])
    assert found.values("sparse/accept_p05") == ([0], [0.9])
    assert found.values("nothing") == ([], [])
    assert found.points() == [(2, 0.5, 0.4, 0.6)]


def test_a_run_without_validation(tmp_path: Path) -> None:
    metrics = written(tmp_path, "m.jsonl", [{"step": 0, "critic/score/mean": 0.5}])
    found = Curve.read("a", metrics, tmp_path / "absent.jsonl")
    assert found.points() == []
    assert len(curves([found], title="t").axes) == 4


def test_the_file_is_the_same_every_time(tmp_path: Path) -> None:
    runs = [run(tmp_path, "dense"), run(tmp_path, "sparse")]
    (first,) = plot_runs(runs, tmp_path / "a", title="two runs")
    (second,) = plot_runs(runs, tmp_path / "b", title="two runs")
    text = first.read_text(encoding="utf-8")
    assert text == second.read_text(encoding="utf-8")
    assert "two runs" in text
    assert "target 0.86" in text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Curve.read("a", tmp_path / "nothing.jsonl")
    (tmp_path / "text").write_text("no json", encoding="utf-8")
    with pytest.raises(ValueError, match="text, line 1: not valid JSON"):
        Curve.read("a", tmp_path / "text")
    with pytest.raises(ValueError, match="no run"):
        curves([], title="t")
