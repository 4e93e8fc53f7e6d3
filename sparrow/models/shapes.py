"""Published shapes by name, for random weights in benchmarks and memory plans."""

from sparrow.models.rope import Rope
from sparrow.models.spec import ModelSpec


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, *, tied: bool) -> ModelSpec:
    return ModelSpec(
        family="qwen3",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=8,
        head_size=128,
        vocabulary=151_936,
        max_positions=40_960,
        tied=tied,
        rope=Rope(theta=1e6),
        eos_ids=(151_645, 151_643),
        bos_id=151_643,
    )


def _qwen2(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, *, tied: bool
) -> ModelSpec:
    return ModelSpec(
        family="qwen2",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_size=hidden // heads,
        vocabulary=151_936 if tied else 152_064,
        max_positions=32_768,
        tied=tied,
        rope=Rope(theta=1e6),
        eos_ids=(151_645, 151_643),
        bos_id=151_643,
    )


def _llama3(
    layers: int, hidden: int, intermediate: int, heads: int, *, factor: float, tied: bool
) -> ModelSpec:
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    return ModelSpec(
        family="llama",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=8,
        head_size=hidden // heads,
        vocabulary=128_256,
        max_positions=131_072,
        norm_eps=1e-5,
        tied=tied,
        rope=Rope(theta=500_000.0, kind="llama3", scaling=tuple(scaling.items())),
        eos_ids=(128_001, 128_008, 128_009),
        bos_id=128_000,
    )


def _smollm2(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, theta: float
) -> ModelSpec:
    return ModelSpec(
        family="llama",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_size=64,
        vocabulary=49_152,
        max_positions=8192,
        norm_eps=1e-5,
        tied=True,
        rope=Rope(theta=theta),
        eos_ids=(2,),
        bos_id=1,
        pad_id=2,
    )


SHAPES: dict[str, ModelSpec] = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12_288, 32, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 17_408, 40, tied=False),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 11_008, 16, 2, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18_944, 28, 4, tied=False),
    "llama-3.2-1b": _llama3(16, 2048, 8192, 32, factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 8192, 24, factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(32, 4096, 14_336, 32, factor=8.0, tied=False),
    "smollm2-135m": _smollm2(30, 576, 1536, 9, 3, 100_000.0),
    "smollm2-360m": _smollm2(32, 960, 2560, 15, 5, 100_000.0),
    "smollm2-1.7b": _smollm2(24, 2048, 8192, 32, 32, 130_000.0),
}


def shape(name: str) -> ModelSpec:
    """The published shape of that name."""
    if name not in SHAPES:
        raise ValueError(f"no published shape {name!r}; known are {', '.join(SHAPES)}")
    return SHAPES[name]
