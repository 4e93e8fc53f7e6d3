"""Distils the dense policy into a LoRA adapter of the sparse actor; the policy is never touched.

The adapter is on under sparse attention alone. Teacher and student read the same sequences: the
teacher densely and without the adapter, the student as sparse decoding would, pages chosen by the
same rule, with the adapter and with gradients to it. The loss of a token is a divergence of the two
next-token distributions (`ops.divergence`). Legend: sparrow/ops/types.py; R positions learnt.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparrow import ops
from sparrow.models import Decoder
from sparrow.models.attention import PackedSparse
from sparrow.models.lora import Adapter
from sparrow.ops.reference.divergence import Divergence
from sparrow.schema.schedule import Schedule
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.rule import Rule
from sparrow.training.packing import Pack, packed_attention

CLIP = 1.0  # norm of a gradient


class DistillUpdate(NamedTuple):
    """Mean divergence over the learnt tokens of a batch, their number, and the gradient's norm."""

    loss: float
    tokens: int
    gradient: float


class Distiller:
    """An adapter in training, with its optimiser."""

    def __init__(
        self,
        model: Decoder,
        adapter: Adapter,
        rule: Rule,
        schedule: Schedule,
        *,
        rate: float,
        divergence: Divergence = "reverse_kl",
        temperature: float = 1.0,
    ) -> None:
        self.model, self.adapter, self.rule, self.page = model, adapter, rule, schedule.page
        self.divergence, self.temperature = divergence, temperature
        spec, sizes = model.spec, {"schedules": 1, "bins": len(schedule.lengths)}
        self._budgets = BudgetTable(
            layers=spec.layers, kv_heads=spec.kv_heads, device=model.device, **sizes
        )
        self._slot = self._budgets.add(schedule)
        leaves = [tensor.requires_grad_() for tensor in adapter.tensors().values()]
        self.optimiser = torch.optim.AdamW(leaves, lr=rate, weight_decay=0.0)

    @torch.no_grad()
    def teacher(self, pack: Pack) -> Tensor:
        """Hidden states of the dense policy at the learnt positions, [R, C]."""
        hidden_TC = self.model(
            pack.ids_T, pack.positions_T, packed_attention(pack, self.model.dtype)
        )
        return hidden_TC[pack.sources_R]

    def student(self, pack: Pack, prompts_B: Tensor) -> Tensor:
        """Those of the sparse actor with its adapter, with gradients; prompts are read densely."""
        lengths_T = pack.positions_T + 1
        slots_T = torch.full_like(lengths_T, self._slot)
        attention = PackedSparse(
            bounds=pack.bounds,
            dense_B=prompts_B,
            budgets=self._budgets.lookup(slots_T, lengths_T),
            page=self.page,
            rule=self.rule,
        )
        hidden_TC = self.model(pack.ids_T, pack.positions_T, attention, self.adapter)
        return hidden_TC[pack.sources_R]

    def losses(self, pack: Pack, prompts_B: Tensor) -> Tensor:
        """The divergence at every learnt position, [R]."""
        return ops.divergence(
            self.teacher(pack),
            self.student(pack, prompts_B),
            self.model.head,
            kind=self.divergence,
            temperature=self.temperature,
        )

    def step(self, packs: Sequence[tuple[Pack, Tensor]]) -> DistillUpdate:
        """Update the adapter once, on all these packs; every learnt token counts alike.

        Gradients are made for the adapter alone; those of the policy's weights stay as they are.
        """
        tokens = sum(len(pack.sources_R) for pack, _ in packs)
        leaves = [*self.adapter.tensors().values()]
        total = 0.0
        self.optimiser.zero_grad(set_to_none=True)
        for pack, prompts_B in packs:
            loss = self.losses(pack, prompts_B).sum() / tokens
            loss.backward(inputs=leaves)
            total += loss.item()
        gradient = float(torch.nn.utils.clip_grad_norm_(leaves, CLIP))
        if not math.isfinite(total + gradient):
            raise ArithmeticError(f"the loss of distillation is {total}, its gradient {gradient}")
        self.optimiser.step()
        return DistillUpdate(loss=total, tokens=tokens, gradient=gradient)
