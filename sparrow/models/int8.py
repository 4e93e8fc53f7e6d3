"""A copy of a decoder with its matrices in 8 bits, for drafts: reading weights is most of them.

Weights only, one scale for each output (`ops.Int8Weight`); activations, norms, the embedding and
keys and values are as in the model.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparrow import ops
from sparrow.models.decoder import Decoder, DecoderLayer


class Int8Linear(nn.Module):
    """Weight and bias of a projection, in the place of an `nn.Linear`."""

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self._weight: ops.Int8Weight | None = None

    @property
    def weight(self) -> ops.Int8Weight:
        assert self._weight is not None, "the 8-bit weights have no memory now"
        return self._weight


class Int8Decoder:
    """A decoder in 8 bits, made of another; embedding, norms and biases are that one's own.

    Matrices have memory between `allocate` and `free`; `renew` quantises in place, so that a CUDA
    graph outlives new weights.
    """

    def __init__(self, source: Decoder) -> None:
        shared = {id(part): part for part in (*source.parameters(), source._rotations)}
        self.source, self.decoder = source, copy.deepcopy(source, shared)
        self._linears = [*self._replace()]
        self._edition: int | None = None  # that of the source's weights which were quantised

    @classmethod
    def of(cls, source: Decoder) -> "Int8Decoder":
        """The copy of a decoder as it is now."""
        made = cls(source)
        made.allocate()
        made.renew()
        return made

    def _replace(self) -> Iterator[Int8Linear]:
        """Put projections in 8 bits in the place of the copy's own."""
        for layer in self.decoder.layers:
            assert isinstance(layer, DecoderLayer)
            for block, name in _places(layer):
                own = Int8Linear(getattr(block, name).bias)
                setattr(block, name, own)
                yield own
        copied: Any = self.decoder
        copied.lm_head = Int8Linear(None)
        yield copied.lm_head

    def _weights(self) -> Iterator[Tensor]:
        """Matrices of the source, in the order of `_linears`."""
        for layer in self.source.layers:
            assert isinstance(layer, DecoderLayer)
            for block, name in _places(layer):
                yield getattr(block, name).weight
        yield self.source.head

    @property
    def nbytes(self) -> int:
        return sum(linear.weight.nbytes for linear in self._linears)

    def allocate(self) -> None:
        if self._linears[0]._weight is None:
            for own, weight in zip(self._linears, self._weights(), strict=True):
                own._weight = ops.Int8Weight.empty_like(weight)
            self._edition = None

    def free(self) -> None:
        for own in self._linears:
            own._weight = None

    @torch.no_grad()
    def renew(self) -> None:
        """Quantise, unless the source's edition is that of the last time."""
        if self._edition == self.source.edition:
            return
        for own, weight in zip(self._linears, self._weights(), strict=True):
            own.weight.copy_(weight)
        self._edition = self.source.edition


def _places(layer: DecoderLayer) -> tuple[tuple[nn.Module, str], ...]:
    """The projections of a layer, each with the module that holds it."""
    attention, mlp = layer.attention, layer.mlp
    return (attention, "qkv"), (attention, "out"), (mlp, "gate_up"), (mlp, "down")
