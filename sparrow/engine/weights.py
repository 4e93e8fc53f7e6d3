"""The engine's weights by Hugging Face names: updated in place, offloaded, reloaded."""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from sparrow.models import Decoder, hf_views
from sparrow.models.deltas import Delta, digest
from sparrow.models.weights import EMBEDDING, HEAD

Stay = Literal["keep", "host", "drop"]
Items = Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]


class WeightStore:
    """Views into a decoder's storage, and where that storage is while the engine sleeps."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.present = True
        self._device = model.device
        self._offloaded: dict[nn.Parameter, Tensor] = {}
        self._edition = model.edition
        self._digest: int | None = None  # of these weights; None: not computed yet

    def write(self, items: Items, *, have: int, base: int | None) -> None:
        """Copy tensors into the views; all are checked before the first is written.

        A part of the model is laid over the version it was made from, and no other.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in items.items() if isinstance(items, Mapping) else items:
            if name in tensors:
                raise ValueError(f"{name} is given twice")
            tensors[name] = tensor
        self._views = hf_views(self.model)
        if base is not None and base != have:
            raise ValueError(f"the update was made from version {base}, the engine has {have}")
        if base is not None and not self.present:
            raise ValueError("the weights were dropped: give all of them (base_version=None)")
        tied_copy = tensors.pop(HEAD, None) if self.model.spec.tied else None
        self._check(tensors, whole=base is None)
        embedding = tensors.get(EMBEDDING, torch.empty(0))
        if tied_copy is not None and not torch.equal(tied_copy.to(embedding), embedding):
            raise ValueError(f"{HEAD} differs from the embedding, but the model ties the two")
        self.model.edition += 1
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._views[name].copy_(tensor)
        self.present, self._edition, self._digest = True, self.model.edition, None

    def apply(self, delta: Delta, *, have: int) -> None:
        """Write a delta into the views, in place; whole or not at all."""
        if not delta.is_whole and delta.base_version != have:
            raise ValueError(
                f"the delta was made from version {delta.base_version}, the engine has {have}"
            )
        if not delta.is_whole and not self.present:
            raise ValueError("the weights were dropped: give all of them")
        views = hf_views(self.model)
        self._digest = delta.apply(views, known=self._digest)
        self.model.edition += 1
        self.present, self._edition = True, self.model.edition

    def digest(self) -> int:
        """The digest of the weights, computed once."""
        if self._digest is None:
            self._digest = digest(hf_views(self.model))
        return self._digest

    def _check(self, tensors: dict[str, Tensor], *, whole: bool) -> None:
        unknown = sorted(tensors.keys() - self._views.keys())
        if unknown:
            raise ValueError(f"the model has no weights {', '.join(unknown[:3])}")
        missing = sorted(self._views.keys() - tensors.keys())
        if whole and missing:
            count = f"{len(missing)} weights are missing, {missing[0]} first"
            raise ValueError(f"{count}; a part of the model needs its base_version")
        for name, tensor in tensors.items():
            shape = self._views[name].shape
            if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout != torch.strided:
                raise ValueError(f"{name} is no plain tensor: {type(tensor).__name__}")
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
            if not tensor.is_floating_point():
                raise ValueError(f"{name} has dtype {tensor.dtype}, not a float")

    def require(self) -> None:
        if not self.present:
            raise ValueError("the weights were dropped by sleep(): give all of them by update()")
        if self.model.edition != self._edition:
            raise ValueError("weights changed outside update(): every engine needs its own model")
        if not self.model.head.numel():
            raise ValueError("the model's weights are out: another engine on it sleeps")

    def offload(self, stay: Stay) -> None:
        """Free the weights' memory, unless they are kept."""
        if stay == "keep":
            return
        self.present = self.present and stay == "host"
        for parameter in self.model.parameters():
            weights = parameter.data
            if self.present:
                pinned = self._device.type == "cuda"
                host = torch.empty(weights.shape, dtype=weights.dtype, pin_memory=pinned)
                self._offloaded[parameter] = host.copy_(weights)
            else:  # the shape alone
                self._offloaded[parameter] = torch.empty_like(weights, device="meta")
            parameter.data = weights.new_empty(0)

    def reload(self) -> None:
        """Allocate storage again, with the weights that `offload` kept."""
        for parameter, host in self._offloaded.items():
            place = torch.empty(host.shape, dtype=host.dtype, device=self._device)
            parameter.data = place.copy_(host) if self.present else place
        self._offloaded.clear()
