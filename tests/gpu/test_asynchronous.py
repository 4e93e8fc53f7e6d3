"""An asynchronous run on one GPU: learner, rollout worker and held-out rows beside each other."""

from pathlib import Path

import pytest
import torch
from support.training import metrics

from sparrow import api
from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.run import open_run
from sparrow.schema.asynchronous import AuditConfig
from sparrow.schema.train import TrainConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_a_run_ends_and_every_prompt_once(tmp_path: Path, in_flight: str) -> None:
    settings = {
        "model": {"name": "tiny", "device": "cuda"},
        "data": {"task": "assignments", "length": 150},
        "rollout": {"prompts": 4, "samples": 4, "max_tokens": 192, "kv_gib": 0.5},
        "batch": {"compile": False},
        "gate": {"mode": "off"},
        "validation": {"every": 2, "prompts": 4},
        "dispatch": {"staleness": 2, "in_flight": in_flight},
        "run": {"loop": "async", "steps": 4, "out": tmp_path / "run", "tensorboard": False},
    }
    with open_run(TrainConfig.model_validate(settings)) as run:
        train(run)
    found = metrics(tmp_path / "run")
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    assert max(line["async/staleness_max"] for line in found) <= 2
    assert len((tmp_path / "run" / "validation.jsonl").read_text().splitlines()) == 3
    assert not api.audit(AuditConfig(run=tmp_path / "run")).problems
    settings |= {
        "rollout": {"max_tokens": 192},
        "run": {"loop": "async", "out": tmp_path / "other"},
    }
    with pytest.raises(ValueError, match="kv_gib"):
        open_run(TrainConfig.model_validate(settings))
