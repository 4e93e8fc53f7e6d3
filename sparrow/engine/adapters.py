"""The adapters of an engine by name: which slot of the bank each has, and which edition it is."""

import itertools
from typing import NamedTuple

import torch

from sparrow.models import ModelSpec
from sparrow.models.lora import Adapter, AdapterBank

CAPACITY, MAX_RANK = 2, 64


class AdapterSlot(NamedTuple):
    """A slot of the bank (0: no adapter), and a number that each edition of an adapter has anew."""

    slot: int
    edition: int

    @property
    def root(self) -> bytes:
        """Keys and values computed with one edition are found by nobody who uses another."""
        return f"adapter edition {self.edition}".encode()


NO_ADAPTER = AdapterSlot(0, 0)


class Adapters:
    """Names over a bank of adapters."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        capacity: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.bank = AdapterBank(spec, capacity, max_rank, dtype, device)
        self._slots: dict[str, AdapterSlot] = {}
        self._editions = itertools.count(1)

    def find(self, name: str | None) -> AdapterSlot:
        if name is None:
            return NO_ADAPTER
        if name not in self._slots:
            known = ", ".join(sorted(self._slots)) or "none"
            raise ValueError(f"no adapter {name!r} is loaded; loaded: {known}")
        return self._slots[name]

    def put(self, name: str, adapter: Adapter) -> AdapterSlot:
        """Take an adapter in under a new name, or in place of the one that has it."""
        taken = {held.slot for held in self._slots.values()}
        free = [slot for slot in range(1, self.bank.capacity + 1) if slot not in taken]
        if name not in self._slots and not free:
            raise ValueError(
                f"no room for adapter {name!r}: {sorted(self._slots)} are loaded; drop one, or "
                "build the engine with more adapters"
            )
        slot = self._slots[name].slot if name in self._slots else free[0]
        self.bank.put(slot, adapter)
        self._slots[name] = AdapterSlot(slot, next(self._editions))
        return self._slots[name]

    def drop(self, name: str) -> None:
        self.bank.clear(self.find(name).slot)
        del self._slots[name]
