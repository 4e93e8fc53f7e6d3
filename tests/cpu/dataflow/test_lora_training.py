"""LoRA training: full rank is full training, the base stays, checkpoints, what is exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import prompt
from support.samples import batch, small_model
from support.sharded import ones, ready
from support.training import SPARSE, config, engine_of, far_adapter, metrics, trained, weights_of

from sparrow.dataflow.evaluation import load_policy
from sparrow.dataflow.local.loop import step
from sparrow.dataflow.local.run import open_run
from sparrow.models import hf_views, load
from sparrow.models.lora import FUSED, Adapter, module_sizes
from sparrow.models.spec import ModelSpec
from sparrow.schema.loading import ConfigError
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.train import RateConfig
from sparrow.training.learner import Learner
from sparrow.training.objectives.surrogates import Objective, ppo, token_mean
from sparrow.training.policy import Policy

PPO = Objective(surrogate=ppo, aggregate=token_mean)
LORA = {"rank": 4}


def run(model: Path, out: Path, steps: int = 3, **changes: dict[str, Any]) -> Any:
    lora = {"name": str(model), "device": "cpu", "lora": changes.pop("lora", LORA)}
    given = {"run": {"steps": steps, "save_every": 1}, "model": lora}
    return trained(config(model, out, **given | changes))


def full_rank(spec: ModelSpec) -> Adapter:
    """Of every module: A so that scale * A = 1, and B = 0: B is the change of the weight."""
    tensors = {}
    for place in Adapter.random(spec, 1).pairs:
        inputs, outputs = module_sizes(spec)[place.module]
        tensors[place.tensor("A")] = torch.eye(inputs) * inputs
        tensors[place.tensor("B")] = torch.zeros(outputs, inputs)
    return Adapter.from_state(spec, tensors, alpha=1.0, dtype=torch.float32, device="cpu")


def test_full_rank_is_full_training() -> None:
    """Where scale * A is the identity, AdamW on B takes the steps of AdamW on the weight."""
    base, whole, merged = small_model(), small_model(), small_model()
    adapter = full_rank(base.spec)
    for name, weight in whole.named_parameters():
        weight.requires_grad_(any(part in name for part in FUSED) and "norm" not in name)
    rate = RateConfig(rate=1e-3, clip=1e9)
    policies = Policy(base, adapter=adapter), Policy(whole)
    learners = [Learner(policy, rate, steps=9, tokens=9999) for policy in policies]
    for pair in adapter.pairs.values():
        pair.a_RI.requires_grad_(False)
    samples = ready(batch())
    for learner in learners * 3:
        learner.update(samples, ones(samples), PPO)
    adapter.merge_into(merged)
    start, found = hf_views(small_model()), hf_views(merged)
    for name, weight in hf_views(whole).items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4)
    moved = [name for name, weight in hf_views(whole).items() if not weight.equal(start[name])]
    assert moved == [name for name in start if "_proj" in name]


def test_the_policy_of_a_step_is_base_and_adapter(model: Path, tmp_path: Path) -> None:
    """Learner, engine, checkpoint and both exports have the same weights; the base has its own."""
    base = hf_views(load(model, device="cpu"))
    own = run(model, tmp_path / "run")
    assert any(line["actor/grad_norm"] > 0 for line in metrics(tmp_path / "run"))
    policy = own.learner.learner.policy
    for name, weight in hf_views(policy.model).items():
        assert torch.equal(weight, base[name])
    found = weights_of(own)
    assert any(not torch.equal(found[name], base[name]) for name in base)
    engine = hf_views(engine_of(own).model)
    exported = hf_views(load(tmp_path / "run" / "model", device="cpu"))
    merged = load(model, device="cpu")
    Adapter.load(
        tmp_path / "run" / "adapter", merged.spec, dtype=torch.float32, device="cpu"
    ).merge_into(merged)
    saved = load_policy(tmp_path / "run", "latest", dtype="float32", device="cpu")
    for weights in (engine, exported, hf_views(merged), hf_views(saved)):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, found[name], atol=1e-6, rtol=0)


def test_the_learners_log_probs_are_the_engines(model: Path, tmp_path: Path) -> None:
    lora = {"name": str(model), "device": "cpu", "lora": LORA}
    rates = {"optimiser": {"rate": 1e-2}, "model": lora, "run": {"steps": 3}}
    with open_run(config(model, tmp_path / "run", **rates)) as own:
        step(own)
        step(own)
        lines = metrics(tmp_path / "run")
        assert all(line["mismatch/k3"] < 1e-8 for line in lines)
        (answer,) = engine_of(own).generate([prompt(9, 9)], SamplingParams(max_tokens=4, seed=1))
        assert answer


def test_a_run_that_was_stopped_goes_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "whole", 4)
    run(model, tmp_path / "parts", 2)
    run(model, tmp_path / "parts", 4)
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_training_goes_on_from_an_adapter_of_peft(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "first", 1)
    place = tmp_path / "first" / "adapter"
    own = run(model, tmp_path / "second", 1, lora={"adapter": str(place)})
    assert own.learner.lora.rank == LORA["rank"]


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_the_first_answers_are_of_the_adapter_that_training_begins_with(
    loop: str, model: Path, tmp_path: Path
) -> None:
    adapter = str(far_adapter(model, tmp_path / "adapter"))
    lora = {"name": str(model), "device": "cpu", "lora": {"adapter": adapter}}
    given = {"model": lora, "run": {"steps": 1, "loop": loop}}
    trained(config(model, tmp_path / "run", **given), judge=None)
    assert metrics(tmp_path / "run")[0]["mismatch/k3"] < 1e-8


def test_sparse_rollouts_and_a_reference_model(model: Path, tmp_path: Path) -> None:
    run(
        *(model, tmp_path / "run", 2),
        rollout={"attention": SPARSE, "max_tokens": 100},
        algorithm={"kl": 0.01},
    )
    assert metrics(tmp_path / "run")[0]["actor/kl_reference"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"attention": SPARSE, "distill": {"rank": 2}}},
        {"run": {"learner": "transformers"}},
        {"model": {"lora": {"rank": 2, "adapter": "there"}}},
        {"model": {"lora": {"alpha": 2.0}}},
        {"model": {"lora": {"targets": ["q_proj"], "adapter": "there"}}},
    ],
)
def test_what_does_not_go_together_is_refused(changes: Any, model: Path, tmp_path: Path) -> None:
    given = {"model": {"name": str(model), "device": "cpu", "lora": LORA}} | changes
    given["model"] = {"name": str(model), **given["model"]}
    with pytest.raises((ConfigError, ValueError)):
        config(model, tmp_path, **given)


def test_a_rank_above_the_models_own_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most"):
        run(model, tmp_path / "run", 1, lora={"rank": 999})
    with pytest.raises(ValueError, match=r"model\.lora\.adapter"):
        run(model, tmp_path / "run", 1, lora={"adapter": str(tmp_path)})
