"""The shape of a model, read from and written to a Hugging Face config; rotary positions.

Three families, one decoder: they differ in QK-norm (Qwen3), biases on q, k, v (Qwen2.5) and rope
scaling (Llama 3). Keys known to ask for more than that are refused by name.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparrow.files import parse_json, read_text
from sparrow.schema.base import problems

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
# Sizes of a model and their keys in config.json.
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "vocabulary": "vocab_size",
    "max_positions": "max_position_embeddings",
}
# The most that a config may ask for is far beyond what is published; without a limit a damaged
# number would take all memory, or forever.
_Heads = Annotated[int, Field(ge=1, le=2**12)]
_Positions = Annotated[int, Field(ge=1, le=2**24)]
# Numbers between which the frequencies of rope stay finite.
_Number = Annotated[int | float, Field(gt=1e-6, le=1e15)]


class FileKeys(BaseModel):
    """Keys of a JSON file that others write, of exactly these types."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _HfConfig(FileKeys):
    """config.json. Of keys that change what a checkpoint computes, the values that we compute."""

    model_type: Literal["qwen3", "qwen2", "llama"]
    num_hidden_layers: Annotated[int, Field(ge=1, le=2**10)]
    hidden_size: Annotated[int, Field(ge=1, le=2**20)]
    intermediate_size: Annotated[int, Field(ge=1, le=2**22)]
    num_attention_heads: _Heads
    num_key_value_heads: _Heads | None = None
    head_dim: _Heads | None = None
    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    max_position_embeddings: _Positions
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: _Number | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    architectures: list[str] | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] | None = None
    mlp_bias: Literal[False] | None = None
    use_sliding_window: Literal[False] | None = None
    quantization_config: None = None
    pretraining_tp: Literal[1] | None = None
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] | None = None
    is_causal: Literal[True] | None = None


class _Plain(FileKeys):
    """Parameters of a kind of rope scaling; those of none."""

    model_config = ConfigDict(extra="forbid")
    rope_theta: Annotated[int | float, Field(gt=1, le=1e15)]


class _Linear(_Plain):
    factor: _Number


class _Llama3(_Linear):
    low_freq_factor: _Number
    high_freq_factor: _Number
    original_max_position_embeddings: _Number


class _Yarn(_Linear):
    original_max_position_embeddings: _Number
    attention_factor: _Number | None = None
    beta_fast: _Number | None = None
    beta_slow: _Number | None = None
    truncate: bool | None = None


_SCALINGS: dict[str, type[_Plain]] = {
    "default": _Plain,
    "linear": _Linear,
    "llama3": _Llama3,
    "yarn": _Yarn,
}


