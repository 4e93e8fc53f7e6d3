"""The shape of a model, read from and written to a Hugging Face config.

Three families, one decoder: they differ in QK-norm (Qwen3), biases on q, k, v (Qwen2.5) and rope
scaling (Llama 3). Keys known to ask for more than that are refused by name.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparrow.files import parse_json, read_text
from sparrow.models.rope import Rope

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}

# Sizes of a model: their keys in config.json, and the most that a config may ask for. Far beyond
# what is published; without a limit a damaged number would take all memory, or forever.
_SIZES: dict[str, tuple[str, int]] = {
    "layers": ("num_hidden_layers", 1024),
    "hidden": ("hidden_size", 2**20),
    "intermediate": ("intermediate_size", 2**22),
    "heads": ("num_attention_heads", 2**12),
    "kv_heads": ("num_key_value_heads", 2**12),
    "head_size": ("head_dim", 2**12),
    "vocabulary": ("vocab_size", 2**24),
    "max_positions": ("max_position_embeddings", 2**24),
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
        """Errors name the key of config.json that gives a field."""
        if self.family not in ARCHITECTURES:
            raise ValueError(f"family must be one of {sorted(ARCHITECTURES)}, got {self.family!r}")
        for name, (key, most) in _SIZES.items():
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= most:
                raise ValueError(f"{key} must be a whole number from 1 to {most}, got {size!r:.80}")
        if not isinstance(self.norm_eps, float) or not 0 < self.norm_eps < 1:
            raise ValueError(f"rms_norm_eps must be between 0 and 1, got {self.norm_eps!r:.80}")
        if not isinstance(self.tied, bool):
            raise ValueError(f"tie_word_embeddings must be true or false, got {self.tied!r:.80}")
        special = {"bos_token_id": self.bos_id, "pad_token_id": self.pad_id}
        for key, token in (*(("eos_token_id", eos) for eos in self.eos_ids), *special.items()):
            allowed = type(token) is int and -1 <= token < self.vocabulary
            if not allowed and (token is not None or key == "eos_token_id"):
                raise ValueError(f"{key}: {token!r:.80} is not an id below {self.vocabulary}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads {self.heads} must be a multiple of num_key_value_heads "
                f"{self.kv_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_dim must be even (rotary positions), got {self.head_size}")

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of q, k and v in the fused projection."""
        keys = self.kv_heads * self.head_size
        return self.heads * self.head_size, keys, keys

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
    with naming(source):
        _refuse_unsupported(config)
        return ModelSpec(
            family=config["model_type"],
            **{name: _size(config, name) for name in _SIZES},
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False),
            rope=Rope.from_hf(config),
            eos_ids=token_ids(config.get("eos_token_id")),
            bos_id=config.get("bos_token_id"),
            pad_id=config.get("pad_token_id"),
        )


def _size(config: Mapping[str, Any], name: str) -> Any:
    """A size that config.json gives, or what transformers takes where it is silent."""
    key, _ = _SIZES[name]
    value, family = config.get(key), config["model_type"]
    if value is None and name == "kv_heads" and family == "llama":
        return _size(config, "heads")
    if value is None and name == "head_size":
        if family == "qwen3":
            return 128
        hidden, heads = _size(config, "hidden"), _size(config, "heads")
        return hidden // heads if type(hidden) is type(heads) is int and heads else None
    if value is None:
        raise ValueError(f"the key {key!r} is missing")
    return value


def spec_to_hf(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json that transformers reads back into the same model."""
    eos: Any = list(spec.eos_ids) if len(spec.eos_ids) > 1 else next(iter(spec.eos_ids), None)
    config = {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "dtype": dtype,
        **{key: getattr(spec, name) for name, (key, _) in _SIZES.items()},
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
    if not isinstance(family, str) or family not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"model_type {family!r:.80} is not supported; supported are {known}")
    check_only(config, _ONLY)
    for key in ("architectures", "layer_types"):
        if not isinstance(config.get(key), list | None):
            raise ValueError(f"{key} must be a list, got {config[key]!r:.80}")
    architectures = config.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] not in architectures:
        raise ValueError(f"architectures {architectures!r:.80} lack {ARCHITECTURES[family]}")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ValueError("layer_types: only full_attention is supported")
    for key in ("dtype", "torch_dtype"):
        if not isinstance(config.get(key), str | None):
            raise ValueError(f"{key} must be the name of a dtype, got {config[key]!r:.80}")


def check_only(config: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a key with another value than those given; a missing key has the first of them."""
    for key, allowed in only.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"{key}={value!r:.80} is not supported, only {allowed[0]!r} is")


@contextmanager
def naming(source: object) -> Iterator[None]:
    """What is wrong with the content of a file begins with the file's name."""
    try:
        yield
    except RecursionError as error:
        raise ValueError(f"{source}: nested too deep") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list of ids or none, as config files write them."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a file; ValueError with the file's name where it is none."""
    text = read_text(file)
    with naming(file):
        content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds {type(content).__name__}, not a table of keys")
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, a key a line."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8")
