"""LoRA adapters: low-rank updates of a model's projections, chosen per token.

An adapter adds scale * B A x to projections of the decoder. `Adapter` keeps A and B per Hugging
Face module, as PEFT stores them, and is a `decoder.Lora` for all tokens, with gradients: training.
`AdapterBank` holds the adapters of a rollout in memory whose addresses never change, so that a
CUDA graph outlives loading one; its `rows` are `decoder.Updates` in which each token names its own.
`MergedDecoder` has one adapter in its weights, and costs no more than the model itself.

PEFT's folders hold adapter_config.json and adapter_model.safetensors. Whatever would make our
result differ from PEFT's is refused, by name.

Dimension letters beside those of sparrow/ops/types.py: I inputs of a projection, E its outputs,
R here the rank, L layers; in a bank those of `ops.LowRank`.
"""

import copy
import itertools
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sparrow import ops
from sparrow.files import verify, write_sums
from sparrow.models.decoder import Decoder, DecoderLayer, Updates
from sparrow.models.spec import FileKeys, ModelSpec, naming, read_json, write_json
from sparrow.models.weights import hf_views, save_tensors, stored_tensors

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
RANKS = 16  # a slot of a bank has room for a multiple of it
_PARENT = {
    module: "self_attn" if name in ("qkv", "out") else "mlp"
    for name, modules in FUSED.items()
    for module in modules
}
_NAME = re.compile(r"(?:base_model\.model\.)?(model\..*\.lora_[AB])(?:\.default)?\.weight")

# Keys of PEFT that ask for more than plain LoRA, unless they are false or empty.
_MORE = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora", "modules_to_save"),
    *("layer_replication", "target_parameters", "trainable_token_indices", "alpha_pattern"),
    *("megatron_config", "alora_invocation_tokens", "kasa_config", "arrow_config"),
    "monteclora_config",
)


class PeftConfig(FileKeys):
    """adapter_config.json. Some ways to initialise (PiSSA, LoftQ, ...) also change the model."""

    r: int
    lora_alpha: int | float
    rank_pattern: dict[str, int] | None = None
    target_modules: str | list[str] | None = None
    use_rslora: bool | None = None
    peft_type: Literal["LORA"] = "LORA"
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva"] | None = None

    @classmethod
    def read(cls, file: Path) -> "PeftConfig":
        """A config that asks for plain LoRA; all else is refused by key."""
        config = read_json(file)
        with naming(file):
            for key in _MORE:
                if config.get(key):
                    raise ValueError(f"{key}={config[key]!r:.80} is not supported")
            return cls.model_validate(config)


class LoraTarget(NamedTuple):
    """The module of a layer that a LoRA pair updates."""

    layer: int
    module: str

    @property
    def path(self) -> str:
        return f"layers.{self.layer}.{_PARENT[self.module]}.{self.module}"

    @property
    def weight(self) -> str:
        """The Hugging Face name of its weight."""
        return f"model.{self.path}.weight"

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


def _checked_tensors(
    spec: ModelSpec, tensors: Mapping[str, Tensor]
) -> dict[tuple[LoraTarget, str], Tensor]:
    """Return tensors by target and matrix, after checking names, partners, shapes and dtypes."""
    places = [LoraTarget(layer, module) for layer in range(spec.layers) for module in MODULES]
    keys = {place.tensor(matrix): (place, matrix) for place in places for matrix in "AB"}
    checked: dict[tuple[LoraTarget, str], Tensor] = {}
    for name, tensor in tensors.items():
        key = keys.get(_NAME.sub(r"base_model.model.\1.weight", name))
        if key is None:
            raise ValueError(
                f"tensor {name} is not known: expected {places[0].tensor('A')} or the like, a "
                f"lora_A or lora_B of {', '.join(MODULES)} in layers 0 to {spec.layers - 1}"
            )
        if key in checked:
            raise ValueError(f"tensor {name} is there twice, under two names")
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}, expected a float")
        checked[key] = tensor
    if not checked:
        raise ValueError("the adapter has no tensors, expected lora_A and lora_B of some module")
    for place in {place for place, _ in checked}:
        for matrix in "AB":
            if (place, matrix) not in checked:
                raise ValueError(f"tensor {place.tensor(matrix)} is missing beside its partner")
        _check_shapes(spec, place, checked[place, "A"], checked[place, "B"])
    return checked


