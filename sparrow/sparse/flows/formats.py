"""How a field is kept in memory: its shape, and how many bits a number has.

A scaled format keeps small whole numbers (or fp8) beside one scale for each vector, that is for
the last axis of the field. Reading a field gives number x scale in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparrow import ops
from sparrow.sparse.flows.tensor import FlowError, fail

Kind = Literal["keys", "fp32", "fp16", "bf16", "fp8", "int4"]
PLAIN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALE = torch.float16
MOST_SCALE = 65504.0  # of fp16
MOST_INT4 = 7
MOST_FP8 = 28.0  # of the 448 of e4m3, so that scales of small vectors stay normal fp16 numbers


@dataclass(frozen=True, slots=True)
class Size:
    """A size that is known when a model is: a letter, perhaps multiplied or divided."""

    letter: str
    times: int = 1
    over: int = 1

    def __floordiv__(self, other: int) -> "Size":
        return Size(self.letter, self.times, self.over * _whole(self, "//", other))

    def __mul__(self, other: int) -> "Size":
        return Size(self.letter, self.times * _whole(self, "*", other), self.over)

    __rmul__ = __mul__

    def resolve(self, sizes: Mapping[str, int]) -> int:
        whole = sizes[self.letter] * self.times
        if whole % self.over or whole < self.over:
            raise FlowError(f"{self} is not whole where {self.letter} is {sizes[self.letter]}")
        return whole // self.over

    def __str__(self) -> str:
        times = f"{self.times} * " if self.times > 1 else ""
        return f"{times}{self.letter}" + (f" // {self.over}" if self.over > 1 else "")


def _whole(size: Size, sign: str, other: object) -> int:
    if not isinstance(other, int) or other < 1:
        raise fail(f"{size} {sign} {other!r}: sizes take whole numbers above 0")
    return other


D = Size("D")
"""The head size."""
P = Size("P")
"""Tokens in a page."""


@dataclass(frozen=True, slots=True)
class Format:
    """A field as a flow declares it."""

    kind: Kind
    shape: tuple[int | Size, ...]

    @property
    def scaled(self) -> bool:
        return self.kind in ("int4", "fp8")

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(s if isinstance(s, int) else s.resolve(sizes) for s in self.shape)


def as_keys(*shape: int | Size) -> Format:
    """Numbers of the keys' own dtype."""
    return _format("keys", shape)


def fp32(*shape: int | Size) -> Format:
    """32-bit floats."""
    return _format("fp32", shape)


def fp16(*shape: int | Size) -> Format:
    """16-bit floats of half precision."""
    return _format("fp16", shape)


def bf16(*shape: int | Size) -> Format:
    """16-bit floats with the range of float32."""
    return _format("bf16", shape)


def fp8(*shape: int | Size) -> Format:
    """8-bit floats (e4m3) with one fp16 scale for each vector of the last axis."""
    return _format("fp8", shape)


def int4(*shape: int | Size) -> Format:
    """Whole numbers from -7 to 7, two in a byte, with one fp16 scale for each vector."""
    return _format("int4", shape)


def _format(kind: Kind, shape: tuple[int | Size, ...]) -> Format:
    for size in shape:
        if not isinstance(size, Size) and (not isinstance(size, int) or size < 1):
            raise fail(f"{kind}: {size!r} is no size; a shape has whole numbers above 0, D and P")
    if kind in ("int4", "fp8") and not shape:
        raise fail(f"{kind}() needs at least one axis: its vectors share a scale")
    return Format(kind, shape)


# In memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class PageField:
    """A field of a program: its format, and its shape in numbers."""

    name: str
    form: Format
    shape: tuple[int, ...]

    def storage(self, keys: torch.dtype) -> list[ops.Field]:
        """The blocks that it takes for one page and KV head."""
        name, shape, kind = self.name, self.shape, self.form.kind
        if not self.form.scaled:
            return [ops.Field(name=name, shape=shape, dtype=PLAIN.get(kind, keys))]
        if kind == "int4" and shape[-1] % 2:
            raise FlowError(f"int4 keeps pairs, but its last axis is odd in {shape}")
        packed = (*shape[:-1], shape[-1] // 2)
        data = (packed, torch.uint8) if kind == "int4" else (shape, torch.float8_e4m3fn)
        return [
            ops.Field(name=name, shape=data[0], dtype=data[1]),
            ops.Field(name=scale_name(name), shape=shape[:-1], dtype=SCALE),
        ]

    def bytes(self, keys: torch.dtype) -> int:
        """What it takes for one page and KV head."""
        return sum(block.bytes for block in self.storage(keys))

    def encode(self, x: Tensor, keys: torch.dtype) -> dict[str, Tensor]:
        """float32 [..., *shape] as the blocks of `storage` hold it, by name."""
        if not self.form.scaled:
            return {self.name: x.to(PLAIN.get(self.form.kind, keys))}
        most = MOST_INT4 if self.form.kind == "int4" else MOST_FP8
        scale = (x.abs().amax(-1) / most).clamp(max=MOST_SCALE).to(SCALE)
        step = scale.float()[..., None]
        data = torch.where(step > 0, x / step, 0.0).clamp(-most, most)
        if self.form.kind == "fp8":
            data = data.to(torch.float8_e4m3fn)
        else:
            low, high = (data.round() + 8).to(torch.uint8).chunk(2, dim=-1)
            data = low | (high << 4)
        return {self.name: data, scale_name(self.name): scale}

    def decode(self, blocks: Mapping[str, Tensor]) -> Tensor:
        """The float32 numbers that its blocks stand for."""
        data = blocks[self.name]
        if not self.form.scaled:
            return data.float()
        if self.form.kind == "int4":
            data = torch.cat([data & 15, data >> 4], dim=-1).float() - 8
        return data.float() * blocks[scale_name(self.name)].float()[..., None]


def scale_name(name: str) -> str:
    """The block that holds the scales of a field."""
    return f"{name}.scale"
