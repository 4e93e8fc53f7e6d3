"""LoRA adapters: one model's weights, and per token a small difference of one's own.

An adapter adds scale * B A x to projections of the decoder. `Adapter` keeps A and B per Hugging
Face module, as PEFT stores them, and is a `decoder.Lora` for all tokens, with gradients: training.
`AdapterBank` holds the adapters of a rollout in memory whose addresses never change, so that a
CUDA graph outlives loading one; its `rows` are a `decoder.Lora` in which each token names its own.

Dimension letters beside those of sparrow/ops/types.py: I inputs of a projection, E its outputs,
R here the rank, in a bank that of all slots side by side.
"""

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparrow.files import verify, write_sums
from sparrow.models.peft_format import (
    CONFIG,
    FUSED,
    MODULES,
    WEIGHTS,
    Place,
    check_config_fits,
    checked_tensors,
    module_sizes,
    read_config,
    read_tensors,
)
from sparrow.models.spec import ModelSpec, naming, write_json
from sparrow.models.weights import save_tensors


class Pair(NamedTuple):
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
    pairs: Mapping[Place, Pair]

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
        found = checked_tensors(spec, tensors)
        places = sorted({place for place, _ in found})

        def leaf(place: Place, matrix: str) -> Tensor:
            return found[place, matrix].detach().to(device, dtype, copy=True).contiguous()

        pairs = {place: Pair(leaf(place, "A"), leaf(place, "B")) for place in places}
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
            for place in (Place(layer, module) for module in chosen):
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
        config = read_config(source / CONFIG)
        tensors = read_tensors(source / WEIGHTS)
        alpha, rslora = config["lora_alpha"], bool(config.get("use_rslora"))
        with naming(source):
            adapter = cls.from_state(
                spec, tensors, alpha=alpha, rslora=rslora, dtype=dtype, device=device
            )
            check_config_fits(config, {place: pair.rank for place, pair in adapter.pairs.items()})
        return adapter

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

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(pair.rank for pair in self.pairs.values())

    def scale(self, rank: int) -> float:
        """What B A of a module of this rank is multiplied by."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def __call__(self, layer: int, name: str, x: Tensor, projected: Tensor, /) -> Tensor:
        pairs = [self.pairs.get(Place(layer, module)) for module in FUSED[name]]
        if all(pair is None for pair in pairs):
            return projected
        outputs = [module_sizes(self.spec)[module][1] for module in FUSED[name]]
        parts = zip(pairs, projected.split(outputs, dim=-1), strict=True)
        return torch.cat(
            [part if pair is None else part + self._delta(pair, x) for pair, part in parts], dim=-1
        )

    def _delta(self, pair: Pair, x: Tensor) -> Tensor:
        return (x @ pair.a_RI.T) @ pair.b_ER.T * self.scale(pair.rank)

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


class Stacks(NamedTuple):
    """One projection's matrices, all layers and slots: [L, R, I] and [L, E, R].

    Ranks are ordered by slot, then by module of the projection, `max_rank` each; B holds zeros
    where a rank meets another module's outputs, and is already multiplied by the scale.
    """

    a_LRI: Tensor
    b_LER: Tensor


class AdapterBank:
    """Room for `capacity` adapters of one model, numbered from 1; 0 stands for none.

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
        self.held: set[int] = set()
        self._stacks: dict[str, Stacks] = {}

    def put(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter into a slot, in place of what was there; its later changes are not seen.

        Numbers that are not finite are refused: a product over all slots would spread them.
        """
        self._check(slot)
        if adapter.spec != self.spec:
            raise ValueError("the adapter was made for another model spec than the bank's")
        if adapter.rank > self.max_rank:
            raise ValueError(f"rank {adapter.rank} exceeds the bank's max_rank {self.max_rank}")
        for name, tensor in adapter.tensors().items():
            if not tensor.isfinite().all():
                raise ValueError(f"tensor {name} holds numbers that are not finite")
        if not self._stacks:
            self._allocate()
        self.clear(slot)
        for place, pair in adapter.pairs.items():
            self._write(slot, place, pair, adapter.scale(pair.rank))
        self.held.add(slot)

    def clear(self, slot: int) -> None:
        """Empty a slot; its memory stays."""
        self._check(slot)
        for name, (a_LRI, b_LER) in self._stacks.items():
            ranks = self._ranks(slot, name)
            a_LRI[:, ranks].zero_()
            b_LER[:, :, ranks].zero_()
        self.held.discard(slot)

    def rows(self, rows_T: Tensor) -> "LoraRows | None":
        """What a decoder takes as `lora` where token t uses slot rows_T[t]; None: no adapters yet.

        Reads rows_T now: under a CUDA graph call it inside the captured step. That every row is 0
        or a slot in use is checked on a CPU; on a GPU it is the caller's contract.
        """
        if rows_T.device.type == "cpu" and (wrong := set(rows_T.tolist()) - self.held - {0}):
            raise ValueError(f"rows name slots {sorted(wrong)}, in use are {sorted(self.held)}")
        if not self._stacks:
            return None
        slots_S = torch.arange(1, self.capacity + 1, device=rows_T.device)
        return LoraRows(
            stacks=self._stacks,
            uses_TS1=(rows_T[:, None] == slots_S)[:, :, None],
            any_T1=(rows_T != 0)[:, None],
        )

    def _allocate(self) -> None:
        sizes = module_sizes(self.spec)
        for name, modules in FUSED.items():
            inputs, outputs = sizes[modules[0]][0], sum(sizes[module][1] for module in modules)
            ranks = self.capacity * len(modules) * self.max_rank
            shapes = (self.spec.layers, ranks, inputs), (self.spec.layers, outputs, ranks)
            a_LRI, b_LER = (torch.zeros(s, dtype=self.dtype, device=self.device) for s in shapes)
            self._stacks[name] = Stacks(a_LRI, b_LER)

    def _write(self, slot: int, place: Place, pair: Pair, scale: float) -> None:
        name = next(name for name, modules in FUSED.items() if place.module in modules)
        index = FUSED[name].index(place.module)
        rank = self._ranks(slot, name).start + index * self.max_rank
        sizes = module_sizes(self.spec)
        row = sum(sizes[module][1] for module in FUSED[name][:index])
        ranks = slice(rank, rank + pair.rank)
        rows = slice(row, row + sizes[place.module][1])
        self._stacks[name].a_LRI[place.layer, ranks].copy_(pair.a_RI.detach())
        self._stacks[name].b_LER[place.layer, rows, ranks].copy_(pair.b_ER.detach() * scale)

    def _ranks(self, slot: int, name: str) -> slice:
        width = len(FUSED[name]) * self.max_rank
        return slice((slot - 1) * width, slot * width)

    def _check(self, slot: int) -> None:
        if not 1 <= slot <= self.capacity:
            raise ValueError(f"slot must be from 1 to {self.capacity}, got {slot}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRows:
    """A batch whose tokens use adapters of a bank, each its own or none: a `decoder.Lora`.

    One product with the A of all slots, zeros where a token does not use the slot, one product
    with all B: two products a projection, however many adapters. Nothing waits for the device.
    """

    stacks: Mapping[str, Stacks]
    uses_TS1: Tensor
    any_T1: Tensor

    def __call__(self, layer: int, name: str, x: Tensor, projected: Tensor, /) -> Tensor:
        a_LRI, b_LER = self.stacks[name]
        low_TR = x @ a_LRI[layer].T
        low_TSR = low_TR.unflatten(1, (self.uses_TS1.shape[1], -1))
        low_TR = torch.where(self.uses_TS1, low_TSR, 0).flatten(1)
        return torch.where(self.any_T1, projected + low_TR @ b_LER[layer].T, projected)
