"""Sequences that a sparse actor wrote, seen again: dense and sparse, token by token.

Legend of the dimension letters: sparrow/ops/types.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparrow import ops
from sparrow.models import Attention, Decoder
from sparrow.models.attention import Packed, PackedSparse
from sparrow.records import Float32Array
from sparrow.sparse.block_mean import BlockMean
from sparrow.sparse.schedule import Schedule


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


@torch.no_grad()
def replay(
    model: Decoder, prompt: Sequence[int], answer: Sequence[int], schedule: Schedule
) -> Replay:
    """Acceptance of every answer token under a schedule; pages are chosen again by its rule.

    The whole sequence runs twice in the model's own dtype: with float32 weights, what is seen is
    the difference that sparsity makes, and not that of rounding.
    """
    if not prompt or not answer:
        raise ValueError(
            f"replay: got {len(prompt)} and {len(answer)} tokens, allowed: some of each"
        )
    if schedule.flow != BlockMean.name:
        raise ValueError(f"schedule {schedule.name!r} is for {schedule.flow}: not replayed yet")
    beyond = [layer for layer in schedule.dense_layers if layer >= model.spec.layers]
    if beyond:
        raise ValueError(
            f"schedule {schedule.name!r} names layers {beyond}, the model has {model.spec.layers}"
        )
    ids_T = torch.tensor([*prompt, *answer], device=model.device)
    bounds = torch.tensor([0, len(ids_T)], device=model.device)
    sparse = PackedSparse(
        bounds=bounds,
        dense_B=torch.tensor([len(prompt)]),
        budgets_T=torch.from_numpy(_budgets(schedule, len(ids_T))).to(model.device),
        page=schedule.page,
        first=schedule.first,
        last=schedule.last,
        dense_layers=frozenset(schedule.dense_layers),
    )
    sources = slice(len(prompt) - 1, len(ids_T) - 1)
    dense_TC = _hidden(model, ids_T, Packed(bounds=bounds))[sources]
    sparse_TC = _hidden(model, ids_T, sparse)[sources]
    alpha_T = ops.acceptance(dense_TC, sparse_TC, model.head)
    entropy_T = ops.token_stats(dense_TC, model.head, ids_T[len(prompt) :]).entropy
    return Replay(prompt=len(prompt), alpha=alpha_T.cpu().numpy(), entropy=entropy_T.cpu().numpy())


def _hidden(model: Decoder, ids_T: torch.Tensor, attention: Attention) -> torch.Tensor:
    return model(ids_T, torch.arange(len(ids_T), device=ids_T.device), attention)


def _budgets(schedule: Schedule, tokens: int) -> np.ndarray:
    """The budget of each token, by the length that includes it."""
    if schedule.layers:
        raise ValueError(f"schedule {schedule.name!r} has budgets by layer: not replayed yet")
    lengths = np.arange(1, tokens + 1)
    bins = np.searchsorted(schedule.lengths, lengths, side="right") - 1
    return np.asarray(schedule.budgets, dtype=np.int64)[bins]
