"""Runs of several policies that end early: by a signal, a gate, a loss that is not finite."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.teams import LORA, team, timeless, trained, weights
from support.training import far_adapter, metrics, model_folder, noisy

from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.local.loop import open_training, train
from sparrow.dataflow.local.messages import Diverged, GateStop, NoCallbacks
from sparrow.dataflow.stopping import GracefulShutdown, Stopped
from sparrow.dataflow.team.run import TeamRun

Json = dict[str, Any]


class StopsAt(NoCallbacks):
    """Asks the run to stop when a phase of it begins."""

    def __init__(self, phase: str) -> None:
        self.stopping, self._phase = GracefulShutdown(), phase

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        self.stopping.requested |= name == self._phase


@pytest.mark.parametrize("phase", ["rollout", "old log-probs", "update"])
def test_a_run_that_is_asked_to_stop_ends_where_nothing_is_learnt_twice(
    phase: str, model: Path, tmp_path: Path
) -> None:
    stops, whole = StopsAt(phase), trained(team(model, tmp_path / "whole", LORA))
    chosen = team(model, tmp_path / "parts", LORA)
    parts: Json = {"judge": noisy, "stopping": stops.stopping, "callbacks": stops}
    with open_training(chosen, **parts) as run, pytest.raises(Stopped):
        train(run)
    again = trained(chosen)
    for name in LORA:
        expected = weights(whole, name)
        assert all(value.equal(expected[key]) for key, value in weights(again, name).items())
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")


# What may change when a run goes on.


def test_a_run_that_the_gate_of_a_policy_stopped_goes_on_under_other_settings(
    model: Path, tmp_path: Path
) -> None:
    """Also where the policy has a gate of its own, or gets one then."""
    stops = {"max_kl": 1e-12, "patience": 1, "mode": "act", "sample": 4}
    policies = {"solver": {}, "checker": {"gate": stops}}
    chosen = team(model, tmp_path / "run", policies, batch={"kl_sample": 2})
    for _ in range(2):  # and it says so again
        with pytest.raises((GateStop, ValueError), match="policy checker: KL"):
            trained(chosen)
    warns = {"solver": {"gate": {"mode": "warn"}}, "checker": {"gate": stops | {"mode": "warn"}}}
    warns["checker"]["optimiser"] = {"rate": 1e-4}
    run = trained(team(model, tmp_path / "run", warns, batch={"kl_sample": 2}))
    assert run.step == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"checker": {"team": 0.5}},
        {"checker": {"prompts": 1}},
        {"checker": {"lora": {"rank": 3}}},
        {"checker": {"algorithm": {"name": "rloo"}}},
        {"other": {}},
    ],
)
def test_a_run_of_other_policies_is_another(changed: Json, model: Path, tmp_path: Path) -> None:
    policies = {"solver": {}, "checker": {}}
    trained(team(model, tmp_path / "run", policies, run={"steps": 1}))
    with pytest.raises(ValueError, match="configuration"):
        trained(team(model, tmp_path / "run", policies | changed))


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_an_opponent_whose_files_have_changed_is_another(
    kind: str, model: Path, tmp_path: Path
) -> None:
    def write(number: int) -> None:
        shutil.rmtree(tmp_path / "opponent", ignore_errors=True)
        if kind == "model":
            model_folder(tmp_path / "opponent", size=5.0 + number)
        else:
            far_adapter(model, tmp_path / "opponent", seed=number)

    place = str(tmp_path / "opponent")
    own = {"model": place} if kind == "model" else {"lora": {"adapter": place}}
    chosen = team(model, tmp_path / "run", {"solver": {}, "checker": {"frozen": True, **own}})
    write(1)
    trained(chosen.replace(run=chosen.run.replace(steps=1)))
    write(2)
    with pytest.raises(ValueError, match="configuration"):
        trained(chosen)
    write(1)
    assert trained(chosen).step == 2


def test_a_policy_that_diverged_ends_the_run_though_another_learns(
    model: Path, tmp_path: Path
) -> None:
    """The checker has a batch in every other round; the solver learns in each."""
    broken = {"algorithm": {"advantage": "support.teams:boundless"}, "prompts": 4}
    policies = {"solver": {}, "checker": broken}
    run = {"steps": 9, "skips": 2, "save_every": 9}
    with pytest.raises(Diverged, match="2"):
        trained(team(model, tmp_path / "run", policies, run=run))
    assert [line["policy/checker/steps"] for line in metrics(tmp_path / "run")] == [0, 1, 0, 1]


def test_what_waits_for_a_batch_is_saved_as_it_is(model: Path, tmp_path: Path) -> None:
    """Tokens are tensors in a checkpoint, not text; hidden states are left out."""
    policies = {"solver": {"prompts": 3, "gate": {"mode": "warn"}}, "checker": {}}
    run = trained(team(model, tmp_path / "run", policies, run={"steps": 1}))
    pending = run.members["solver"].pending
    assert len(pending) == 2
    state = Checkpoints(tmp_path / "run" / "checkpoints", 1).load(1)["policies"]["solver"]
    tokens = [t["ids"] for group in state["pending"].values() for t in group["trajectories"]]
    assert len(tokens) == 8
    assert all(isinstance(ids, torch.Tensor) for ids in tokens)
    with open_training(team(model, tmp_path / "run", policies), judge=noisy) as again:
        assert isinstance(again, TeamRun)
        assert again.members["solver"].pending == pending


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_a_run_that_diverged_counts_anew_when_it_goes_on(
    loop: str, model: Path, tmp_path: Path
) -> None:
    """What was wrong is mended: a file of the advantages."""
    each = "return [numpy.full(len(group.rewards), {}) for group in groups]"
    code = f"import numpy\n\ndef each(groups):\n    {each}\n"
    file = tmp_path / "advantages.py"
    broken = {"algorithm": {"advantage": f"{file}:each"}}
    changes: Json = {"run": {"loop": loop, "steps": 9, "skips": 2, "save_every": 9}}
    changes |= {"dispatch": {"staleness": 1}} if loop == "async" else {}
    chosen = team(model, tmp_path / "run", {"solver": {}, "checker": broken}, **changes)
    file.write_text(code.format("3e38"))
    begun = list[int]()
    for _ in range(2):
        with open_training(chosen, judge=noisy) as run:
            begun.append(run.step)
            with pytest.raises(Diverged):
                train(run)
    assert run.step >= begun[1] + 2
    file.write_text(code.format("0.01"))
    sys.modules.pop("advantages", None)
    assert trained(chosen).step == 9
