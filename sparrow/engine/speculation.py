"""Exact decoding on the device: drafts of resident rows, and the verdict on them.

R rows, J drafts of a round, Q = J + 1 queries, T = B * Q; other letters as in sparrow/ops/types.py.
"""

from typing import Any

import torch
from torch import Tensor

from sparrow import ops
from sparrow.engine.pool import ACCEPTANCE, Rows
from sparrow.schema.sampling import Acceptance


class DraftRows:
    """What rows drafted since their last verification."""

    def __init__(self, rows: Rows, draft_tokens: int, vocabulary: int) -> None:
        self.rows = rows
        count, device = rows.spare + 1, rows.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        self.state = ops.DraftState(
            count_R=zeros(),
            inputs_RJ=zeros(draft_tokens),
            logprobs_RJ=zeros(draft_tokens, dtype=torch.float32),
            logits_RJV=zeros(draft_tokens, vocabulary, dtype=torch.float32),
        )

    @staticmethod
    def bytes(rows: int, draft_tokens: int, vocabulary: int) -> int:
        """Memory of the drafts of so many rows."""
        return rows * draft_tokens * (4 * vocabulary + 12) if draft_tokens else 0

    def record(self, at_B: Tensor, ids_B: Tensor, draws: ops.Draws, logits_BV: Tensor) -> None:
        """Record the draws of a step as drafts; those of rows that do not speculate are not."""
        drafting_B = torch.where(self.rows.acceptance_R[at_B] > 0, at_B, self.rows.spare)
        ops.record_drafts(drafting_B, ids_B, draws, logits_BV, self.state)
        self.state.count_R[self.rows.spare] = 0

    def verify(
        self,
        logits_TV: Tensor,
        at_B: Tensor,
        step: ops.StepInputs,
        *,
        rules: frozenset[Acceptance],
        truncated: bool,
    ) -> ops.Verdict:
        """Accept or reject the drafts of these rows, each by its rule."""
        ids_BQ = step.ids_B.view(len(at_B), -1)
        at_T = at_B.repeat_interleave(ids_BQ.shape[1])
        count_B = self.state.count_R[at_B]
        verdicts = {}
        if "shared_noise" in rules:
            draws = self.rows.sample(logits_TV, at_T, step, truncated=truncated)
            verdicts["shared_noise"] = ops.accept_equal(draws, ids_BQ, count_B)
        if "rejection" in rules:
            verdicts["rejection"] = self._by_ratio(logits_TV, at_B, at_T, step, truncated)
        if len(verdicts) == 1:
            return verdicts.popitem()[1]
        shared_B = self.rows.acceptance_R[at_B] == ACCEPTANCE.index("shared_noise")
        pairs = zip(verdicts["shared_noise"], verdicts["rejection"], strict=True)
        return ops.Verdict(*(torch.where(_like(shared_B, a), a, b) for a, b in pairs))

    def _by_ratio(
        self, logits_TV: Tensor, at_B: Tensor, at_T: Tensor, step: ops.StepInputs, truncated: bool
    ) -> ops.Verdict:
        drafts, queries = self.state, len(at_T) // len(at_B)
        counters_BQ = step.counters_B.view(-1, queries)
        temperature_B = self.rows.state.temperature_R[at_B]

        def logq(number_B: Tensor) -> Tensor:
            last = drafts.logits_RJV.shape[1] - 1
            logits_BV = drafts.logits_RJV[at_B, number_B.clamp(max=last)]
            counters_B = counters_BQ.gather(1, number_B[:, None]).squeeze(1)
            cuts = self._cuts(at_B, counters_B, truncated)
            return ops.log_distribution(logits_BV, temperature_B, *cuts)

        cuts = self._cuts(at_T, step.counters_B, truncated)
        logp_TV = ops.log_distribution(logits_TV, step.temperature_B, *cuts)
        return ops.accept_by_ratio(
            logp_TV.view(len(at_B), queries, -1),
            logq,
            step.ids_B.view(-1, queries),
            drafts.logprobs_RJ[at_B, : queries - 1],
            drafts.count_R[at_B],
            step.seeds_B.view(-1, queries)[:, 0],
            counters_BQ,
        )

    def _cuts(self, at_B: Tensor, counters_B: Tensor, truncated: bool) -> tuple[Any, ...]:
        return self.rows.cuts(at_B, counters_B) if truncated else ()


def _like(mask_B: Tensor, values: Tensor) -> Tensor:
    return mask_B.view(-1, *(1,) * (values.ndim - 1))
