"""`sparrow distill`: it helps on held-out prompts, resumes, and its adapter fits one model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import cli
from support.training import model_folder

import sparrow
from sparrow.calibration.replay import Prompt
from sparrow.dataflow import distill as module
from sparrow.models.actor import load_actor
from sparrow.models.lora import Adapter
from sparrow.schema.distill import DistillResult

GIVEN = {"budget": 48, "prompts": 12, "held_out": 4, "steps": 12, "check_every": 4, "batch": 4}
GIVEN |= {"rank": 4, "rate": 1e-2, "bin": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file, rng = tmp_path_factory.mktemp("given") / "ids.jsonl", np.random.default_rng(0)
    rows = [{"ids": rng.integers(4, 60, 150).tolist(), "start": 20} for _ in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def distilled(model: Path, sequences: Path, out: Path, **changes: Any) -> DistillResult:
    return sparrow.distill(str(model), ids=sequences, device="cpu", out=out, **GIVEN | changes)


@pytest.fixture(scope="module")
def done(
    model: Path, sequences: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, DistillResult]:
    out = tmp_path_factory.mktemp("done") / "out"
    return out, distilled(model, sequences, out, report_budget=[64], draft_tokens=2)


def whole(cells: Any) -> Any:
    return cells[-1]  # of all lengths


def test_acceptance_rises_on_held_out_sequences(done: tuple[Path, DistillResult]) -> None:
    out, result = done
    assert (result.mode, result.trained_on, result.held_out) == ("forced", 8, 4)
    assert [look.step for look in result.looks] == [0, 4, 8, 12]
    trained, other = result.arms
    assert (trained.budget, other.budget) == (48, 64)
    assert result.looks[-1].loss < result.looks[1].loss
    assert len(trained.drafts_before) == len(trained.drafts_after) == 1
    assert DistillResult.load(out / module.RESULT) == result
    best = next(look for look in result.looks if look.step == result.best)
    assert best.p05 == max(look.p05 for look in result.looks) > result.looks[0].p05
    assert whole(trained.after).p05 == pytest.approx(best.p05, abs=1e-6)


def test_the_best_adapter_is_kept(model: Path, sequences: Path, tmp_path: Path) -> None:
    """With a rate that makes it worse that is the first, which changes nothing; then on."""
    few = {"check_every": 1, "patience": 2, "rate": 0.5}
    result = distilled(model, sequences, tmp_path / "out", **few)
    assert result.best == 0
    assert len(result.looks) == 3
    (arm,) = result.arms
    assert arm.after == arm.before
    loaded = sparrow.load(str(model), device="cpu")
    adapter = load_actor(tmp_path / "out", loaded).adapter
    assert not any(pair.b_ER.any() for pair in adapter.pairs.values())
    more = distilled(model, sequences, tmp_path / "out", **few | {"patience": 3})
    assert len(more.looks) == 4


def test_short_answers_are_left_out(model: Path, tmp_path: Path) -> None:
    file, rng = tmp_path / "ids.jsonl", np.random.default_rng(0)
    rows = [{"ids": rng.integers(4, 60, 90).tolist(), "start": 20} for _ in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"prompts": 256, "held_out": None, "steps": 1, "check_every": 1}
    assert distilled(model, file, tmp_path / "six", **own).held_out == 1
    short, long = (Prompt(number=0, name="", ids=(1,) * n, start=2) for n in (3, 4))
    assert [module._is_long(one) for one in (short, long)] == [False, True]
    assert module._sample(long).learnt == 2


def test_one_that_was_stopped_goes_on_bit_for_bit(
    model: Path, sequences: Path, done: tuple[Path, DistillResult], tmp_path: Path, monkeypatch
) -> None:
    inner, looks = module.Distillation._look, []

    def look(self: Any, step: int, *rest: Any) -> Any:
        if step == 12 and not looks:
            looks.append(step)
            raise KeyboardInterrupt
        return inner(self, step, *rest)

    monkeypatch.setattr(module.Distillation, "_look", look)
    with pytest.raises(KeyboardInterrupt):
        distilled(model, sequences, tmp_path / "out")
    result = distilled(model, sequences, tmp_path / "out")
    assert looks == [12]
    assert result.looks == done[1].looks
    weights = "actor/adapter_model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (done[0] / weights).read_bytes()
    with pytest.raises(ValueError, match="another configuration"):
        distilled(model, sequences, tmp_path / "out", rate=1e-3)


def test_under_dense_attention_there_is_nothing_to_learn(
    model: Path, sequences: Path, tmp_path: Path
) -> None:
    result = distilled(model, sequences, tmp_path / "out", attention="dense")
    assert max(look.loss or 0 for look in result.looks) < 1e-3
    (arm,) = result.arms
    assert abs(whole(arm.after).mean - whole(arm.before).mean) < 0.005


def test_prompts_are_answered_by_the_sparse_actor(model: Path, tmp_path: Path) -> None:
    """And held-out ones again, with the adapter, by `calibrate` too."""
    task = {"task": "assignments", "length": 100, "max_tokens": 100, "device": "cpu"}
    out = tmp_path / "out"
    result = sparrow.distill(str(model), **task, samples=2, out=out, **GIVEN | {"steps": 4})
    assert (result.mode, result.trained_on, result.held_out) == ("generated", 16, 4)
    kept = {"budget": [48], "prompts": 4, "layer_groups": 0, "by_layer": False, "skip": 8}
    surface = sparrow.calibrate(str(model), **task, **kept, adapter=out, out=tmp_path / "cal")
    plain = sparrow.calibrate(str(model), **task, **kept, out=tmp_path / "plain")
    assert surface.fingerprint.startswith(f"{plain.fingerprint}+")
    assert surface.cells != plain.cells
    assert surface.floor == plain.floor  # dense attention has no adapter
    asked = {"task": "assignments", "length": 100, "prompts": 2, "max_tokens": 80, "device": "cpu"}
    with_it = sparrow.evaluate(str(model), **asked, budget=48, adapter=out)
    without = sparrow.evaluate(str(model), **asked, budget=48)
    assert "adapter" in with_it.attention
    assert "adapter" not in without.attention
    assert with_it.cells != without.cells
    with pytest.raises(ValueError, match="adapter"):
        sparrow.evaluate(str(model), **asked, adapter=out)
    other = model_folder(tmp_path / "other", size=5.0)
    with pytest.raises(ValueError, match="other weights"):
        sparrow.calibrate(str(other), **task, **kept, adapter=out, out=tmp_path / "cal")


def test_refreshed_sequences_are_those_of_the_actor_with_the_adapter(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped behind a refresh it goes on bit for bit."""
    given = {"task": "assignments", "length": 100, "max_tokens": 80, "device": "cpu"}
    given |= GIVEN | {"steps": 8, "check_every": 2, "refresh": 4, "patience": 9}
    inner, seen = module.Distillation._step, []

    def step(self: Any, distiller: Any, training: Any, number: int) -> float:
        seen.append((number, [one.ids.tolist() for one in training]))
        if len(seen) == 16:
            raise KeyboardInterrupt
        return inner(self, distiller, training, number)

    monkeypatch.setattr(module.Distillation, "_step", step)
    whole = sparrow.distill(str(model), **given, out=tmp_path / "whole")
    sequences = [training for _, training in seen]
    assert sequences == [sequences[0]] * 4 + [sequences[4]] * 4
    assert sequences[0] != sequences[4]
    assert len(sequences[0]) == len(sequences[4]) == 8
    with pytest.raises(KeyboardInterrupt):
        sparrow.distill(str(model), **given, out=tmp_path / "parts")
    parts = sparrow.distill(str(model), **given, out=tmp_path / "parts")
    assert [number for number, _ in seen[8:]] == [*range(8), 6, 7]
    assert seen[-1] == seen[7]
    assert parts.looks == whole.looks


def test_the_command_line(model: Path, sequences: Path, tmp_path: Path) -> None:
    words = ["--ids", sequences, "--budget", "48", "-n", "12", "--steps", "2", "--device", "cpu"]
    said = cli.run("distill", model, *words, "--rank", "2", "-o", tmp_path / "out")
    assert said.code == 0, said.said
    assert (tmp_path / "out" / "actor" / "adapter_config.json").is_file()
    bad = {
        "budget": ["--ids", sequences],
        "held_out": [*words, "--held-out", "12"],
        "refresh": [*words, "--refresh", "20"],
        "one of task, rows, texts, ids": ["--budget", "48"],
    }
    for reason, given in bad.items():
        refused = cli.run("distill", model, *given, "-o", tmp_path / "bad")
        assert refused.code == 2
        assert reason in refused.said


def test_a_loss_that_is_not_finite_ends_it(
    model: Path, sequences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Adapter.random

    def broken(*given: Any, **settings: Any) -> Adapter:
        made = inner(*given, **settings)
        next(iter(made.tensors().values()))[0, 0] = float("nan")
        return made

    monkeypatch.setattr(Adapter, "random", broken)
    with pytest.raises(ValueError, match=r"rate|finite"):
        distilled(model, sequences, tmp_path / "out")
