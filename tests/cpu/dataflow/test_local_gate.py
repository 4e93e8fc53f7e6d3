"""The tail gate in the loop: a tail that drops, what is done about it, and what is written down."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import cli
from support.training import SPARSE, config, lines, metrics, model_folder, trained

from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.local.ledger import Ledger
from sparrow.dataflow.local.messages import GateStop
from sparrow.schema.loading import save_resolved
from sparrow.training.learner import Learner, SampleScores

ROLLOUT = {"attention": SPARSE, "max_tokens": 60, "samples": 3}
DENSE = {**ROLLOUT, "attention": {}}
WATCH = {"target": 0.99, "bin": 64, "window": 1, "least": 20, "raises": 1}
WATCH |= {"factor": 1.1, "patience": 1}


@pytest.fixture(scope="module")
def straying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights so large that a budget of 48 strays far from dense."""
    return model_folder(tmp_path_factory.mktemp("made") / "model", size=24)


def drop(monkeypatch: pytest.MonkeyPatch, to: float, when: Callable[[int], bool]) -> None:
    """Of every twelfth token acceptance falls and the policy is sure, at some readings."""
    inner = Learner.score
    calls = iter(range(1000))

    def score(self: Learner, *given: Any, **settings: Any) -> list[SampleScores]:
        found, dropped = inner(self, *given, **settings), when(next(calls))
        return [_with_tail(one, to) if dropped and one.alpha is not None else one for one in found]

    monkeypatch.setattr(Learner, "score", score)


def _with_tail(one: SampleScores, to: float) -> SampleScores:
    assert one.alpha is not None
    places = np.arange(len(one.alpha)) % 12 == 5
    alpha, entropy = (
        np.where(places, np.float32(x), y) for x, y in ((to, one.alpha), (0, one.entropy))
    )
    return one._replace(alpha=alpha, entropy=entropy)


def test_act_raises_then_runs_dense_and_the_tail_recovers(straying: Path, tmp_path: Path) -> None:
    """From 64 tokens on the budget goes up once, by a page, and then the bin keeps everything."""
    sections = {"rollout": ROLLOUT, "gate": {**WATCH, "mode": "act"}, "optimiser": {"rate": 1e-5}}
    run = trained(config(straying, tmp_path / "run", **sections, run={"steps": 5}))
    actions, found = lines(tmp_path / "run" / "actions.jsonl"), metrics(tmp_path / "run")
    long = [action for action in actions if action["start"] == 64]
    assert [action["kind"] for action in long] == ["raise", "dense"]
    assert long[0]["after"] == long[0]["before"] + 16
    assert "stop" not in [action["kind"] for action in actions]
    for action in actions:
        assert action["p05"] < 0.99
        assert action["after"] > action["before"]
    last = max(action["step"] for action in actions)
    assert last < 4, "it came to rest"
    assert found[0]["sparse/accept_p05"] < 0.95
    assert found[-1]["sparse/accept_p05"] > 0.999
    assert found[-1]["sparse/gate_violation_frac"] == 0
    assert found[-1]["sparse/kv_budget"] > found[0]["sparse/kv_budget"]
    assert found[-1]["sparse/density"] > found[0]["sparse/density"]
    assert run.gate.schedule is not None
    assert run.gate.schedule.name == f"fixed-48+gate{len(actions)}"


def test_warn_tells_and_off_does_not_look(straying: Path, tmp_path: Path) -> None:
    for mode, kinds in (("warn", {"warn"}), ("off", set[str]())):
        folder, gate = tmp_path / mode, {**WATCH, "mode": mode}
        run = trained(config(straying, folder, rollout=ROLLOUT, gate=gate, run={"steps": 1}))
        (found,) = metrics(folder)
        assert {action["kind"] for action in lines(folder / "actions.jsonl")} == kinds
        assert run.gate.schedule is not None
        assert set(run.gate.schedule.budgets.tolist()) == {48}
        assert ("sparse/accept_p05" in found) == (mode == "warn")
        assert 0.5 < found["sparse/accept_estimate"] < 1
    judged = {n: v for n, v in metrics(tmp_path / "warn")[0].items() if "/bin_" in n}
    worst = min(v for n, v in judged.items() if n.startswith("sparse/accept_p05/"))
    assert metrics(tmp_path / "warn")[0]["sparse/accept_p05_min"] == worst
    for figure in ("p01", "p05_low", "p05_high", "p50", "mean", "estimate"):
        assert any(name.startswith(f"sparse/accept_{figure}/bin_") for name in judged), figure