@dataclass(frozen=True, slots=True)
class Rope:
    """theta, the kind of scaling, and its parameters as sorted (name, value) pairs.

    Frequencies are computed in double precision by the published formulas. Other kinds (dynamic,
    longrope, ...) depend on the running length or on tables of their own and are refused.
    """

    theta: float = 10_000.0
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Rope":
        """Read either form: `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling`."""
        parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kinds = parameters.pop("rope_type", None), parameters.pop("type", None)
        kind = kinds[0] or kinds[1] or "default"
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise ValueError(
                f"rope scaling {kind!r:.80} is not supported; supported are {sorted(_SCALINGS)}"
            )
        if kind == "yarn" and parameters.get("original_max_position_embeddings") is None:
            parameters["original_max_position_embeddings"] = config.get("max_position_embeddings")
        if parameters.get("rope_theta") is None:
            theta = config.get("rope_theta")
            parameters["rope_theta"] = 10_000.0 if theta is None else theta
        parameters = {name: value for name, value in parameters.items() if value is not None}
        if parameters.get("partial_rotary_factor", 1.0) == 1.0:
            parameters.pop("partial_rotary_factor", None)
        try:
            _SCALINGS[kind].model_validate(parameters)
        except ValidationError as error:
            raise ValueError(f"rope_scaling.{problems(error)}") from None
        if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
            raise ValueError("rope low_freq_factor must be below high_freq_factor")
        theta = parameters.pop("rope_theta")
        return cls(theta=theta, kind=kind, scaling=tuple(sorted(parameters.items())))

    def to_hf(self) -> dict[str, Any]:
        """Config keys that transformers 4 and 5 both read."""
        scaling = {"rope_type": self.kind, **dict(self.scaling)}
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.kind == "default" else scaling,
        }

    def frequencies(self, head_size: int) -> tuple[list[float], float]:
        """Radians per position of each channel pair, and the factor on cosine and sine."""
        plain = [self.theta ** (-2 * i / head_size) for i in range(head_size // 2)]
        scaling = dict(self.scaling)
        if self.kind == "linear":
            return [f / scaling["factor"] for f in plain], 1.0
        if self.kind == "llama3":
            return [_llama3(f, **scaling) for f in plain], 1.0
        if self.kind == "yarn":
            return _yarn(plain, self.theta, head_size, scaling)
        return plain, 1.0


def _llama3(
    frequency: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> float:
    """Long waves are stretched by `factor`, short ones kept, those between are blended."""
    turns = original_max_position_embeddings * frequency / (2 * math.pi)
    if turns > high_freq_factor:
        return frequency
    if turns < low_freq_factor:
        return frequency / factor
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - kept) * frequency / factor + kept * frequency


def _yarn(
    plain: list[float], theta: float, head_size: int, scaling: Mapping[str, Any]
) -> tuple[list[float], float]:
    """Channels turning more than beta_fast times in the trained length are kept, those below
    beta_slow are stretched by `factor`, a linear ramp between."""
    factor = scaling["factor"]

    def channel(turns: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return head_size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = channel(scaling.get("beta_fast") or 32)
    high = channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    span = max(high - low, 0.001)
    stretch = [min(max((i - low) / span, 0.0), 1.0) for i in range(len(plain))]
    blended = [f / factor * s + f * (1 - s) for f, s in zip(plain, stretch, strict=True)]
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return blended, magnitude


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
        if self.head_size < 1 or self.head_size % 2:
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
        hf = _HfConfig.model_validate(config)
        family, heads = hf.model_type, hf.num_attention_heads
        architectures = hf.architectures or [ARCHITECTURES[family]]
        if ARCHITECTURES[family] not in architectures:
            raise ValueError(f"architectures {architectures!r:.80} lack {ARCHITECTURES[family]}")
        sizes = {name: getattr(hf, key) for name, key in _SIZES.items()}
        if hf.num_key_value_heads is None:
            if family != "llama":
                raise ValueError("the key 'num_key_value_heads' is missing")
            sizes["kv_heads"] = heads
        if hf.head_dim is None:  # what transformers takes
            sizes["head_size"] = 128 if family == "qwen3" else hf.hidden_size // heads
        return ModelSpec(
            family=family,
            **sizes,
            norm_eps=hf.rms_norm_eps,
            tied=hf.tie_word_embeddings,
            rope=Rope.from_hf(config),
            eos_ids=token_ids(hf.eos_token_id),
            bos_id=hf.bos_token_id,
            pad_id=hf.pad_token_id,
        )


def spec_to_hf(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json that transformers reads back into the same model."""
    eos: Any = list(spec.eos_ids) if len(spec.eos_ids) > 1 else next(iter(spec.eos_ids), None)
    config = {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "dtype": dtype,
        **{key: getattr(spec, name) for name, key in _SIZES.items()},
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


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Prefix errors about the content of a file with its name."""
    try:
        yield
    except RecursionError as error:
        raise ValueError(f"{source}: nested too deep") from error
    except ValidationError as error:
        raise ValueError(f"{source}: {problems(error)}") from error
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


# Published shapes by name, for random weights in benchmarks and memory plans.
SHAPES: dict[str, ModelSpec] = {
    name: spec_from_hf(config, name)
    for name, config in read_json(Path(__file__).with_name("shapes.json")).items()
}


def shape(name: str) -> ModelSpec:
    """The published shape of that name."""
    if name not in SHAPES:
        raise ValueError(f"no published shape {name!r}; known are {', '.join(SHAPES)}")
    return SHAPES[name]