def _check_shapes(spec: ModelSpec, place: LoraTarget, a: Tensor, b: Tensor) -> None:
    inputs, outputs = module_sizes(spec)[place.module]
    if a.dim() != 2 or a.shape[0] < 1 or a.shape[1] != inputs:
        raise ValueError(
            f"tensor {place.tensor('A')} has shape {[*a.shape]}, expected [rank, {inputs}]"
        )
    expected = [outputs, a.shape[0]]
    if [*b.shape] != expected:
        raise ValueError(f"tensor {place.tensor('B')} has shape {[*b.shape]}, expected {expected}")


def _check_config_fits(config: PeftConfig, ranks: Mapping[LoraTarget, int]) -> None:
    """Check that the config's ranks and modules are those of the tensors."""
    allowed = {config.r, *(config.rank_pattern or {}).values()}
    for place, rank in ranks.items():
        if rank not in allowed:
            raise ValueError(
                f"tensor {place.tensor('A')} has rank {rank}, expected one of r and "
                f"rank_pattern: {sorted(allowed)}"
            )
    targets = config.target_modules
    for target in targets if isinstance(targets, list) else []:  # text is a pattern: tensors decide
        if target.rpartition(".")[2] not in MODULES:
            raise ValueError(f"target_modules: {target!r} is none of {', '.join(MODULES)}")
        if not any(f".model.{place.path}".endswith(f".{target}") for place in ranks):
            raise ValueError(f"target_modules: {target!r} has no tensors in {WEIGHTS}")


