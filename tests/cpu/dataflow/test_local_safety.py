"""What must not pass unnoticed: a policy without numbers, other budgets, a run that stopped."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")

from support import cli
from support.training import config, lines, metrics, model_folder, noisy, trained

from sparrow.dataflow.episodes import Actor, single_turn
from sparrow.dataflow.local.loop import step, train
from sparrow.dataflow.local.opening import Parts, close_run, open_run
from sparrow.dataflow.local.run import Diverged, EpisodeFailed, GateStop
from sparrow.dataflow.place import schedule_notes
from sparrow.schema.episode import Trajectory
from sparrow.schema.errors import ConfigError
from sparrow.schema.loading import load_config, save_resolved
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import TrainConfig
from sparrow.tasks.base import RIGHT, Example, Verdict
from sparrow.train.learner import Learner, Read

WATCH = {"mode": "act", "sample": 8, "least": 10, "prompts": 2, "patience": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("made") / "model")


def spoil(monkeypatch: pytest.MonkeyPatch, since: int, **parts: float) -> None:
    """From a call of `read` on, every token has these values, where it has any."""
    inner, calls = Learner.read, []

    def read(self: Learner, *given: Any, **named: Any) -> Any:
        found = inner(self, *given, **named)
        calls.append(1)
        if len(calls) > since:
            found = [one._replace(**_filled(one, parts)) for one in found]
        return found

    monkeypatch.setattr(Learner, "read", read)


def _filled(one: Read, parts: dict[str, float]) -> dict[str, Any]:
    known = {name: getattr(one, name) for name in parts}
    return {
        name: None if values is None else np.full_like(values, parts[name])
        for name, values in known.items()
    }


def test_a_dense_pass_that_gives_no_numbers_is_skipped_counted_and_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 1, logprob=float("nan"))
    chosen = config(model, tmp_path / "run", run={"steps": 9, "skips": 2, "save_every": 100})
    run = open_run(chosen, parts=Parts(judge=noisy))
    with pytest.raises(Diverged, match="2 steps in a row"):
        train(run)
    close_run(run)
    assert run.ledger.checkpoints.steps() == [3]
    found = metrics(tmp_path / "run")
    assert [line["actor/skipped"] for line in found] == [0, 1, 1]
    assert found[-1]["faults/skipped_updates"] == 2
    assert found[-1]["actor/pg_loss"] is None


def test_acceptance_that_is_no_number_is_not_taken_for_a_tail(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 0, alpha=float("nan"))
    trained(config(model, tmp_path / "run", gate=WATCH, run={"steps": 1, "skips": 5}))
    assert metrics(tmp_path / "run")[0]["actor/skipped"] == 1
    assert not lines(tmp_path / "run" / "actions.jsonl")


async def right(example: Example, text: str) -> Verdict:
    return RIGHT


def test_the_greedy_baseline_is_shaped_as_the_answers_are(model: Path, tmp_path: Path) -> None:
    """All are right, and every token costs an eighth: 1 - 1/8 at most, and 1 only unshaped."""
    algorithm = {"name": "remax", "overlong": 8}
    chosen = config(model, tmp_path / "run", algorithm=algorithm, rollout={"max_tokens": 8})
    run = open_run(chosen, parts=Parts(judge=right))
    try:
        groups = run.rollout.play(run.request()).groups
    finally:
        close_run(run)
    assert {group.baseline for group in groups} <= {1 - tokens / 8 for tokens in range(1, 9)}
    for group, sample in zip(groups, run.learner.credit(groups)[::4], strict=True):
        tokens = int((group.trajectories[0].weight_version >= 0).sum())
        assert sample.advantage == pytest.approx(1 - tokens / 8 - group.baseline)


def test_the_gate_sees_groups_that_dynamic_sampling_leaves_out(model: Path, tmp_path: Path) -> None:
    chosen = config(
        model, tmp_path / "run", algorithm={"name": "dapo", "refills": 2}, run={"steps": 1}
    )
    trained(chosen, judge=right)
    (found,) = metrics(tmp_path / "run")
    assert (found["data/groups"], found["actor/updates"]) == (0, 0)
    assert found["sparse/accept_p05"] > 0.5


async def without_acc(actor: Actor, example: Example) -> list[Trajectory]:
    return [one.replace(acc=None) for one in await single_turn(actor, example)]


async def misnamed(actor: Actor, example: Example) -> list[Trajectory]:
    return [one.replace(prompt_id="other") for one in await single_turn(actor, example)]


@pytest.mark.parametrize(
    ("episode", "told"), [(without_acc, "gave no acc"), (misnamed, "Group.trajectories")]
)
def test_episodes_that_give_too_little_fail(
    model: Path, tmp_path: Path, episode: Any, told: str
) -> None:
    with pytest.raises(EpisodeFailed, match=told):
        trained(config(model, tmp_path / "run", algorithm={"name": "dapo"}), episode=episode)


def test_a_schedule_that_was_edited_is_another_run(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"

    def save(budgets: list[int]) -> None:
        lengths = np.array([0, 40, 60], np.int32)
        Schedule(name="own", lengths=lengths, budgets=np.array(budgets, np.int32)).save(file)

    def chosen() -> TrainConfig:
        attention = {"schedule": str(file)}
        return config(model, tmp_path / "run", rollout={"attention": attention}, run={"steps": 9})

    save([48, 64, 96])
    run = open_run(chosen(), parts=Parts(judge=noisy))
    step(run)
    run.save()
    close_run(run)
    save([48, 96, 96])
    with pytest.raises(ValueError, match="configuration"):
        open_run(chosen(), parts=Parts(judge=noisy))


def test_another_tokenizer_is_another_run(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "model")
    chosen = config(other, tmp_path / "run", run={"steps": 1, "save_every": 1})
    trained(chosen)
    shutil.rmtree(tmp_path / "run" / "model")
    trained(chosen)
    shutil.rmtree(tmp_path / "run" / "model")
    tokenizer = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "eos_token": "<pad>"}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        trained(chosen)
    (other / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match="another configuration"):
        trained(chosen)


def test_opening_a_run_removes_what_killed_processes_were_writing(
    model: Path, tmp_path: Path
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder, files = tmp_path / "run", {f".{name}.{ended.pid}.unfinished" for name in ("model", "x")}
    (folder / f".model.{ended.pid}.unfinished").mkdir(parents=True)
    (folder / f".model.{ended.pid}.unfinished" / "model.safetensors").write_text("a part")
    (folder / f".x.{ended.pid}.unfinished").write_text("a part")
    close_run(open_run(config(model, folder)))
    assert not files & {path.name for path in folder.iterdir()}


def test_the_header_says_how_the_model_is_known(model: Path, tmp_path: Path) -> None:
    run = open_run(config(model, tmp_path / "run"))
    try:
        assert any(f"{model} (verified)" in line for line in run.header())
    finally:
        close_run(run)


def test_a_schedule_that_was_moved_is_the_same_run(model: Path, tmp_path: Path) -> None:
    """As those of a study's cells are, where its folder is."""
    for name in ("here.json", "there.json"):
        lengths, budgets = np.array([0, 40], np.int32), np.array([48, 64], np.int32)
        Schedule(name="own", lengths=lengths, budgets=budgets).save(tmp_path / name)
        attention = {"schedule": str(tmp_path / name)}
        chosen = config(model, tmp_path / "run", rollout={"attention": attention}, run={"steps": 9})
        run = open_run(chosen, parts=Parts(judge=noisy))
        assert run.step == (name == "there.json")
        step(run)
        run.save()
        close_run(run)


