"""Exact decoding on the device: drafts of resident rows, and the verdict on them.

R rows, J drafts of a round, Q = J + 1 queries, T = B * Q; other letters as in sparrow/ops/types.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparrow import ops
from sparrow.engine.pool import ACCEPTANCE, Rows, widest_batch
from sparrow.models import ModelSpec
from sparrow.models.attention import HeldLists
from sparrow.schema.sampling import Acceptance, SpeculativeParams


class DraftRoom(NamedTuple):
    """Room for drafts: tokens of a round, whether page lists are held, and weights in 8 bits."""

    tokens: int = 0
    lists: bool = False
    int8: bool = False

    @classmethod
    def of(cls, speculative: SpeculativeParams) -> "DraftRoom":
        """The room that such requests need."""
        int8 = speculative.weights == "int8"
        return cls(speculative.draft_tokens, speculative.reselect > 1, int8)

    def including(self, other: "DraftRoom") -> "DraftRoom":
        """Room enough for both."""
        tokens, int8 = max(self.tokens, other.tokens), self.int8 or other.int8
        return DraftRoom(tokens, self.lists or other.lists, int8)

    def bytes(self, spec: ModelSpec, rows: int, pages: int) -> int:
        """Memory for so many running rows, of so many pages each."""
        logits = (rows + 1) * self.tokens * (4 * spec.vocabulary + 12)
        lists = widest_batch(rows) * spec.layers * spec.kv_heads * (pages + 1) * 4
        return logits + (lists if self.lists else 0)


class DraftRows:
    """What rows drafted since their last verification."""

    def __init__(self, rows: Rows, spec: ModelSpec, room: DraftRoom) -> None:
        self.rows = rows
        count, device = rows.spare + 1, rows.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        self.state = ops.DraftState(
            count_R=rows.drafted_R,
            inputs_RJ=zeros(room.tokens),
            logprobs_RJ=zeros(room.tokens, dtype=torch.float32),
            logits_RJV=zeros(room.tokens, spec.vocabulary, dtype=torch.float32),
        )
        shape = (spec.layers, widest_batch(rows.spare), spec.kv_heads, rows.table_RM.shape[1])
        self.held = HeldLists(*shape, device) if room.lists else None

    def record(self, at_B: Tensor, ids_B: Tensor, draws: ops.Draws, logits_BV: Tensor) -> None:
        """Record the draws of a step as drafts; those of rows that do not speculate are not."""
        drafting_B = torch.where(self.rows.acceptance_R[at_B] > 0, at_B, self.rows.spare)
        ops.record_drafts(drafting_B, ids_B, draws, logits_BV, self.state)
        self.state.count_R[self.rows.spare :].zero_()

    def verify(
        self,
        logits_TV: Tensor,
        at_B: Tensor,
        step: ops.StepInputs,
        *,
        rules: frozenset[Acceptance],
        truncated: bool,
    ) -> ops.Verification:
        """Accept or reject the drafts of these rows, each by its rule."""
        ids_BQ = step.ids_B.view(len(at_B), -1)
        at_T = at_B.repeat_interleave(ids_BQ.shape[1])
        draws = self.rows.sample(logits_TV, at_T, step, truncated=truncated)
        tokens_BQ, logprobs_BQ, entropies_BQ, ok_BQ = (part.view_as(ids_BQ) for part in draws)
        count_B = self.state.count_R[at_B]
        accepted_B = ops.accept_equal(tokens_BQ[:, :-1], ids_BQ[:, 1:], count_B)
        equal = ops.Verification(tokens_BQ, logprobs_BQ, entropies_BQ, ok_BQ, accepted_B + 1)
        if "rejection" not in rules:
            return equal
        policy = _Policy(self.rows, logits_TV, at_T, step, draws, truncated)
        by_ratio = self._by_ratio(policy, at_B, equal)
        if "shared_noise" not in rules:
            return by_ratio
        shared_B = self.rows.acceptance_R[at_B] == ACCEPTANCE.index("shared_noise")
        pairs = zip(equal, by_ratio, strict=True)
        return ops.Verification(*(torch.where(_like(shared_B, a), a, b) for a, b in pairs))

    def _by_ratio(
        self, policy: "_Policy", at_B: Tensor, equal: ops.Verification
    ) -> ops.Verification:
        """The verdict by rejection sampling; entropies are those of the policy's own draws."""
        drafts, step = self.state, policy.step
        ids_BQ, counters_BQ = (
            part.view_as(equal.tokens_BQ) for part in (step.ids_B, step.counters_B)
        )
        count_B, next_BQ = drafts.count_R[at_B], ids_BQ.roll(-1, dims=1)
        seeds_B = self.rows.state.seed_R[at_B]
        logp_BQ = policy.logprobs(next_BQ.flatten()).view_as(ids_BQ)
        logq_BJ = drafts.logprobs_RJ[at_B, : ids_BQ.shape[1] - 1]
        numbers = count_B, seeds_B, counters_BQ[:, :-1]
        accepted_B = ops.accept_by_ratio(logp_BQ[:, :-1], logq_BJ, *numbers)

        counters_B = counters_BQ.gather(1, accepted_B[:, None]).squeeze(1)
        last_draft_B = accepted_B.clamp(max=drafts.logits_RJV.shape[1] - 1)
        settings = (at_B, counters_B, self.rows.state.temperature_R[at_B])
        at_T = torch.arange(len(at_B), device=at_B.device) * ids_BQ.shape[1] + accepted_B
        logp_BV = policy.distribution(policy.logits_TV[at_T], *settings)
        logq_BV = policy.distribution(drafts.logits_RJV[at_B, last_draft_B], *settings)
        last_B = ops.resample(logp_BV, logq_BV, accepted_B < count_B, seeds_B, counters_B)
        at_B1, last_B1 = accepted_B[:, None], last_B[:, None]
        return equal._replace(
            tokens_BQ=next_BQ.scatter(1, at_B1, last_B1),
            logprobs_BQ=logp_BQ.scatter(1, at_B1, logp_BV.gather(1, last_B1)),
            emitted_B=accepted_B + 1,
        )