class LoraPair(NamedTuple):
    """The two matrices of one module; leaves, so that they can be trained."""

    a_RI: Tensor
    b_ER: Tensor

    @property
    def rank(self) -> int:
        return self.a_RI.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """The matrices of one adapter; any subset of modules and layers, each with a rank of its own.

    As a `decoder.Lora` it serves every token, and gradients reach the pairs. To train it, ask the
    tensors for gradients: `for tensor in adapter.tensors().values(): tensor.requires_grad_()`.
    """

    spec: ModelSpec
    alpha: float
    rslora: bool
    pairs: Mapping[LoraTarget, LoraPair]

    @classmethod
    def from_state(
        cls,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        *,
        alpha: float,
        rslora: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "Adapter":
        """Copies of PEFT's tensors; a ValueError names the one that does not fit."""
        if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
            raise ValueError(f"alpha must be a finite number, got {alpha!r}")
        checked = _checked_tensors(spec, tensors)
        places = sorted({place for place, _ in checked})

        def leaf(place: LoraTarget, matrix: str) -> Tensor:
            return checked[place, matrix].detach().to(device, dtype, copy=True).contiguous()

        pairs = {place: LoraPair(leaf(place, "A"), leaf(place, "B")) for place in places}
        return cls(spec=spec, alpha=alpha, rslora=rslora, pairs=pairs)

    @classmethod
    def random(
        cls,
        spec: ModelSpec,
        rank: int,
        *,
        alpha: float | None = None,
        modules: Iterable[str] = MODULES,
        layers: Iterable[int] | None = None,
        b_std: float = 0.02,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "Adapter":
        """Random matrices, for tests and benches; with `b_std=0` the start of a training."""
        generator = torch.Generator().manual_seed(seed)
        sizes, chosen = module_sizes(spec), tuple(modules)
        tensors: dict[str, Tensor] = {}
        for layer in range(spec.layers) if layers is None else layers:
            for place in (LoraTarget(layer, module) for module in chosen):
                inputs, outputs = sizes[place.module]
                a_RI = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
                tensors[place.tensor("A")] = a_RI
                tensors[place.tensor("B")] = b_std * torch.randn(outputs, rank, generator=generator)
        alpha = rank if alpha is None else alpha
        return cls.from_state(spec, tensors, alpha=alpha, dtype=dtype, device=device)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "Adapter":
        """Read a folder that PEFT wrote; what we would compute differently is refused."""
        source = Path(folder).expanduser()
        verify(source, (CONFIG, WEIGHTS))
        config = PeftConfig.read(source / CONFIG)
        stored = stored_tensors([source / WEIGHTS])
        tensors = {name: tensor.data[...] for name, tensor in stored.items()}
        alpha, rslora = config.lora_alpha, bool(config.use_rslora)
        with naming(source):
            adapter = cls.from_state(
                spec, tensors, alpha=alpha, rslora=rslora, dtype=dtype, device=device
            )
            _check_config_fits(config, {place: pair.rank for place, pair in adapter.pairs.items()})
            adapter.check_finite()
        return adapter

    def check_finite(self) -> None:
        """Raise a ValueError that names a tensor with numbers that are not finite."""
        for name, tensor in self.tensors().items():
            if not tensor.isfinite().all():
                raise ValueError(f"tensor {name} holds numbers that are not finite")

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write PEFT's two files and their digests into a folder, over those of an earlier save."""
        target = Path(folder).expanduser()
        target.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach() for name, tensor in self.tensors().items()}
        save_tensors(tensors, target / WEIGHTS)
        write_json(target / CONFIG, self._config())
        write_sums(target, (WEIGHTS, CONFIG))
        return target

    def tensors(self) -> dict[str, Tensor]:
        """A and B of every module by PEFT's names; the leaves themselves, not copies."""
        return {
            place.tensor(matrix): tensor
            for place, pair in self.pairs.items()
            for matrix, tensor in zip("AB", pair, strict=True)
        }

    def to(self, dtype: torch.dtype) -> "Adapter":
        """The same adapter in another dtype; gradients reach its own tensors."""
        pairs = {
            place: LoraPair(pair.a_RI.to(dtype), pair.b_ER.to(dtype))
            for place, pair in self.pairs.items()
        }
        return replace(self, pairs=pairs)

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(pair.rank for pair in self.pairs.values())

    def scale(self, rank: int) -> float:
        """What B A of a module of this rank is multiplied by."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def merged(self, place: LoraTarget, weight_EI: Tensor) -> Tensor:
        """A module's weight with its update, W + scale * B A, in float32; as it is without one."""
        if (pair := self.pairs.get(place)) is None:
            return weight_EI
        return weight_EI.float() + pair.b_ER.float() @ pair.a_RI.float() * self.scale(pair.rank)

    @torch.no_grad()
    def merge_into(self, model: Decoder) -> None:
        """Add it to the weights of a model, for good."""
        weights = hf_views(model)
        for place in self.pairs:
            weights[place.weight].copy_(self.merged(place, weights[place.weight]))

    def __call__(self, layer: int, name: str, x: Tensor, linear: nn.Linear, /) -> Tensor:
        pairs = [self.pairs.get(LoraTarget(layer, module)) for module in FUSED[name]]
        if all(pair is None for pair in pairs):
            return linear(x)
        outputs = [module_sizes(self.spec)[module][1] for module in FUSED[name]]
        a_RI = torch.cat([pair.a_RI for pair in pairs if pair is not None])
        b_ER = self._blocks(pairs, outputs)
        bias = None if linear.bias is None else linear.bias.detach()
        projected: Tensor = _MergedLinear.apply(x, linear.weight.detach(), bias, a_RI, b_ER)
        return projected

    def _blocks(self, pairs: Sequence[LoraPair | None], outputs: Sequence[int]) -> Tensor:
        """B of a projection's modules, scaled, each in its own rows and ranks; zeros elsewhere."""
        given = [pair for pair in pairs if pair is not None]
        rank, before, rows = sum(pair.rank for pair in given), 0, []
        for pair, size in zip(pairs, outputs, strict=True):
            if pair is None:
                rows.append(given[0].b_ER.new_zeros(size, rank))
                continue
            sides = (before, rank - before - pair.rank)
            rows.append(nn.functional.pad(pair.b_ER * self.scale(pair.rank), sides))
            before += pair.rank
        return torch.cat(rows)

    def _config(self) -> dict[str, Any]:
        """PEFT's config; modules by their short names where every layer has them."""
        modules = {place.module for place in self.pairs}
        whole = len(self.pairs) == len(modules) * self.spec.layers
        ranks = {place.path: pair.rank for place, pair in self.pairs.items()}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(modules) if whole else list(ranks),
            "rank_pattern": {path: rank for path, rank in ranks.items() if rank != self.rank},
        }


