"""A random model for GPU tests whose weights are large enough that attention matters."""

from typing import Any

import torch

from sparrow import models

SIZES = {"layers": 4, "hidden": 256, "intermediate": 512, "heads": 8, "kv_heads": 4}
SIZES |= {"head_size": 64, "vocabulary": 1009}


def loud(dtype: torch.dtype, **options: Any) -> models.Decoder:
    """options: max_positions, and a device other than the GPU."""
    made = models.random("qwen3-0.6b", **SIZES, dtype=dtype, **{"device": "cuda", **options})
    with torch.no_grad():
        for name, view in models.hf_views(made).items():
            if "norm" not in name:
                view.mul_(4)
    return made
