"""Distillation inside a run: the policy is not touched, checkpoints, exact decoding, the gate."""

from pathlib import Path
from typing import Any

import pytest
from support.training import SPARSE, config, engine_of, lines, metrics, trained

import sparrow
from sparrow import load
from sparrow.dataflow.local.loop import step
from sparrow.dataflow.local.run import gate_config, open_run
from sparrow.models.actor import load_actor
from sparrow.schema.sampling import SamplingParams

DISTILL = {"rank": 2, "rate": 5e-3}
PARAMS = SamplingParams(max_tokens=4, seed=1)


def run(model: Path, out: Path, steps: int = 3, rollout: dict[str, Any] | None = None) -> Any:
    base = {"attention": SPARSE, "distill": DISTILL, "max_tokens": 100}
    settings = {"run": {"steps": steps, "save_every": 1}, "rollout": base | (rollout or {})}
    return trained(config(model, out, **settings))


def test_with_the_same_rollouts_the_policy_has_the_same_bits(model: Path, tmp_path: Path) -> None:
    """One step: both runs sample from the same actor, as the adapter begins as none."""
    base = {"attention": SPARSE, "max_tokens": 100}
    plain = tmp_path / "plain"
    trained(config(model, plain, run={"steps": 1}, rollout=base))
    run(model, tmp_path / "distilled", 1)
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("plain", "distilled")]
    assert files[0].read_bytes() == files[1].read_bytes()
    step = metrics(tmp_path / "distilled")[0]
    assert step["distill/gradient"] > 0
    assert "distill/loss" not in metrics(plain)[0]
    assert not (plain / "actor").exists()


def test_the_adapter_lies_beside_the_policy_and_belongs_to_it(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "run")
    policy = load(tmp_path / "run" / "model", device="cpu")
    loaded = load_actor(tmp_path / "run", policy)
    assert loaded.adapter.rank == 2
    assert any(pair.b_ER.abs().max() > 0 for pair in loaded.adapter.pairs.values())
    with pytest.raises(ValueError, match="other weights"):
        load_actor(tmp_path / "run", load(model, device="cpu"))


def test_a_run_that_was_stopped_goes_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "whole", 4)
    run(model, tmp_path / "parts", 2)
    run(model, tmp_path / "parts", 4)
    for name in ("model/model.safetensors", "actor/adapter_model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_the_actor_samples_with_the_adapter(model: Path, tmp_path: Path) -> None:
    settings = {"attention": SPARSE, "distill": DISTILL, "max_tokens": 100}
    with open_run(config(model, tmp_path / "more", run={"steps": 3}, rollout=settings)) as own:
        engine = engine_of(own)
        before = engine.generate([[5, 6, 7] * 20], PARAMS, schedule=own.gate.schedule)[0]
        step(own)
        assert engine.header().count("actor of rank 2") == 1
        after = engine.generate([[5, 6, 7] * 20], PARAMS, schedule=own.gate.schedule)[0]
    assert before.logprobs[0] != after.logprobs[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"distill": DISTILL | {"teacher": "new"}},
        {"distill": DISTILL | {"share": 0.5, "every": 2, "ppo": False, "divergence": "k3"}},
        {"sleep": True},
        {"decoding": "exact", "speculative": {"draft_tokens": 4}},
    ],
    ids=["new teacher", "share", "sleep", "exact"],
)
def test_settings(changes: dict[str, Any], model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "run", 2, changes)
    found = metrics(tmp_path / "run")
    assert found[0]["distill/tokens"] > 0
    assert found[0]["distill/divergence"] > 0
    assert not found[0]["distill/skipped"]
    distill = changes.get("distill", DISTILL)
    assert ("distill/loss" in found[1]) == (distill.get("every", 1) == 1)
    if "decoding" in changes:
        assert found[1]["spec/tokens_per_round"] > 1


def test_an_adapter_to_begin_with_stays_where_it_is_not_trained(
    model: Path, tmp_path: Path
) -> None:
    """Of another model it is refused."""
    run(model, tmp_path / "first", 1)
    policy, adapter = tmp_path / "first" / "model", tmp_path / "first" / "actor"
    settings = {"distill": {"adapter": str(adapter), "every": 0}}
    run(policy, tmp_path / "second", 2, settings)
    files = [
        tmp_path / name / "actor" / "adapter_model.safetensors" for name in ("first", "second")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(ValueError, match="other weights"):
        run(model, tmp_path / "third", 1, settings)


def test_rollouts_of_a_run_are_distilled_offline(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "run", 2)
    policy, out = str(tmp_path / "run" / "model"), tmp_path / "out"
    few = {"budget": 48, "held_out": 1, "steps": 1, "rank": 2, "device": "cpu", "out": out}
    result = sparrow.distill(policy, rollouts=tmp_path / "run", **few)
    assert (result.mode, result.trained_on) == ("forced", 3)  # two prompts a step
    with pytest.raises(ValueError, match="no rollouts"):
        sparrow.distill(policy, rollouts=tmp_path, **few)


def test_it_needs_sparse_rollouts(model: Path, tmp_path: Path) -> None:
    for wrong in ({"rank": 4, "every": 0}, {"rank": 4, "adapter": "somewhere"}, {"rank": 65}):
        with pytest.raises(ValueError, match=r"rank|every"):
            run(model, tmp_path / "run", 1, {"distill": wrong})
    with pytest.raises(ValueError, match=r"distill\.rank"):
        run(model, tmp_path / "run", 1, {"attention": {}})
    own = config(model, tmp_path, rollout={"attention": SPARSE, "distill": DISTILL})
    assert gate_config(own).lower
    assert not gate_config(config(model, tmp_path, rollout={"attention": SPARSE})).lower


def test_the_gate_spends_what_was_won(model: Path, tmp_path: Path) -> None:
    """While the tail has slack budgets go down, with the reason on record."""
    rollout = {"attention": {"budget": 96}, "distill": DISTILL, "max_tokens": 120, "prompts": 4}
    gate = {"mode": "act", "target": 0.05, "bin": 64, "window": 2, "least": 20, "patience": 1}
    gate |= {"prompts": 2, "sample": 16}
    made = trained(config(model, tmp_path / "run", run={"steps": 4}, rollout=rollout, gate=gate))
    actions = lines(tmp_path / "run" / "actions.jsonl")
    assert {action["kind"] for action in actions} == {"lower"}
    assert all(action["after"] < action["before"] for action in actions)
    assert made.gate.schedule.budgets.min() < 96
    kept = [step["sparse/density"] for step in metrics(tmp_path / "run")]
    assert kept[-1] < kept[0]
