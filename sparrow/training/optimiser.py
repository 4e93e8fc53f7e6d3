"""AdamW, its learning-rate schedule, and its moments in a checkpoint."""

from collections.abc import Iterable

import torch
from torch import Tensor

from sparrow.schema.train import OptimiserConfig
from sparrow.training.policy import full_tensor


def adamw(trained: Iterable[Tensor], config: OptimiserConfig) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices, none for norms and biases."""
    weights = list(trained)
    matrices = [p for p in weights if p.ndim > 1]
    vectors = [p for p in weights if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    fused = weights[0].is_cuda
    return torch.optim.AdamW(groups, lr=config.rate, betas=betas, fused=fused)


def rate_at(config: OptimiserConfig, step: int, steps: int) -> float:
    """The learning rate of a step (from 0): linear warm-up, constant, linear decay."""
    up = (step + 1) / config.warm_up if step < config.warm_up else 1.0
    decays = config.decay and step >= steps - config.decay
    left = (steps - 1 - step) / config.decay if decays else 1.0
    return config.rate * min(up, config.final + (1 - config.final) * left)


def moments(optimiser: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """Copies of its moments by parameter, in host memory; a collective call on all ranks."""
    return {
        number: {name: full_tensor(value).to("cpu", copy=True) for name, value in values.items()}
        for number, values in optimiser.state_dict()["state"].items()
    }
