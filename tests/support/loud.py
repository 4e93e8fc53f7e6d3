"""A random model for GPU tests whose weights are large enough that attention matters."""

import torch

from sparrow import models

SIZES = {"layers": 4, "hidden": 256, "intermediate": 512, "heads": 8, "kv_heads": 4}


def loud(dtype: torch.dtype, *, max_positions: int, device: str = "cuda") -> models.Decoder:
    made = models.random(
        "qwen3-0.6b",
        **SIZES,
        head_size=64,
        vocabulary=1009,
        max_positions=max_positions,
        dtype=dtype,
        device=device,
    )
    with torch.no_grad():
        for name, view in models.hf_views(made).items():
            if "norm" not in name:
                view.mul_(4)
    return made
