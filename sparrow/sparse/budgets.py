"""The budget table on the device: several schedules, looked up for every row and layer at once.

Letters beside those of sparrow/ops/types.py: L layers, A schedules (slots), E bins of a schedule,
G KV heads.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from sparrow.schema.schedule import DENSE, Schedule

MOST_BINS = 64  # of a schedule, unless a table is made for more
NO_BIN = 2**31 - 1  # start of a bin that is not there: no length reaches it


class BudgetTable:
    """Schedules as tensors whose addresses never change, so that captured graphs see new contents.

    A request holds a slot; slot 0 is dense. Changes are ordinary copies on the current stream: make
    them on the stream that decodes, between steps.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int = 1,
        schedules: int = 15,
        bins: int = MOST_BINS,
        device: torch.device | str = "cpu",
    ) -> None:
        """Room for `schedules` beside the dense slot, each of at most `bins` bins."""
        slots = schedules + 1
        self._starts_AE = torch.full((slots, bins), NO_BIN, dtype=torch.int32, device=device)
        self._starts_AE[:, 0] = 0
        self._budgets_LAEG = torch.full(
            (layers, slots, bins, kv_heads), DENSE, dtype=torch.int32, device=device
        )
        self._schedules: list[Schedule] = []  # that of slot i is at i - 1

    def add(self, schedule: Schedule, in_use: Collection[int] | None = None) -> int:
        """Return the slot of a schedule: that of an equal one, or a new one.

        Where `in_use` says which slots rows still look at, a full table gives another one away.
        """
        if schedule in self._schedules:
            return self._schedules.index(schedule) + 1
        room, held = self._starts_AE.shape[0] - 1, len(self._schedules)
        free = range(held + 1, room + 1)
        idle = [] if in_use is None else sorted({*range(1, room + 1)} - {*in_use})
        if not free and not idle:
            names = ", ".join(held_schedule.name for held_schedule in self._schedules)
            raise ValueError(f"no slot left for schedule {schedule.name!r} beside {names}")
        slot = free[0] if free else idle[0]
        self._write(slot, schedule)
        self._schedules[slot - 1 : slot] = [schedule]
        return slot

    def lookup(self, slots_B: Tensor, lengths_B: Tensor) -> Tensor:
        """Budgets of every layer, row and KV head, int32 [L, B, G], without a wait for the device.

        Lengths include the current token and are at least 0. A dense layer has DENSE, which keeps
        every page.
        """
        begun_BE = self._starts_AE[slots_B] <= lengths_B[:, None]
        bins_B = begun_BE.sum(1) - 1
        return self._budgets_LAEG[:, slots_B, bins_B]

    def _write(self, slot: int, schedule: Schedule) -> None:
        layers, _, bins, kv_heads = self._budgets_LAEG.shape
        check_fit(schedule, layers=layers, kv_heads=kv_heads, bins=bins)
        spare = (0, bins - len(schedule.lengths))
        starts_E = np.pad(schedule.lengths, spare, constant_values=NO_BIN)
        budgets_LEG = np.array(
            [
                [
                    np.pad(schedule.budgets_of(layer, head), spare, mode="edge")
                    for head in range(kv_heads)
                ]
                for layer in range(layers)
            ]
        ).swapaxes(1, 2)
        self._starts_AE[slot].copy_(torch.from_numpy(starts_E))
        self._budgets_LAEG[:, slot].copy_(torch.from_numpy(budgets_LEG))


def check_fit(schedule: Schedule, *, layers: int, kv_heads: int, bins: int = MOST_BINS) -> None:
    """Refuse a schedule that names layers or heads that a model does not have."""
    named = {*schedule.dense_layers, *(item.layer for item in schedule.layers)}
    beyond = sorted(layer for layer in named if layer >= layers)
    of_heads = {item.head for item in schedule.layers if item.head is not None}
    heads = sorted(head for head in of_heads if head >= kv_heads)
    wrong = None
    if len(schedule.lengths) > bins:
        wrong = f"has {len(schedule.lengths)} bins, the table holds {bins} a schedule: merge bins"
    elif beyond:
        wrong = f"names layers {beyond}, the model has 0 to {layers - 1}"
    elif heads:
        wrong = f"names KV heads {heads}, the model has 0 to {kv_heads - 1}"
    elif len(schedule.dense_layers) == layers:
        wrong = f"keeps all {layers} layers dense: ask for dense decoding instead"
    if wrong is not None:
        raise ValueError(f"schedule {schedule.name!r} {wrong}")