def test_the_command_ends_with_3_and_goes_on_when_the_gate_is_told_otherwise(
    straying: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(monkeypatch, 0.3, lambda call: call < 2)
    rollout, gate = {**DENSE, "episode": "support.toys:episode"}, {**WATCH, "mode": "act"}
    chosen = config(straying, tmp_path / "run", rollout=rollout, gate=gate, run={"steps": 2})
    file = save_resolved(chosen, tmp_path / "own")
    ended = cli.run("train", file)
    assert ended.code == 3, ended.said
    told = ended.said
    assert "the gate stopped the run: p05 of acceptance at lengths" in told
    assert "after 1 steps" in told
    (action, *_) = lines(tmp_path / "run" / "actions.jsonl")
    assert (action["step"], action["kind"]) == (0, "stop")
    assert "gate.mode" in cli.refused("train", file), "not under the same gate"
    again = cli.run("train", file, "--gate.mode=warn")
    assert again.code == 0, again.said
    told = again.said
    assert "gate.mode act -> warn" in told
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1]
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_a_stop_of_an_older_version_still_holds(model: Path, tmp_path: Path) -> None:
    """Its settings lack those that came later, at which they are at their defaults."""
    chosen = config(model, tmp_path / "run", gate=WATCH)
    ledger = Ledger(config=chosen, identity="", checkpoints=Checkpoints(tmp_path, 1))
    older = chosen.gate.model_dump_json(exclude={"hard_misses"})
    ledger.stopped = {"reason": "p05", "gate": older}
    with pytest.raises(ValueError, match="p05"):
        ledger.refuse_stopped()
    ledger.config = config(model, tmp_path / "run", gate={**WATCH, "hard_misses": 5.0})
    ledger.refuse_stopped()


def test_a_run_whose_updates_go_too_far_stops(model: Path, tmp_path: Path) -> None:
    gate = {"mode": "act", "target": 0.01, "max_kl": 1e-9, "patience": 2}
    chosen = config(model, tmp_path / "run", gate=gate)
    with pytest.raises(GateStop, match="KL"):
        trained(chosen)
    (action,) = lines(tmp_path / "run" / "actions.jsonl")
    found = metrics(tmp_path / "run")
    assert (action["step"], action["kind"], action["metric"]) == (1, "stop", "kl")
    assert action["value"] == found[1]["actor/kl_new_old"] > 1e-9
    with pytest.raises(ValueError, match="the gate stopped this run"):
        trained(chosen)
    trained(config(model, tmp_path / "run", gate=gate | {"max_kl": 1e3}))
    assert len(metrics(tmp_path / "run")) == 4
    with pytest.raises(ValueError, match="kl_sample"):
        config(model, tmp_path / "run", gate=gate, batch={"kl_sample": 0})


def test_hard_misses_raise_budgets_in_a_run(
    straying: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the target is met and the bound is not."""
    drop(monkeypatch, 0.3, lambda call: True)
    gate = {**WATCH, "target": 0.001, "hard_misses": 0.0, "mode": "act"}
    trained(config(straying, tmp_path / "run", rollout=ROLLOUT, gate=gate, run={"steps": 1}))
    found = metrics(tmp_path / "run")
    assert found[0]["sparse/hard_misses_max"] > 0
    assert found[0]["sparse/hard_misses"] == pytest.approx(found[0]["sparse/step/hard_misses"])
    actions = lines(tmp_path / "run" / "actions.jsonl")
    assert actions
    assert all(action["hard_misses"]["value"] > 0 for action in actions)
