"""Metrics at Weights & Biases, by a small module in place of the package."""

import json
import sys
from pathlib import Path

import pytest
from support.training import config, lines, trained

from sparrow.dataflow.local.run import open_run

FAKE = """
import json, pathlib

class Run:
    def __init__(self, **about):
        self.file = pathlib.Path(about["dir"]) / "said.jsonl"
        self.write({"init": about})

    def write(self, what):
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\\n")

    def log(self, values, step):
        self.write({"step": step, "values": values})

    def finish(self):
        self.write({"finish": True})

def init(**about):
    return Run(**about)
"""


def test_a_run_and_its_resume_are_one_run_with_all_finite_metrics(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "run"
    for steps in (2, 3):
        run = {"steps": steps, "wandb": "sparrows"}
        parts = {"rollout": {"max_tokens": 8}, "validation": {"every": 2, "prompts": 2}}
        trained(config(model, folder, **parts, run=run))
    sys.modules.pop("wandb")
    said = [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]
    first, second = (line["init"] for line in said if "init" in line)
    assert first["id"] == second["id"]
    assert (first["project"], first["resume"], first["name"]) == ("sparrows", "allow", "run")
    assert first["config"]["model"]["name"] == str(model)
    assert sum("finish" in line for line in said) == 2
    logged: dict[int, dict[str, float]] = {}
    for line in (line for line in said if "step" in line):
        logged.setdefault(line["step"], {}).update(line["values"])
    expected: dict[int, dict[str, float]] = {}
    for line in (*lines(folder / "metrics.jsonl"), *lines(folder / "validation.jsonl")):
        finite = {name: value for name, value in line.items() if value is not None}
        expected.setdefault(finite.pop("step"), {}).update(finite)
    assert logged == expected


def test_without_the_package_nothing_is_opened(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"run\.wandb.*install wandb"):
        open_run(config(model, tmp_path / "run", run={"wandb": "sparrows"}))
    assert not (tmp_path / "run").exists()
