"""Shapes of models that tests share."""

from sparrow.models.spec import ModelSpec, Rope

SIZES = {"layers": 3, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2}
SIZES |= {"head_size": 16, "vocabulary": 64, "max_positions": 1024}
TINY = ModelSpec(family="qwen3", **SIZES, tied=True, rope=Rope(theta=1e4))
