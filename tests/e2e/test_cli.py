"""The command line as a user meets it: a small model of our own, no network."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import byte_model, passed, refused, run

import sparrow
from sparrow.schema.schedule import Note, Schedule
from sparrow.sparse import preset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("models") / "bytes")


SHORT = ("--sampling.max_tokens=8", "--sampling.ignore_eos=true", "--sampling.seed=4")


def test_generates_and_leaves_a_run_directory(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = passed("generate", "-m", folder, "hello", *SHORT, "--sampling.n=2", "--out", out)
    assert "attention: dense" in done.stderr
    settings = tomllib.loads((out / "config.resolved.toml").read_text())
    assert settings["sampling"]["max_tokens"] == 8
    assert settings["model"]["name"] == str(folder)
    lines = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
    assert [len(line["token_ids"]) for line in lines] == [8, 8]
    assert lines[0]["finish_reason"] == "length"
    again = run("generate", "-m", folder, "hello", *SHORT, "--out", out)
    assert again.code == 2
    assert "completions.jsonl" in again.stderr


def test_digests_are_checked_and_said(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    words = ("generate", "-m", copy, "hello", *SHORT)
    assert "(verified)" in run(*words).stderr
    (copy / "tokenizer.json").write_text("{}")
    assert "tokenizer.json does not match its digest in SHA256SUMS" in refused(*words)
    (copy / "SHA256SUMS").unlink()
    assert "tokenizer.json" in refused(*words)
    shutil.copy(folder / "tokenizer.json", copy)
    assert "(unverified)" in run(*words).stderr


def test_the_same_seed_gives_the_same_json_and_a_budget_is_said(folder: Path) -> None:
    words = ("generate", "-m", folder, "x" * 100, "you", *SHORT, "--budget", "48", "--json")
    first, second = (run(*words) for _ in range(2))
    assert first.code == 0, first.stderr
    assert first.stdout == second.stdout
    answers = [json.loads(line) for line in first.stdout.splitlines()]
    assert len(answers) == 2
    for said in (first.stderr, answers[0]["attention"]):
        assert "budget 48 tokens" in said


def test_a_schedule_of_another_family_must_be_forced(folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "made.json", tmp_path / "run"
    Schedule.fixed(96, page=32, family="llama").save(file)
    words = ("generate", "-m", folder, "x" * 100, *SHORT, f"--attention.schedule={file}")
    said = refused(*words, "--out", out)
    assert "family 'llama'" in said
    assert "page 32" in said
    assert "--attention.force=true" in said
    assert not out.exists()
    forced = run(*words, "--attention.force=true", "--json")
    assert forced.code == 0, forced.stderr
    for said in (forced.stderr, json.loads(forced.stdout)["attention"]):
        assert "FORCED, made for family llama, page 32" in " ".join(said.split())  # header wraps


def test_a_schedule_runs_with_its_own_flow(folder: Path, tmp_path: Path) -> None:
    """By its name, by what its provenance says, or as told."""
    words = ("generate", "-m", folder, "x" * 100, *SHORT, "--json")
    source = (Note(key="flow", text="fine_means(4), program ab12"),)
    for made in (
        Schedule.fixed(64, flow="quest"),
        Schedule.fixed(64, flow="fine-means-4", provenance=source),
    ):
        made.save(tmp_path / "made.json")
        done = passed(*words, f"--attention.schedule={tmp_path / 'made.json'}")
        assert made.flow in json.loads(done.stdout)["attention"]
    Schedule.fixed(64, flow="fine-means-4").save(tmp_path / "made.json")
    named = (*words, f"--attention.schedule={tmp_path / 'made.json'}")
    said = refused(*named)
    assert "fine-means-4" in said
    assert "attention.flow" in said
    done = passed(*named, "--attention.flow=fine_means(4)")


def test_presets_are_listed_and_shown(tmp_path: Path) -> None:
    listed = run("presets").stdout
    assert listed.count("qwen3-") == 20
    assert "family" in listed
    shown = tmp_path / "shown.json"
    shown.write_text(run("presets", "qwen3-4b-0.86").stdout)
    assert Schedule.load(shown) == preset("qwen3-4b-0.86")


def test_prompts_come_from_standard_input_and_settings_from_files(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(f'[model]\nname = "{folder}"\n[sampling]\nmax_tokens = 3\n')
    (tmp_path / "b.toml").write_text("[sampling]\nmax_tokens = 5\nignore_eos = true\n")
    done = passed(
        "generate", "-c", tmp_path / "a.toml", "-c", tmp_path / "b.toml", "--json", stdin="hello\n"
    )
    assert len(json.loads(done.stdout)["token_ids"]) == 5


def test_mistakes_are_one_message() -> None:
    for words, name in (
        (("generate", "hi", "-m", "no-such-model"), "no-such-model"),
        (("generate", "hi", "--temperature", "hot"), "--temperature hot"),
        (("generate", "hi", "-c", "missing.toml"), "missing.toml"),
        (("generate", "hi", "--attention.force=true"), "attention.force"),
        (("generate", "hi", "-t", "0.5"), "-t"),
        (("generate", ""), "prompts"),
        (("generate",), "prompts"),
        (("fetch", "gpt-9"), "gpt-9"),
        (("fetch", "tiny", "--wheel", "x.whl"), "wheel"),
        (("evaluate", "tiny"), "evaluate"),
        (("flow", "chek"), "did you mean check?"),
        (("calibrate", "-c", "tiny"), "a file"),
        (("plan", "surface.json", "--json=false"), "--json=false"),
        (("flow", "texts", "/proc/none"), "option '/proc/none'"),
    ):
        assert name in refused(*words), words


def test_limits_of_the_model_are_named_and_leave_nothing(folder: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    wrong = {"--sampling.max_tokens=600": "the context is 512"}
    if not torch.cuda.is_available():
        wrong["--model.device=cuda"] = "no GPU"
    for word, said in wrong.items():
        assert said in refused("generate", "-m", folder, "hi", word)
    refused("generate", "hi", "-m", "no-such-model", *out)
    assert not (tmp_path / "run").exists()


def test_the_program_itself() -> None:
    """As a process: arguments, standard input, exit codes, a reader that goes away."""
    command = [sys.executable, "-m", "sparrow"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    assert subprocess.run([*command, "--version"], **options).stdout.strip() == sparrow.__version__
    mistake = subprocess.run([*command, "generate", os.fsdecode(b"\xff")], **options)
    assert mistake.returncode == 2
    assert "UTF-8" in mistake.stderr
    assert "Traceback" not in mistake.stderr
    reader = f"{sys.executable} -m sparrow presets qwen3-4b-0.86 | true"
    assert "Traceback" not in subprocess.run(["bash", "-c", reader], **options).stderr