class _MergedLinear(torch.autograd.Function):
    """x (W + B A)^T + bias: one product over all tokens, as in a `MergedDecoder`.

    W and bias are frozen. Gradients of A and B are made from their factors, never from that of the
    merged weight.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_EI: Tensor, bias_E: Tensor | None, a_RI: Tensor, b_ER: Tensor
    ) -> Tensor:
        merged_EI = torch.addmm(weight_EI, b_ER, a_RI)
        ctx.save_for_backward(x_TI, merged_EI, a_RI, b_ER)
        return nn.functional.linear(x_TI, merged_EI, bias_E)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, merged_EI, a_RI, b_ER = ctx.saved_tensors
        wanted_x, _, _, wanted_a, wanted_b = ctx.needs_input_grad
        grad_x = grad_TE @ merged_EI if wanted_x else None
        grad_a = (grad_TE @ b_ER).T @ x_TI if wanted_a else None
        grad_b = grad_TE.T @ (x_TI @ a_RI.T) if wanted_b else None
        return grad_x, None, None, grad_a, grad_b


class MergedDecoder:
    """A decoder whose weights hold an adapter, W + scale * B A; it shares all others with a model.

    Weights of its own have memory between `allocate` and `free`; `renew` writes them in place, so
    that a CUDA graph outlives new weights of the model and another adapter of the same projections.
    """

    def __init__(self, model: Decoder, adapter: Adapter) -> None:
        shared = {id(part): part for part in (*model.parameters(), model._rotations)}
        self.model, self.decoder = model, copy.deepcopy(model, shared)
        models = model, self.decoder
        self._linears = [
            tuple(_linear(each, *place) for each in models) for place in _projections(adapter)
        ]
        for plain, own in self._linears:
            own.weight = nn.Parameter(plain.weight.new_empty(0), requires_grad=False)
        self._keep(adapter)

    def load(self, adapter: Adapter) -> bool:
        """Take another adapter from the next `renew` on; False if it changes other projections."""
        same = _projections(adapter) == _projections(self.adapter)
        if same:
            self._keep(adapter)
        return same

    def _keep(self, adapter: Adapter) -> None:
        """Keep a copy, as later changes of the adapter must not be seen."""
        kind: dict[str, Any] = {"dtype": torch.float32, "device": self.model.device}
        scaling: dict[str, Any] = {"alpha": adapter.alpha, "rslora": adapter.rslora}
        self.adapter = Adapter.from_state(adapter.spec, adapter.tensors(), **scaling, **kind)
        self._edition: int | None = None  # that of the model's weights which were merged

    def allocate(self) -> None:
        for plain, own in self._linears:
            if not own.weight.numel():
                own.weight.data = torch.empty_like(plain.weight)
                self._edition = None

    def free(self) -> None:
        for _, own in self._linears:
            own.weight.data = own.weight.new_empty(0)

    @torch.no_grad()
    def renew(self) -> None:
        """Merge, unless the adapter and the model's edition are those of the last time."""
        if self._edition == self.model.edition:
            return
        plain, own = hf_views(self.model), hf_views(self.decoder)
        for layer, projection in _projections(self.adapter):
            for place in (LoraTarget(layer, module) for module in FUSED[projection]):
                own[place.weight].copy_(self.adapter.merged(place, plain[place.weight]))
        self._edition = self.model.edition
        self.decoder.edition += 1


