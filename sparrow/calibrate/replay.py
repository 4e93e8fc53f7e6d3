"""Sequences that a sparse actor wrote, seen again: dense and sparse, token by token.

Legend of the dimension letters: sparrow/ops/types.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.models import Attention, Decoder
from sparrow.models.attention import Packed, PackedSparse
from sparrow.schema.base import Float32Array
from sparrow.schema.schedule import Schedule
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """Per sampled token of one sequence."""

    prompt: int  # tokens before the first of them
    alpha: Float32Array  # exact acceptance, sum_v min(p(v), q(v))
    entropy: Float32Array  # of the dense policy

    @property
    def lengths(self) -> np.ndarray:
        """The total length at which each token was drawn: what a schedule looks up."""
        return self.prompt + np.arange(len(self.alpha))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dense:
    """A sequence that the dense policy has read: done once, compared with any number of rules."""

    ids_T: Tensor
    hidden_TC: Tensor


@torch.no_grad()
def read(model: Decoder, ids: Sequence[int], attention: Attention | None = None) -> Dense:
    """One dense pass over a sequence; `attention` may look on, but must be dense."""
    ids_T = torch.tensor(ids, device=model.device)
    hidden_TC = _hidden(model, ids_T, attention or Packed(bounds=_bounds(ids_T)))
    return Dense(ids_T=ids_T, hidden_TC=hidden_TC)


@torch.no_grad()
def sparse_hidden(
    model: Decoder, dense: Dense, prompt: int, schedule: Schedule, flow: Flow = block_mean
) -> Tensor:
    """Hidden states of the whole sequence where tokens after the prompt attend sparsely."""
    sparse = PackedSparse(
        bounds=_bounds(dense.ids_T),
        dense_B=torch.tensor([prompt]),
        budgets=_budgets(model, schedule, len(dense.ids_T)),
        page=schedule.page,
        rule=Rule.of(schedule, flow),
    )
    return _hidden(model, dense.ids_T, sparse)


@torch.no_grad()
def acceptances(
    model: Decoder, dense: Dense, prompt: int, schedule: Schedule, flow: Flow = block_mean
) -> Tensor:
    """Exact acceptance of every token after the prompt; keys and values by the sparse stream."""
    sources = slice(prompt - 1, -1)
    sparse_TC = sparse_hidden(model, dense, prompt, schedule, flow)[sources]
    return ops.acceptance(dense.hidden_TC[sources], sparse_TC, model.head)


@torch.no_grad()
def replay(
    model: Decoder,
    prompt: Sequence[int],
    answer: Sequence[int],
    schedule: Schedule,
    flow: Flow = block_mean,
    *,
    dense: Dense | None = None,
) -> Replay:
    """Acceptance of every answer token under a schedule; pages are chosen again by its flow.

    The whole sequence runs twice in the model's own dtype: with float32 weights, what is seen is
    the difference that sparsity makes, and not that of rounding. `dense` is what `read` gave for
    it, where several schedules or flows are compared.
    """
    if not prompt or not answer:
        raise ValueError(
            f"replay: got {len(prompt)} and {len(answer)} tokens, allowed: some of each"
        )
    dense = dense or read(model, [*prompt, *answer])
    if dense.ids_T.tolist() != [*prompt, *answer]:
        raise ValueError("replay: `dense` was read from another sequence")
    alpha_T = acceptances(model, dense, len(prompt), schedule, flow)
    sources = slice(len(prompt) - 1, -1)
    stats = ops.token_stats(dense.hidden_TC[sources], model.head, dense.ids_T[len(prompt) :])
    entropy = stats.entropy.cpu().numpy()
    return Replay(prompt=len(prompt), alpha=alpha_T.cpu().numpy(), entropy=entropy)


def _hidden(model: Decoder, ids_T: Tensor, attention: Attention) -> Tensor:
    return model(ids_T, torch.arange(len(ids_T), device=ids_T.device), attention)


def _bounds(ids_T: Tensor) -> Tensor:
    return torch.tensor([0, len(ids_T)], device=ids_T.device)


def _budgets(model: Decoder, schedule: Schedule, tokens: int) -> Tensor:
    """The budget of each token in every layer and KV head, by the length that includes it."""
    spec = model.spec
    table = BudgetTable(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        schedules=1,
        bins=len(schedule.lengths),
        device=model.device,
    )
    slot = table.add(schedule)
    lengths_T = torch.arange(1, tokens + 1, device=model.device)
    return table.lookup(torch.full_like(lengths_T, slot), lengths_T)
