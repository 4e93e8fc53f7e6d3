"""Samples for trainers: random tokens, with what an actor would have said of them."""

import numpy as np
import torch
from torch import Tensor

from sparrow import models
from sparrow.models.attention import Packed
from sparrow.schema.episode import TrainSample

SIZES = {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2}


def small_model(seed: int = 0) -> models.Decoder:
    """Random weights, large enough that tokens differ in probability."""
    made = models.random(
        "qwen3-0.6b", **SIZES, head_size=8, vocabulary=61, max_positions=256, seed=seed
    )
    with torch.no_grad():
        for name, view in models.hf_views(made).items():
            if "norm" not in name:
                view.mul_(6)
    return made


def sample(length: int, prompt: int, *, advantage: float = 1.0, seed: int = 0) -> TrainSample:
    """Tokens behind the prompt are learnt; the actor's log-probs are noise below 0."""
    rng = np.random.default_rng([seed, length, prompt])
    mask = np.arange(length) >= prompt
    return TrainSample(
        ids=rng.integers(61, size=length),
        loss_mask=mask,
        rollout_logprob=np.where(mask, -rng.random(length), 0).astype(np.float32),
        advantage=advantage,
    )


def batch(count: int = 7) -> list[TrainSample]:
    """Samples of odd lengths with advantages of both signs."""
    lengths = np.random.default_rng(count).integers(5, 40, size=count)
    return [
        sample(int(length), int(length) // 3 + 1, advantage=(-1.0) ** n * (n + 1) / 3, seed=n)
        for n, length in enumerate(lengths)
    ]


def plain_logprobs(model: models.Decoder, one: TrainSample) -> Tensor:
    """Log-probs of the learnt tokens by the definition, with gradients."""
    ids = torch.from_numpy(one.ids.astype(np.int64))
    bounds = torch.tensor([0, len(ids)])
    hidden = model(ids, torch.arange(len(ids)), Packed(bounds=bounds))
    logp = (hidden @ model.head.T).log_softmax(1)
    places = torch.from_numpy(np.flatnonzero(one.loss_mask))
    return logp[places - 1, ids[places]]
