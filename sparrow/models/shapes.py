"""Published shapes by name, for random weights in benchmarks and memory plans."""

from dataclasses import replace

from sparrow.models.rope import Rope
from sparrow.models.spec import ModelSpec

_QWEN3 = ModelSpec(
    family="qwen3",
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_size=128,
    vocabulary=151_936,
    max_positions=40_960,
    tied=True,
    rope=Rope(theta=1e6),
    eos_ids=(151_645, 151_643),
    bos_id=151_643,
)
_QWEN2 = replace(_QWEN3, family="qwen2", kv_heads=2, max_positions=32_768)
_SMOLLM2 = ModelSpec(
    family="llama",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_size=64,
    vocabulary=49_152,
    max_positions=8192,
    norm_eps=1e-5,
    tied=True,
    rope=Rope(theta=100_000.0),
    eos_ids=(2,),
    bos_id=1,
    pad_id=2,
)


def _llama3_rope(factor: float) -> Rope:
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    return Rope(theta=500_000.0, kind="llama3", scaling=tuple(scaling.items()))


_LLAMA3 = replace(
    _SMOLLM2,
    layers=16,
    hidden=2048,
    intermediate=8192,
    heads=32,
    kv_heads=8,
    vocabulary=128_256,
    max_positions=131_072,
    rope=_llama3_rope(32.0),
    eos_ids=(128_001, 128_008, 128_009),
    bos_id=128_000,
    pad_id=None,
)


def _sized(
    base: ModelSpec, layers: int, hidden: int, intermediate: int, heads: int, **changes: object
) -> ModelSpec:
    size = {"layers": layers, "hidden": hidden, "intermediate": intermediate, "heads": heads}
    return replace(base, **size, **changes)  # type: ignore[arg-type]


SHAPES: dict[str, ModelSpec] = {
    "qwen3-0.6b": _QWEN3,
    "qwen3-1.7b": _sized(_QWEN3, 28, 2048, 6144, 16),
    "qwen3-4b": _sized(_QWEN3, 36, 2560, 9728, 32),
    "qwen3-8b": _sized(_QWEN3, 36, 4096, 12_288, 32, tied=False),
    "qwen3-14b": _sized(_QWEN3, 40, 5120, 17_408, 40, tied=False),
    "qwen2.5-0.5b": _sized(_QWEN2, 24, 896, 4864, 14, head_size=64),
    "qwen2.5-1.5b": _sized(_QWEN2, 28, 1536, 8960, 12),
    "qwen2.5-3b": _sized(_QWEN2, 36, 2048, 11_008, 16),
    "qwen2.5-7b": _sized(_QWEN2, 28, 3584, 18_944, 28, kv_heads=4, vocabulary=152_064, tied=False),
    "llama-3.2-1b": _LLAMA3,
    "llama-3.2-3b": _sized(_LLAMA3, 28, 3072, 8192, 24, head_size=128),
    "llama-3.1-8b": _sized(
        _LLAMA3, 32, 4096, 14_336, 32, head_size=128, rope=_llama3_rope(8.0), tied=False
    ),
    "smollm2-135m": _SMOLLM2,
    "smollm2-360m": _sized(_SMOLLM2, 32, 960, 2560, 15, kv_heads=5),
    "smollm2-1.7b": _sized(_SMOLLM2, 24, 2048, 8192, 32, kv_heads=32, rope=Rope(theta=130_000.0)),
}


def shape(name: str) -> ModelSpec:
    """The published shape of that name."""
    if name not in SHAPES:
        raise ValueError(f"no published shape {name!r}; known are {', '.join(SHAPES)}")
    return SHAPES[name]