class _Policy(NamedTuple):
    """The policy's distributions at the queries of a verification."""

    rows: Rows
    logits_TV: Tensor
    at_T: Tensor
    step: ops.StepInputs
    draws: ops.Draws
    truncated: bool

    def distribution(
        self, logits_BV: Tensor, at_B: Tensor, counters_B: Tensor, temperature_B: Tensor
    ) -> Tensor:
        """Log-probs of what rows sample from, [B, V]."""
        cuts = self.rows.cuts(at_B, counters_B) if self.truncated else ()
        return ops.log_distribution(logits_BV, temperature_B, *cuts)

    def logprobs(self, tokens_T: Tensor) -> Tensor:
        """Log-probs of a token at each query, without the whole distribution where none is cut.

        The sampler has summed it up already: the log-prob of its own draw is known.
        """
        temperature_T = self.step.temperature_B
        if self.truncated:
            settings = self.at_T, self.step.counters_B, temperature_T
            logp_TV = self.distribution(self.logits_TV, *settings)
            return logp_TV.gather(1, tokens_T[:, None]).squeeze(1)
        pair_T2 = torch.stack([tokens_T, self.draws.tokens], dim=1)
        logit_T, drawn_T = self.logits_TV.gather(1, pair_T2).float().unbind(1)
        greedy_T, best_T = temperature_T == 0, tokens_T == self.draws.tokens
        scale_T = temperature_T.masked_fill(greedy_T, 1.0)
        logp_T = (logit_T - drawn_T) / scale_T + self.draws.logprobs
        certain_T = torch.where(best_T, 0.0, -torch.inf)
        return torch.where(greedy_T, certain_T, logp_T.clamp(max=0.0))


def _like(mask_B: Tensor, values: Tensor) -> Tensor:
    return mask_B.view(-1, *(1,) * (values.ndim - 1))
