"""Several evaluation sets in a run, and the evaluation of a checkpoint of a run that goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import config, lines, rollout_side, trained, weights_of

from sparrow import api
from sparrow.arguments import configured
from sparrow.dataflow.evaluation import load_policy
from sparrow.models import hf_views
from sparrow.schema.common import PushConfig
from sparrow.schema.evaluation import EvalConfig
from sparrow.schema.loading import load_config, save_resolved
from sparrow.schema.train import TrainConfig, code_settings
from sparrow.tasks import PUZZLES
from sparrow.tasks.rows import read_rows


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Puzzles under other names of columns."""
    file = tmp_path / "rows.jsonl"
    made = [PUZZLES["countdown"].row(seed, 100) for seed in range(3)]
    truths = [{"family": "countdown", "seed": seed, "length": 100} for seed in range(3)]
    rows = [{"q": row.prompt, "a": truth} for row, truth in zip(made, truths, strict=True)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_sets_beside_the_held_out_rows(model: Path, rows: Path, tmp_path: Path) -> None:
    held: dict[str, Any] = {"every": 1, "prompts": 2, "columns": {"prompt": "q", "answer": "a"}}
    held["sets"] = {"numbers": "countdown", "mine": str(rows)}
    chosen = config(model, tmp_path / "run", validation=held, run={"steps": 1})
    run = trained(chosen)
    first, last = lines(tmp_path / "run" / "validation.jsonl")
    for name in ("assignments", "numbers", "mine"):
        shares = [last[f"val-core/{name}/{share}"] for share in ("right", "cut_off", "wrong")]
        assert sum(shares) == pytest.approx(1)
        assert first[f"val-core/{name}/acc/mean@1"] == 0
    assert [len(part.examples) for part in rollout_side(run).validation] == [2, 2, 2]
    assert not code_settings(chosen), "rows are data, whatever their names"
    for sets, setting in (
        ({"mine": str(tmp_path / "none.jsonl")}, "none.jsonl"),
        ({"mine": str(rows), "other": "chess"}, "chess"),
    ):
        with pytest.raises(ValueError, match=setting):
            trained(config(model, tmp_path / "other", validation=held | {"sets": sets}))


def test_sets_alone_beside_rows_of_training() -> None:
    base = {"model": {"name": "tiny"}, "data": {"rows": "train.jsonl"}}
    held = {"every": 1, "sets": {"mine": "test.jsonl"}}
    TrainConfig.model_validate({**base, "validation": held})
    task = {**base, "data": {"task": "graph", "first": 10}}
    for seen in (
        {**base, "validation": {"every": 1}},
        {**base, "validation": {"every": 1, "sets": {"mine": "train.jsonl"}}},
        {**task, "validation": {"every": 1, "rows": "a.jsonl", "sets": {"mine": "graph"}}},
    ):
        with pytest.raises(ValueError, match="validation"):
            TrainConfig.model_validate(seen)


def test_a_checkpoint_of_a_run_that_has_not_ended(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = trained(config(model, folder, run={"steps": 2, "save_every": 1, "keep": 5}))
    (folder / "model").rename(tmp_path / "ended")  # as it was a moment before
    place: dict[str, Any] = {"dtype": "float32", "device": "cpu", "report": print}
    for checkpoint in ("latest", 2):
        loaded = hf_views(load_policy(folder, checkpoint, **place))
        assert all(torch.equal(w, loaded[name]) for name, w in weights_of(run).items())
    earlier = hf_views(load_policy(folder, 1, **place))
    assert any(not torch.equal(w, earlier[name]) for name, w in weights_of(run).items())
    asked: dict[str, Any] = {"task": "countdown", "length": 100, "prompts": 1, "max_tokens": 2}
    evaluated = api.evaluate(str(folder), checkpoint="latest", device="cpu", **asked)
    assert evaluated.cells[0].rows == 1
    for checkpoint, named in ((None, "--checkpoint"), (7, "step 7")):
        with pytest.raises(ValueError, match=named):
            api.evaluate(str(folder), checkpoint=checkpoint, device="cpu", **asked)
    for other in (tmp_path, Path("tiny")):
        with pytest.raises(ValueError, match="expected"):
            load_policy(other, "latest", **place)


def test_a_run_is_evaluated_on_its_held_out_rows(model: Path, rows: Path, tmp_path: Path) -> None:
    """Its reward is not run if it names code: the folder may be somebody else's."""
    held: dict[str, Any] = {"prompts": 2, "columns": {"prompt": "q", "answer": "a"}}
    held["sets"] = {"mine": str(rows)}
    trained(config(model, tmp_path / "run", validation=held, run={"steps": 1}))
    told: list[str] = []
    for place in (tmp_path / "run", tmp_path / "run" / "model"):
        evaluated = api.evaluate(str(place), prompts=1, device="cpu", report=told.append)
        cells = [(cell.source, cell.rows) for cell in evaluated.cells]
        assert cells == [("assignments", 1), ("mine", 1)]
        assert all(cell.tokens <= 40 for cell in evaluated.cells), "rollout.max_tokens of the run"
        assert any(str(rows) in line for line in told)
    own = api.evaluate(str(tmp_path / "run"), task="countdown", length=100, prompts=1, device="cpu")
    assert [cell.source for cell in own.cells] == ["countdown"]
    for reward in ("os:getcwd", "here:mine@0123abcd"):
        data = {"task": None, "rows": str(rows), "reward": reward}
        save_resolved(config(model, tmp_path / "run", data=data), tmp_path / "run")
        with pytest.raises(ValueError, match="--reward"):
            api.evaluate(str(tmp_path / "run"), device="cpu")


def test_options_of_the_command_line() -> None:
    def evaluated(*words: str) -> EvalConfig:
        return load_config(EvalConfig, [], ["runs/train/tiny", *words])

    assert evaluated("--checkpoint", "20").checkpoint == 20
    assert evaluated("--checkpoint", "latest").checkpoint == "latest"
    for wrong in ("newest", "-1"):
        with pytest.raises(ValueError, match=r"^checkpoint:") as error:
            evaluated(f"--checkpoint={wrong}")
        assert "literal" not in str(error.value)
    assert load_config(PushConfig, [], ["a", "b/c", "--checkpoint=20"]).step == 20
    assert evaluated("--rows=a.csv", "--columns.prompt=question").columns.prompt == "question"
    base = ["--model.name=tiny", "--rows=a.csv", "--validation.sets.mine=b.csv"]
    mapped = load_config(TrainConfig, [], [*base, "--data.columns.prompt=question"])
    assert mapped.data.columns.prompt == "question"
    assert mapped.validation.sets == {"mine": "b.csv"}
    assert mapped == load_config(TrainConfig, [], [*base, '--columns={prompt = "question"}'])


def test_sets_from_python_are_rows_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARROW_HOME", str(tmp_path))
    sets = {"mine": [{"question": "x1", "answer": "5"}], "other": "graph"}
    settings = {"task": "countdown", "validation": {"every": 1, "sets": sets}}
    chosen = configured(TrainConfig)(lambda config: config)("tiny", **settings).validation.sets
    assert read_rows(chosen["mine"]) == sets["mine"]
    assert chosen["other"] == "graph"
