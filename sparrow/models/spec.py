"""The shape of a model, read from and written to a Hugging Face config.

Three families, one decoder: they differ in QK-norm (Qwen3), biases on q, k, v (Qwen2.5) and rope
scaling (Llama 3). Keys known to ask for more than that are refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparrow.models.rope import Rope

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}

# Keys that change the function which a checkpoint computes, with the only values that we compute.
# Absent means the first value.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "is_causal": (True, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that decides a decoder's tensors and its function."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    max_positions: int
    norm_eps: float = 1e-6
    tied: bool = False
    rope: Rope = field(default_factory=Rope)
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.norm_eps, float) or not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps must be a number between 0 and 1, got {self.norm_eps!r}")
        if self.family not in ARCHITECTURES:
            raise ValueError(f"family must be one of {sorted(ARCHITECTURES)}, got {self.family!r}")
        sizes = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_size")
        for name in (*sizes, "vocabulary", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for token in (*self.eos_ids, *(i for i in (self.bos_id, self.pad_id) if i is not None)):
            if not isinstance(token, int) or not -1 <= token < self.vocabulary:
                raise ValueError(f"special token {token!r} is not an id below {self.vocabulary}")
        if not isinstance(self.tied, bool):
            raise ValueError(f"tie_word_embeddings must be true or false, got {self.tied!r}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size must be even for rotary positions, got {self.head_size}")

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of q, k and v in the fused projection."""
        return (
            self.heads * self.head_size,
            self.kv_heads * self.head_size,
            self.kv_heads * self.head_size,
        )

    def parameters(self) -> int:
        """How many weights the model has."""
        qkv = sum(self.qkv_sizes)
        attention = self.hidden * qkv + self.hidden * self.qkv_sizes[0]
        attention += qkv * self.qkv_bias + 2 * self.head_size * self.qk_norm
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden


def spec_from_hf(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Read a Hugging Face config.json; `source` names it in errors."""
    try:
        _refuse_unsupported(config)
        return _read(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: {error}") from error


def _read(config: Mapping[str, Any]) -> ModelSpec:
    family = config["model_type"]
    heads = _required(config, "num_attention_heads")
    return ModelSpec(
        family=family,
        layers=_required(config, "num_hidden_layers"),
        hidden=_required(config, "hidden_size"),
        intermediate=_required(config, "intermediate_size"),
        heads=heads,
        kv_heads=heads if _is_old_llama(config) else _required(config, "num_key_value_heads"),
        head_size=_default_head_size(config) if (d := config.get("head_dim")) is None else d,
        vocabulary=_required(config, "vocab_size"),
        max_positions=_required(config, "max_position_embeddings"),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
        rope=Rope.from_hf(config),
        eos_ids=token_ids(config.get("eos_token_id")),
        bos_id=config.get("bos_token_id"),
        pad_id=config.get("pad_token_id"),
    )


def spec_to_hf(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json that transformers reads back into the same model."""
    eos: Any = list(spec.eos_ids) if len(spec.eos_ids) > 1 else next(iter(spec.eos_ids), None)
    config = {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "dtype": dtype,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "vocab_size": spec.vocabulary,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": spec.bos_id,
        "eos_token_id": eos,
        "pad_token_id": spec.pad_id,
        **spec.rope.to_hf(),
    }
    if spec.family != "llama":
        config["use_sliding_window"] = False
    return config


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"model_type {family!r} is not supported; supported are {known}")
    architectures = config.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] not in architectures:
        raise ValueError(f"architectures {architectures} lack {ARCHITECTURES[family]}")
    for key, allowed in _ONLY.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"{key}={value!r} is not supported, only {allowed[0]!r} is")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"layer_types {kinds!r} are not supported, only full_attention is")


def _is_old_llama(config: Mapping[str, Any]) -> bool:
    return config["model_type"] == "llama" and config.get("num_key_value_heads") is None


def _default_head_size(config: Mapping[str, Any]) -> int:
    """What transformers takes where config.json is silent."""
    heads = _required(config, "num_attention_heads")
    if config["model_type"] == "qwen3":
        return 128
    return _required(config, "hidden_size") // heads if heads else 0


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"the key {key!r} is missing")
    return config[key]


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list of ids or none, as config files write them."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
