"""Several policies on one GPU: weights of their own and adapters, in lock-step and beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import metrics

from sparrow.dataflow.local.loop import open_training, train
from sparrow.dataflow.team.run import TeamRun
from sparrow.schema.train import TrainConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OWN = {"solver": {}, "checker": {"optimiser": {"rate": 1e-4}}}
LORA = {
    "solver": {"lora": {"rank": 8}},
    "checker": {"lora": {"rank": 4}},
    "other": {"frozen": True},
}


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("policies", [OWN, LORA], ids=["own weights", "adapters"])
@pytest.mark.parametrize("attention", [{}, {"budget": 64}], ids=["dense", "sparse"])
def test_policies_learn_and_their_actors_are_close(
    tmp_path: Path, loop: str, policies: Any, attention: Any
) -> None:
    """Weights reach the engines: what is learnt from was sampled by (nearly) the same policy."""
    settings = {
        "model": {"name": "tiny", "device": "cuda"},
        "data": {"task": "assignments", "length": 150},
        "rollout": {
            "episode": "support.teams:apart",
            "prompts": 4,
            "samples": 4,
            "max_tokens": 96,
            "kv_gib": 0.25,
            "attention": attention,
        },
        "policies": policies,
        "optimiser": {"rate": 1e-5},
        "batch": {"compile": False},
        "gate": {"mode": "warn", "least": 1, "prompts": 2},
        "dispatch": {"staleness": 1},
        "validation": {"every": 2, "prompts": 4},
        "run": {"loop": loop, "steps": 3, "save_every": 3, "out": tmp_path, "tensorboard": False},
    }
    with open_training(TrainConfig.model_validate(settings)) as run:
        assert isinstance(run, TeamRun)
        train(run)
    for name in ("solver", "checker"):
        lines = metrics(tmp_path)
        assert sum(line[f"policy/{name}/steps"] for line in lines) == 3
        mismatch = [line.get(f"policy/{name}/mismatch/k3", 0.0) for line in lines]
        assert max(mismatch) < (0.5 if attention else 0.02)
        assert (tmp_path / "model" / name / "config.json").is_file()