def _projections(adapter: Adapter) -> list[tuple[int, str]]:
    """The decoder's projections that an adapter changes, each with its layer."""
    fused = {module: name for name, modules in FUSED.items() for module in modules}
    return sorted({(place.layer, fused[place.module]) for place in adapter.pairs})


def _linear(model: Decoder, layer: int, name: str) -> nn.Linear:
    block = model.layers[layer]
    assert isinstance(block, DecoderLayer)
    return getattr(block.attention if name in ("qkv", "out") else block.mlp, name)


class Stacks(NamedTuple):
    """One projection's matrices, all layers and slots, as `ops.LowRank` has them of a layer.

    Parts are the projection's modules, and B is already multiplied by the scale.
    """

    a_LRI: Tensor
    b_LEQ: Tensor


class AdapterSlot(NamedTuple):
    """A slot of a bank (0: no adapter), and the edition of the adapter in it."""

    slot: int
    edition: int

    @property
    def root(self) -> bytes:
        """Root of the prefix keys: KV computed with one edition is not shared with another."""
        return f"adapter edition {self.edition}".encode()


NO_ADAPTER = AdapterSlot(0, 0)


def bank_size(spec: ModelSpec, capacity: int, max_rank: int) -> int:
    """Numbers that an `AdapterBank` has room for."""
    sizes = module_sizes(spec).values()
    return spec.layers * capacity * _room(max_rank) * sum(map(sum, sizes))


