"""Files of strangers on a terminal: nothing that verbs print of them is obeyed, errors included."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import demo
from support.study_folders import controlled
from support.surfaces import surface

from sparrow import models
from sparrow.cli import main
from sparrow.schema.base import to_dict
from sparrow.schema.loading import find_config, load_config, save_resolved
from sparrow.schema.train import TrainConfig
from sparrow.sparse import preset

ROOT = Path(__file__).parents[2]
HOSTILE = "x\x1b]0;pwned\x07\x1b[2J\r\x9b31m\x00[/b][red]"
TOML = json.dumps(HOSTILE)  # the same escapes are read by both
SHORT = ("-l", "100", "--max-tokens", "20", "-n", "1", "--device", "cpu")
Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; what it printed holds nothing that a terminal obeys."""

    def printed(*words: str | Path) -> str:
        with pytest.raises(SystemExit) as end:
            main([*map(str, words)])
        assert end.value.code in (0, 1, 2)
        text = "".join(capsys.readouterr())
        obeyed = [c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160]
        assert not obeyed, (words, obeyed)
        return text

    return printed


def hostile(value: Any) -> Any:
    """The value with a stranger's words at the end of every text."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, dict):
        return {key: hostile(inner) for key, inner in value.items()}
    return [hostile(inner) for inner in value] if isinstance(value, list) else value


def write(file: Path, data: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


def test_surfaces_and_machines(run: Run, tmp_path: Path) -> None:
    plain = surface()
    file = write(tmp_path / "surface.json", plain | hostile({"prompts": "p", "command": "c"}))
    for changes in ({}, hostile({"model": "m", "device": "d", "versions": ["v"]}), hostile(plain)):
        write(file, plain | changes)
        run("plan", file, "--allow-dense", "--no-plots")
        run("report", tmp_path, "--format", "md")
    write(file, plain)
    machine = write(tmp_path / "machine.json", {HOSTILE: HOSTILE})
    assert "pwned" in run("plan", file, "--hardware", machine)
    (tmp_path / "lengths").write_text(HOSTILE, encoding="utf-8")
    run("plan", file, "--lengths", tmp_path / "lengths")


def test_schedules(run: Run, tmp_path: Path) -> None:
    plain = to_dict(preset("qwen3-1.7b-0.86"))
    for changes in (
        hostile({"name": "n"}),
        hostile({"model": "m", "family": "f"}),
        hostile({"provenance": [{"key": "target", "text": "t"}]}),
        hostile({"flow": "f"}),
        {HOSTILE: 1},
    ):
        file = write(tmp_path / "schedule.json", plain | changes)
        given = f"--rollout.attention.schedule={file}"
        run("train", "tiny", given, "--dry-run")
        forced = ("--rollout.attention.force=true", "--dry-run")
        run("train", "tiny", given, *forced)
        run("eval", "tiny", "-t", "countdown", *SHORT, "--schedule", file, "--force")
        options = ("--task", "assignments", *SHORT, "--no-plots", "-o", tmp_path / "out")
        run("calibrate", "tiny", *options, "--schedule", file)


def test_configurations(run: Run, tmp_path: Path) -> None:
    tiny = find_config("train", "tiny").read_text(encoding="utf-8")
    study = find_config("study", "tiny").read_text(encoding="utf-8")
    file = tmp_path / "c.toml"
    for text in (
        f"{TOML} = 1\n" + tiny,
        f"[{TOML}]\nx = 1\n" + tiny,
        tiny.replace('name = "tiny"', f"name = {TOML}", 1),
        tiny.replace('"assignments"', TOML),
        "\x1b[2J",
    ):
        file.write_text(text, encoding="utf-8")
        assert "c.toml" in run("train", file, "--dry-run")
    for text in (f"name = {TOML}\n", study.replace('"p05-0.86"', TOML)):
        file.write_text(text, encoding="utf-8")
        assert "c.toml" in run("study", file, "--dry-run")


def test_run_directories(run: Run, tmp_path: Path) -> None:
    folder = demo(tmp_path / "run")
    for file in folder.rglob("*.json"):
        write(file, hostile(json.loads(file.read_text())))
    actions = folder / "train" / "actions.jsonl"
    actions.write_text(
        json.dumps({"step": 1, "kind": HOSTILE, "reason": HOSTILE}) + "\n", encoding="utf-8"
    )
    assert "pwned" in run("report", folder, "--format", "md")
    (tmp_path / "kept").write_text("dear")
    (folder / "report.html").symlink_to(tmp_path / "kept")
    run("report", folder)
    assert (tmp_path / "kept").read_text() == "dear"
    write(folder / "speed.json", {HOSTILE: HOSTILE})
    run("report", folder)
    config = load_config(TrainConfig, ["tiny"])
    save_resolved(config, tmp_path / "again")
    run("replay", tmp_path / "again")
    (tmp_path / "again" / "config.resolved.toml").write_text(f"{TOML} = 1", encoding="utf-8")
    run("replay", tmp_path / "again")


def test_the_folder_of_a_study(run: Run, tmp_path: Path) -> None:
    folder = controlled(tmp_path / "study", {"dense": [0.8], "0.86": [0.7]})
    write(folder / "design.json", hostile(json.loads((folder / "design.json").read_text())))
    run("study", "tiny", f"--out={folder}", "--dry-run")
    run("study", "tiny", f"--out={folder}", "--report")


def test_models(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.load("tiny").source, folder)
    config = json.loads((folder / "config.json").read_text())
    for changes in ({HOSTILE: HOSTILE}, hostile({"model_type": "qwen3"}), {"rope_theta": HOSTILE}):
        write(folder / "config.json", config | changes)
        run("eval", folder, "-t", "countdown", *SHORT)
        run("train", "tiny", f"--model.name={folder}", "--dry-run")


def test_rows_rewards_and_answers(run: Run, tmp_path: Path) -> None:
    row = {"data_source": HOSTILE, "prompt": "countdown 1 2 reach 3", "answer": HOSTILE}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps({HOSTILE: 1}), encoding="utf-8")
    run("eval", "tiny", "--rows", file, "--max-tokens", "4")
    reward = tmp_path / "hostile_reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    raise KeyError(ground_truth)\n",
        encoding="utf-8",
    )
    sys.path.insert(0, str(tmp_path))
    run("eval", "tiny", "--rows", file, "--max-tokens", "4", "--reward", f"{reward}:compute_score")
    sys.path.remove(str(tmp_path))
    (tmp_path / "answer").write_text(f"</think> <answer> {HOSTILE} </answer>", encoding="utf-8")
    run("puzzle", "countdown", "--judge", tmp_path / "answer")
