"""PEFT's adapter files: names of tensors, keys of the config, and what of them we can compute.

A folder holds adapter_config.json and adapter_model.safetensors. Whatever would make our result
differ from PEFT's is refused here, by name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparrow.models.spec import ModelSpec, check_only, naming, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# The decoder's projections, and the Hugging Face modules whose rows each one holds, in order.
FUSED: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
MODULES = tuple(module for modules in FUSED.values() for module in modules)
_PARENT = {
    module: "self_attn" if name in ("qkv", "out") else "mlp"
    for name, modules in FUSED.items()
    for module in modules
}
_NAME = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+)"
    r"\.lora_([AB])(?:\.default)?\.weight"
)

# Keys of PEFT that change the function of an adapter, with the only values that we compute.
# Absent means the first. Some ways to initialise (PiSSA, LoftQ, ...) also change the model.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "layer_replication"), (None, [])),
    **dict.fromkeys(("target_parameters", "trainable_token_indices"), (None, [], {})),
    **dict.fromkeys(("alpha_pattern", "megatron_config", "alora_invocation_tokens"), (None, {})),
    **dict.fromkeys(("kasa_config", "arrow_config", "monteclora_config", "use_bdlora"), (None,)),
}


class Place(NamedTuple):
    """Where a pair belongs."""

    layer: int
    module: str

    @property
    def path(self) -> str:
        return f"layers.{self.layer}.{_PARENT[self.module]}.{self.module}"

    def tensor(self, matrix: str) -> str:
        """PEFT's name of its A or B."""
        return f"base_model.model.model.{self.path}.lora_{matrix}.weight"


def module_sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every module that an adapter can change."""
    q, k, v = spec.qkv_sizes
    hidden, inner = spec.hidden, spec.intermediate
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, k),
        "v_proj": (hidden, v),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def checked_tensors(
    spec: ModelSpec, tensors: Mapping[str, Tensor]
) -> dict[tuple[Place, str], Tensor]:
    """The tensors by place and matrix, once every name, partner, shape and dtype is right."""
    found: dict[tuple[Place, str], Tensor] = {}
    for name, tensor in tensors.items():
        key = _parse(spec, name)
        if key in found:
            raise ValueError(f"tensor {name} is there twice, under two names")
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}, expected a float")
        found[key] = tensor
    if not found:
        raise ValueError("the adapter has no tensors, expected lora_A and lora_B of some module")
    for place in {place for place, _ in found}:
        for matrix in "AB":
            if (place, matrix) not in found:
                raise ValueError(f"tensor {place.tensor(matrix)} is missing beside its partner")
        _check_shapes(spec, place, found[place, "A"], found[place, "B"])
    return found


def _parse(spec: ModelSpec, name: str) -> tuple[Place, str]:
    match = _NAME.fullmatch(name)
    if match is None or _PARENT.get(match[3]) != match[2]:
        raise ValueError(
            f"tensor {name} is not known: expected {Place(0, 'q_proj').tensor('A')} or the like, "
            f"a lora_A or lora_B of {', '.join(MODULES)}"
        )
    if int(match[1]) >= spec.layers:
        raise ValueError(f"tensor {name}: the model has {spec.layers} layers, counted from 0")
    return Place(int(match[1]), match[3]), match[4]


def _check_shapes(spec: ModelSpec, place: Place, a: Tensor, b: Tensor) -> None:
    inputs, outputs = module_sizes(spec)[place.module]
    if a.dim() != 2 or a.shape[0] < 1 or a.shape[1] != inputs:
        raise ValueError(
            f"tensor {place.tensor('A')} has shape {[*a.shape]}, expected [rank, {inputs}]"
        )
    expected = [outputs, a.shape[0]]
    if [*b.shape] != expected:
        raise ValueError(f"tensor {place.tensor('B')} has shape {[*b.shape]}, expected {expected}")


def read_config(file: Path) -> dict[str, Any]:
    """PEFT's config, without keys that ask for more than plain LoRA."""
    config = read_json(file)
    with naming(file):
        check_only(config, _ONLY)
        _check_kinds(config)
    return config


def _check_kinds(config: Mapping[str, Any]) -> None:
    if type(config.get("r")) is not int:
        raise ValueError(f"r must be a whole number, got {config.get('r')!r:.80}")
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict) or any(type(rank) is not int for rank in pattern.values()):
        raise ValueError(f"rank_pattern must be whole numbers by module, got {pattern!r:.80}")
    if config.get("lora_alpha") is None:
        raise ValueError("the key 'lora_alpha' is missing")
    targets = config.get("target_modules")
    names = targets if isinstance(targets, list) else [targets or ""]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"target_modules must be text or a list of texts, got {targets!r:.80}")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ValueError(f"use_rslora must be true or false, got {config['use_rslora']!r:.80}")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's file, on the CPU."""
    if not file.is_file():
        raise ValueError(f"{file}: no such file (only safetensors are read)")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file: {error}") from error


def check_config_fits(config: Mapping[str, Any], ranks: Mapping[Place, int]) -> None:
    """The config speaks of the ranks and modules that the tensors have, or it is not theirs."""
    said = {config["r"], *(config.get("rank_pattern") or {}).values()}
    for place, rank in ranks.items():
        if rank not in said:
            raise ValueError(
                f"tensor {place.tensor('A')} has rank {rank}, r and rank_pattern say {sorted(said)}"
            )
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else []:  # text is a pattern: tensors decide
        if target.rpartition(".")[2] not in MODULES:
            raise ValueError(f"target_modules: {target!r} is none of {', '.join(MODULES)}")
        if not any(f".model.{place.path}".endswith(f".{target}") for place in ranks):
            raise ValueError(f"target_modules: {target!r} has no tensors in {WEIGHTS}")