def _room(max_rank: int) -> int:
    """Ranks of a slot: kernels read whole blocks of `RANKS`."""
    return -(-max_rank // RANKS) * RANKS


class AdapterBank:
    """Room for `capacity` adapters of one model, by name, in slots from 1; 0 stands for none.

    Memory is taken by the first `put` and kept; from then on adapters are copied in place.
    """

    def __init__(
        self,
        spec: ModelSpec,
        capacity: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if capacity < 1 or max_rank < 1:
            raise ValueError(f"capacity and max_rank must be positive: {capacity}, {max_rank}")
        self.spec = spec
        self.capacity = capacity
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = torch.device(device)
        self._slots: dict[str, AdapterSlot] = {}
        self._editions = itertools.count(1)
        self._stacks: dict[str, Stacks] = {}
        sizes = module_sizes(spec)
        self._parts = {n: tuple(sizes[module][1] for module in FUSED[n]) for n in FUSED}

    def find(self, name: str | None) -> AdapterSlot:
        """The slot of an adapter; None is no adapter."""
        if name is None:
            return NO_ADAPTER
        if name not in self._slots:
            loaded = ", ".join(sorted(self._slots)) or "none"
            raise ValueError(f"no adapter {name!r} is loaded; loaded: {loaded}")
        return self._slots[name]

    def put(self, name: str, adapter: Adapter) -> AdapterSlot:
        """Copy an adapter in under a new name, or in place of the one that has it.

        Its later changes are not seen. Numbers that are not finite, as they are or in the bank's
        dtype, are refused: a product over all slots would spread them.
        """
        if adapter.spec != self.spec:
            raise ValueError("the adapter was made for another model spec than the bank's")
        if adapter.rank > self.max_rank:
            raise ValueError(f"rank {adapter.rank} exceeds the bank's max_rank {self.max_rank}")
        self._check_finite(adapter)
        free = set(range(1, self.capacity + 1)) - self._held
        if name not in self._slots and not free:
            raise ValueError(
                f"no room for adapter {name!r}: {sorted(self._slots)} are loaded; drop one, or "
                "build the engine with more adapters"
            )
        slot = self._slots[name].slot if name in self._slots else min(free)
        if not self._stacks:
            self._allocate()
        self._clear(slot)
        for place, pair in adapter.pairs.items():
            self._write(slot, place, pair, adapter.scale(pair.rank))
        self._slots[name] = AdapterSlot(slot, next(self._editions))
        return self._slots[name]

    def drop(self, name: str) -> None:
        """Empty an adapter's slot; its memory stays."""
        self._clear(self.find(name).slot)
        del self._slots[name]

    @property
    def _held(self) -> set[int]:
        return {held.slot for held in self._slots.values()}

    def _check_finite(self, adapter: Adapter) -> None:
        adapter.check_finite()
        for place, (a_RI, b_ER) in adapter.pairs.items():
            scaled_ER = b_ER.detach() * adapter.scale(len(a_RI))
            for matrix, tensor in (("A", a_RI), ("B", scaled_ER)):
                if not tensor.to(self.dtype).isfinite().all():
                    name = place.tensor(matrix)
                    raise ValueError(f"tensor {name}, scaled, is too large for {self.dtype}")

    def _clear(self, slot: int) -> None:
        for name in self._stacks:
            for places in self._places(name, slot):
                places.zero_()

    def rows(self, rows_T: Tensor) -> "LoraRows | None":
        """What a decoder takes as `lora` where token t uses slot rows_T[t]; None: no adapters yet.

        rows_T is read by the products: under a CUDA graph it is made inside the captured step. That
        every row is 0 or a slot in use is checked on a CPU; on a GPU it is the caller's contract.
        """
        if rows_T.device.type == "cpu" and (wrong := set(rows_T.tolist()) - self._held - {0}):
            raise ValueError(f"rows name slots {sorted(wrong)}, in use are {sorted(self._held)}")
        if not self._stacks:
            return None
        rows = ops.RowSlots(slots_T=rows_T, count=self.capacity)
        return LoraRows(stacks=self._stacks, parts=self._parts, rows=rows)

    def _allocate(self) -> None:
        ranks = self.capacity * _room(self.max_rank)
        for name, parts in self._parts.items():
            inputs = module_sizes(self.spec)[FUSED[name][0]][0]
            layers = self.spec.layers
            shapes = (layers, len(parts) * ranks, inputs), (layers, sum(parts), ranks)
            a_LRI, b_LEQ = (torch.zeros(s, dtype=self.dtype, device=self.device) for s in shapes)
            self._stacks[name] = Stacks(a_LRI, b_LEQ)

    def _write(self, slot: int, place: LoraTarget, pair: LoraPair, scale: float) -> None:
        name = next(name for name, modules in FUSED.items() if place.module in modules)
        index = FUSED[name].index(place.module)
        a_LMRI, b_LER = self._places(name, slot)
        b_ER = b_LER[place.layer].split(self._parts[name])[index]
        a_LMRI[place.layer, index, : pair.rank].copy_(pair.a_RI.detach())
        b_ER[:, : pair.rank].copy_(pair.b_ER.detach() * scale)

    def _places(self, name: str, slot: int) -> tuple[Tensor, Tensor]:
        """A of a slot by layer and module, and B by layer: views, R the ranks of the slot."""
        a_LRI, b_LEQ = self._stacks[name]
        a_LMSRI = a_LRI.unflatten(1, (len(FUSED[name]), self.capacity, -1))
        return a_LMSRI[:, :, slot - 1], b_LEQ.unflatten(2, (self.capacity, -1))[:, :, slot - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRows(Updates):
    """A batch whose tokens use adapters of a bank, each its own or none."""

    stacks: Mapping[str, Stacks]
    parts: Mapping[str, tuple[int, ...]]
    rows: ops.RowSlots

    def update(self, layer: int, name: str, /) -> ops.LowRank:
        a_LRI, b_LEQ = self.stacks[name]
        a_RI, b_EQ = a_LRI[layer], b_LEQ[layer]
        return ops.LowRank(a_RI=a_RI, b_EQ=b_EQ, parts=self.parts[name], rows=self.rows)