def test_changes_at_a_resume_stay_noted(model: Path, tmp_path: Path) -> None:
    """Also where the run goes on twice from one checkpoint."""
    for number, rate in enumerate((1e-3, 2e-3, 2e-3)):
        chosen = config(model, tmp_path / "run", optimiser={"rate": rate}, run={"save_every": 100})
        run = open_run(chosen, parts=Parts(judge=noisy))
        step(run)
        if number == 0:
            run.save()
        close_run(run)
    (noted,) = [
        one for one in lines(tmp_path / "run" / "actions.jsonl") if one["kind"] == "changed"
    ]
    assert noted["reason"] == "optimiser.rate 0.001 -> 0.002"


@pytest.mark.parametrize("save_every", [1, 100])
def test_a_run_that_the_gate_stopped_goes_on_only_with_another_gate(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: int
) -> None:
    spoil(monkeypatch, 0, alpha=0.0)
    dense = {"attention": {"dense": True}}

    def chosen(**gate: Any) -> TrainConfig:
        return config(
            model,
            tmp_path / "run",
            rollout=dense,
            gate={**WATCH, "window": 1, **gate},
            run={"save_every": save_every},
        )

    run = open_run(chosen(), parts=Parts(judge=noisy))
    with pytest.raises(GateStop):
        train(run)
    close_run(run)
    with pytest.raises(ValueError, match="the gate stopped this run: p05 of acceptance"):
        open_run(chosen(), parts=Parts(judge=noisy))
    again = open_run(chosen(mode="warn"), parts=Parts(judge=noisy))
    assert again.step == run.step
    assert not again.ledger.stopped
    close_run(again)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data.task=graph", "--data.first=10"], "rows apart from those of training, 10"),
        (["--data.task=graph", "--data.first=0", "--data.rows=5"], "training, 0 to 4"),
        (["--data.file=rows.jsonl"], "validation.file"),
    ],
)
def test_rows_that_are_trained_on_are_no_validation(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(TrainConfig, [], ["--model.name=tiny", "--validation.every=1", *words])
    apart = ["--data.task=graph", "--data.first=0", "--data.rows=5", "--validation.first=5"]
    load_config(TrainConfig, [], ["--model.name=tiny", "--validation.every=1", *apart])


def test_the_worst_bin_is_told(model: Path, tmp_path: Path) -> None:
    trained(config(model, tmp_path / "run", gate={**WATCH, "mode": "warn"}, run={"steps": 2}))
    found = metrics(tmp_path / "run")[-1]
    bins = [value for name, value in found.items() if name.startswith("sparse/accept_p05/bin_")]
    assert found["sparse/accept_p05_min"] == min(bins)
    for figure in ("p01", "p05_low", "p05_high", "p50", "mean", "estimate"):
        assert any(name.startswith(f"sparse/accept_{figure}/bin_") for name in found), figure
    assert json.dumps(found)


def test_fewer_steps_than_were_taken_are_refused(model: Path, tmp_path: Path) -> None:
    run = open_run(config(model, tmp_path / "run"), parts=Parts(judge=noisy))
    step(run), step(run)
    run.save()
    close_run(run)
    with pytest.raises(ValueError, match="has taken 2 steps"):
        open_run(config(model, tmp_path / "run", run={"steps": 1}), parts=Parts(judge=noisy))


def test_a_gap_in_the_metrics_is_told_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    chosen, told = config(model, tmp_path / "run"), list[str]()
    run = open_run(chosen, parts=Parts(judge=noisy))
    step(run), step(run)
    run.save()
    close_run(run)
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(file.read_text(encoding="utf-8").splitlines(keepends=True)[0], encoding="utf-8")
    again = open_run(chosen, parts=Parts(judge=noisy), report=told.append)
    close_run(again)
    assert again.step == 2
    assert any("metrics.jsonl lacks 1 steps before that, 1 first" in line for line in told)


def test_a_revision_is_no_part_of_a_models_name() -> None:
    schedule = Schedule.fixed(64).replace(model="Qwen3-0.6B")
    assert not schedule_notes(schedule, "Qwen/Qwen3-0.6B@main", 1000)
    assert schedule_notes(schedule, "Qwen/Qwen3-1.7B@main", 1000)


def test_what_a_schedule_may_not_be_is_said() -> None:
    lengths = np.zeros(1, np.int32)
    made = Schedule(name="s", lengths=lengths, budgets=np.array([512], np.int32), model="small")
    measured, never = schedule_notes(made, "tiny", 300)
    assert "was measured on small, and this is tiny" in measured
    assert "never sparse" in never
    assert schedule_notes(made, "small", 600) == []
    assert schedule_notes(None, "tiny", 600) == []


def test_words_of_the_command_that_cannot_be(model: Path, tmp_path: Path) -> None:
    file = save_resolved(config(model, tmp_path / "run"), tmp_path / "own")
    assert "--dry-run" in cli.refused("train", file, "--json")
    for word, told in (("--data.task=chess", "no task"), ("--rollout.episode=no:way", "imported")):
        assert told in cli.refused("train", file, "--dry-run", word)
    small = cli.run("train", file, "--dry-run", "--rollout.kv_gib=1e-6")
    assert small.code == 1, small.said


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (None, "position", "text"),
        (None, "step", 0),
        (None, "position", 10**400),
        (None, "stopped", {"reason": 1}),
        (None, "stopped", 1),
        (None, "counts", {"x": None}),
        ("gate", "step", None),
        ("gate", "watches", [1]),
        ("learner", "taken", "many"),
        ("learner", "weights", {}),
    ],
)
def test_a_state_of_strangers_is_refused(
    model: Path, tmp_path: Path, section: str | None, key: str, value: Any
) -> None:
    run = open_run(config(model, tmp_path / "run"))
    try:
        state = run.state() | {"step": 1}
        (state if section is None else state[section])[key] = value
        run.ledger.checkpoints.save(1, state, run.ledger.identity)
        with pytest.raises(ValueError, match="is no state of this run"):
            run.load_checkpoint(1)
    finally:
        close_run(run)


def test_a_run_that_was_stopped_before_its_first_step_goes_on(model: Path, tmp_path: Path) -> None:
    run = open_run(config(model, tmp_path / "run"))
    try:
        run.save()
        before = run.state()["gate"]
        run.load_checkpoint(0)
        assert (run.step, run.state()["gate"]) == (0, before)
    finally:
        close_run(run)
