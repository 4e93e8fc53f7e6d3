"""Types of the ops: dimension letters, page lists, and the page cache.

Dimension letters, used as suffixes in every tensor name of this folder:

    B  sequences (rows of a batch)    T  tokens, packed over sequences   n  tokens of one block
    H  query heads                    G  KV heads                        R  query heads per KV head
    D  head size                      N  physical pages in the pool      P  tokens in a page
    M  pages of a sequence (table)    K  width of a page list            S  tokens of a sequence
    C  hidden size                    V  vocabulary

Query head h belongs to KV head h // R, as in Hugging Face checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class PageLists(NamedTuple):
    """The pages that each row and KV head attends to.

    pages  int32 [B, G, K]  logical page numbers (0 = first page of the sequence), ascending;
                            entries at or beyond the count are void; pages that a row
                            has not reached are skipped
    counts int32 [B, G]     how many entries of each list are valid
    """

    pages: Tensor
    counts: Tensor


Scores = Callable[[int, int], Tensor]
"""Scores of the queries start to stop of one sequence, [n, G, stop // page]: of the pages that are
finished at the end of the range. Pages that a query does not have yet may score anything."""

Scorer = Callable[[Tensor, Tensor, Tensor, int, Tensor], Scores]
"""Scores the pages of one sequence, from its q, k and v [S, heads, D], the number of its first
tokens that are dense, and the budgets of all, [S] or [S, G]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A named block of numbers kept per KV head: the shape of one block and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: float = 0.0  # initial value of a state

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def kv_fields(page: int, head_size: int, dtype: torch.dtype) -> tuple[Field, ...]:
    """Fields of keys and values; a sparse rule declares its own."""
    return (
        Field(name="k", shape=(page, head_size), dtype=dtype),
        Field(name="v", shape=(page, head_size), dtype=dtype),
    )


class RowState(NamedTuple):
    """State of R resident sequences on the device, one row each.

    token, length (tokens in the cache, -1: no sequence), seed and drawn (tokens drawn so far) are
    int64 [R], temperature is fp32 [R], the page table int32 [R, M].
    """

    token_R: Tensor
    length_R: Tensor
    seed_R: Tensor
    drawn_R: Tensor
    temperature_R: Tensor
    table_RM: Tensor


class DraftState(NamedTuple):
    """Drafts of R resident sequences since their last verification, at most J of each.

    count is int64 [R]; inputs, the token that each draft step read, int64 [R, J]; logprobs, log q
    of the drafts, fp32 [R, J]; logits of q fp32 [R, J, V].
    """

    count_R: Tensor
    inputs_RJ: Tensor
    logprobs_RJ: Tensor
    logits_RJV: Tensor


class StepInputs(NamedTuple):
    """Inputs of a decode step of B rows, see `ops.step_inputs`; of a verification by query."""

    ids_B: Tensor
    positions_B: Tensor
    lengths_B: Tensor
    slots_B: Tensor
    table_BM: Tensor
    seeds_B: Tensor
    counters_B: Tensor
    temperature_B: Tensor


LARGEST_INT8 = 127
CHUNK_NUMBERS = 1 << 24  # weights that are quantised at once, which takes fp32 memory


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A weight matrix in 8 bits: data_EI * scale_E[:, None], whole numbers from -127 to 127.

    data is int8 [E, I], scale fp32 [E]: the greatest magnitude of an output's weights over 127.
    """

    data_EI: Tensor
    scale_E: Tensor

    @classmethod
    def empty_like(cls, weight_EI: Tensor) -> "Int8Weight":
        scale_E = torch.empty(len(weight_EI), dtype=torch.float32, device=weight_EI.device)
        return cls(torch.empty_like(weight_EI, dtype=torch.int8), scale_E)

    @classmethod
    def quantise(cls, weight_EI: Tensor) -> "Int8Weight":
        return cls.empty_like(weight_EI).copy_(weight_EI)

    def copy_(self, weight_EI: Tensor) -> "Int8Weight":
        """Quantise a matrix in place, to nearest; rows at a time, so that little memory is used."""
        rows = max(1, CHUNK_NUMBERS // weight_EI.shape[1])
        parts = (self.data_EI, self.scale_E, weight_EI)
        for data_nI, scale_n, weight_nI in zip(*(p.split(rows) for p in parts), strict=True):
            wide_nI = weight_nI.float()
            scale_n.copy_(wide_nI.abs().amax(1) / LARGEST_INT8)
            step_n1 = torch.where(scale_n > 0, scale_n, 1.0)[:, None]
            data_nI.copy_((wide_nI / step_n1).round_().clamp_(-LARGEST_INT8, LARGEST_INT8))
        return self

    def dequantised(self) -> Tensor:
        """The fp32 matrix that it stands for."""
        return self.data_EI.float() * self.scale_E[:, None]

    @property
    def shape(self) -> torch.Size:
        return self.data_EI.shape

    def __len__(self) -> int:
        return len(self.data_EI)

    @property
    def nbytes(self) -> int:
        return self.data_EI.nbytes + self.scale_E.nbytes


Weight = Tensor | Int8Weight


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSlots:
    """The slot of low-rank updates that each row of a batch uses: 1 to `count`, or 0 for none.

    One object serves all products of a batch, so its masks are computed once.
    """

    slots_T: Tensor
    count: int

    @cached_property
    def uses_TS(self) -> Tensor:
        """Whether row t uses slot s + 1."""
        slots_S = torch.arange(1, self.count + 1, device=self.slots_T.device)
        return self.slots_T[:, None] == slots_S

    @cached_property
    def any_T1(self) -> Tensor:
        return (self.slots_T != 0)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRank:
    """Low-rank updates of a product, chosen per row: row t adds B A x with A and B of its slot.

    The outputs are cut into parts with ranks of their own, as modules that share a weight. S slots,
    M parts, and r ranks of a part and slot:

    a_RI    R = M S r, in this order: ranks of all slots of the first part, then of the second
    b_EQ    Q = S r: an output has the ranks of its own part only
    parts   outputs of each part
    """

    a_RI: Tensor
    b_EQ: Tensor
    parts: tuple[int, ...]
    rows: RowSlots

    @property
    def rank(self) -> int:
        """r, of one part and slot."""
        return self.b_EQ.shape[1] // self.rows.count

    def check(self, tokens: int, inputs: int, outputs: int) -> None:
        """Raise a ValueError unless it fits a product of these sizes."""
        ranks = self.b_EQ.shape[1]
        for name, found, expected in (
            ("a_RI", [*self.a_RI.shape], [len(self.parts) * ranks, inputs]),
            ("b_EQ", [*self.b_EQ.shape], [outputs, self.rank * self.rows.count]),
            ("parts", sum(self.parts), outputs),
            ("slots_T", [*self.rows.slots_T.shape], [tokens]),
        ):
            if found != expected:
                raise ValueError(f"update: {name} is {found}, expected {expected}")
        if self.rows.slots_T.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"update: slots_T must be int32 or int64, got {self.rows.slots_T.dtype}"
            )


class PageCache:
    """The paged KV cache of a model: fields of pages, and state of requests.

    A page field is one tensor [layers, N, G, *shape]: the block of a (layer, page, KV head) is
    contiguous, so attending to separate page lists per KV head gathers whole blocks. A state field
    is [layers, slots, G, *shape]; a request owns one slot for its lifetime. The caller assigns
    pages and slots.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        page: int,
        pages: int,
        page_fields: Sequence[Field],
        slots: int = 0,
        state_fields: Sequence[Field] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.page = page
        self.pages = pages
        self.page_fields = tuple(page_fields)
        self.state_fields = tuple(state_fields)
        self._blocks = _allocate(page_fields, (layers, pages, kv_heads), device)
        self._states = _allocate(state_fields, (layers, slots, kv_heads), device)

    @property
    def bytes(self) -> int:
        return sum(field.nbytes for field in (*self._blocks.values(), *self._states.values()))

    def field(self, name: str, layer: int) -> Tensor:
        """A page field of one layer, [N, G, *shape]."""
        return self._blocks[name][layer]

    def state(self, name: str, layer: int) -> Tensor:
        """A state field of one layer, [slots, G, *shape]."""
        return self._states[name][layer]

    def begin(self, slot: int) -> None:
        """Reset the state of a slot for a new request."""
        for field in self.state_fields:
            self._states[field.name][:, slot] = field.start

    def read(self, pages: Tensor, slot: int | None = None) -> dict[str, Tensor]:
        """Copy pages, and the state of a slot, of all layers to host memory.

        Layer by layer, so that a full device needs no second copy.
        """
        copies = {name: _gather(field, pages) for name, field in self._blocks.items()}
        if slot is not None:
            copies |= {
                name: field[:, slot].to("cpu", copy=True) for name, field in self._states.items()
            }
        return copies

    def write(self, copies: Mapping[str, Tensor], pages: Tensor, slot: int | None = None) -> None:
        """Write back the copies of `read` into pages and a slot, bit for bit."""
        for name, field in self._blocks.items():
            for layer, copy in zip(bits(field), bits(copies[name]), strict=True):
                layer.index_copy_(0, pages, copy.to(field.device, non_blocking=True))
        if slot is not None:
            for name, field in self._states.items():
                field[:, slot] = copies[name].to(field.device)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages, all fields and layers."""
        for field in map(bits, self._blocks.values()):
            field[:, target] = field[:, source]


def page_bytes(fields: Sequence[Field], *, layers: int, kv_heads: int) -> int:
    """Bytes of a page over all layers, KV heads and fields."""
    return layers * kv_heads * sum(field.bytes for field in fields)


def _allocate(
    fields: Sequence[Field], lead: tuple[int, int, int], device: torch.device | str
) -> dict[str, Tensor]:
    return {f.name: _zeros((*lead, *f.shape), f.dtype, torch.device(device)) for f in fields}


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from numpy, whose memory is allocated on first write."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def _gather(field: Tensor, pages: Tensor) -> Tensor:
    """Copy pages of a field to host memory (pinned for a GPU), [layers, pages, ...]."""
    shape = (field.shape[0], len(pages), *field.shape[2:])
    host = torch.empty(shape, dtype=field.dtype, pin_memory=field.is_cuda)
    for layer, copy in zip(bits(field), bits(host), strict=True):
        copy.copy_(layer.index_select(0, pages), non_blocking=True)
    if field.is_cuda:
        torch.cuda.current_stream(field.device).synchronize()
    return host


def bits(tensor: Tensor) -> Tensor:
    """8-bit numbers as uint8: torch cannot index all 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
