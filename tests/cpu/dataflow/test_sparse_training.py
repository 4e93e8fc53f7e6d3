"""`batch.attention = "sparse"`: gradients of the sparse forward pass, on the actor's samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training import SPARSE, config, metrics, trained

from sparrow import load
from sparrow.calibration.replay import read, sparse_hidden
from sparrow.schema.episode import TrainSample
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RateConfig
from sparrow.sparse.rule import Rule
from sparrow.training.learner import Learner
from sparrow.training.policy import Policy
from sparrow.training.sparse_attention import SparseDecoding

ROLLOUT = {"attention": SPARSE, "max_tokens": 100}


def run(model: Path, out: Path, attention: str, **changes: Any) -> list[dict[str, float]]:
    settings = {"rollout": ROLLOUT, "run": {"steps": 2}, "batch": {"attention": attention}}
    trained(config(model, out, **settings | changes))
    return metrics(out)


def test_log_probs_are_those_of_the_sparse_actor(model: Path) -> None:
    decoder, schedule = load(model, device="cpu"), Schedule.fixed(48, last=1)
    rng = np.random.default_rng(0)
    samples = [
        TrainSample(
            ids=rng.integers(decoder.spec.vocabulary, size=length, dtype=np.int32),
            loss_mask=np.arange(length) >= start,
            rollout_logprob=np.zeros(length, np.float32),
            advantage=1.0,
        )
        for length, start in ((200, 60), (90, 12))
    ]
    learner = Learner(Policy(decoder), RateConfig(), steps=1, tokens=1000)
    found = learner.score(samples, sparse=SparseDecoding(schedule, Rule.of(schedule)))
    for one, scores in zip(samples, found, strict=True):
        start = int(np.argmax(one.loss_mask))
        dense = read(decoder, one.ids.tolist())
        hidden = sparse_hidden(decoder, dense, start, schedule)[start - 1 : -1]
        logp = decoder.logits(hidden).log_softmax(1)
        targets = torch.from_numpy(one.ids[start:]).long()
        wanted = logp.gather(1, targets[:, None]).squeeze(1).detach()
        torch.testing.assert_close(torch.from_numpy(scores.logprob), wanted, atol=1e-4, rtol=1e-4)


def test_it_is_on_policy_and_acceptance_is_still_that_of_the_dense_policy(
    model: Path, tmp_path: Path
) -> None:
    """The first step samples the same answers; later ones differ."""
    dense, sparse = (run(model, tmp_path / name, name)[0] for name in ("dense", "sparse"))
    assert abs(sparse["mismatch/k3"]) < 1e-5 < dense["mismatch/k3"]
    assert sparse["mismatch/weight_mean"] == pytest.approx(1, abs=1e-3)
    for name in ("sparse/step/p05", "sparse/step/hard_misses", "sparse/accept_mean"):
        assert sparse[name] == pytest.approx(dense[name], abs=1e-5)
    assert dense["sparse/step/p05"] < 0.99
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("dense", "sparse")]
    assert weights[0].read_bytes() != weights[1].read_bytes()


@pytest.mark.parametrize(
    "rollout",
    [
        {"max_tokens": 100},
        ROLLOUT | {"decoding": "exact", "speculative": {"draft_tokens": 4}},
        ROLLOUT | {"distill": {"rank": 2}},
    ],
    ids=["dense", "exact", "an adapter"],
)
def test_it_needs_sparse_rollouts_of_the_policy_itself(
    rollout: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"batch\.attention"):
        config(model, tmp_path / "run", rollout=rollout, batch={"attention": "sparse"})
