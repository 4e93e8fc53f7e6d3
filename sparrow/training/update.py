"""An optimiser step of any model: the loss of an objective, and what becomes of its gradients.

    loss = token_loss(objective, samples, logprob_R, entropy_R, share_R, weight_R)
    loss.total.backward()
    stats = apply_gradients(optimiser, parameters, objective, sums, tokens=n, rate=rate, clip=1.0)

The loss is a sum over tokens, each with its own coefficient: micro-batches add up.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparrow.schema.episode import TrainSample
from sparrow.training.objectives.surrogates import Objective, Terms, reference_kl
from sparrow.training.packing import by_token, join
from sparrow.training.policy import full_tensor

SUMS = ("loss", "clipped", "kl", "kl_reference")  # of a micro-batch, over its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """One optimiser step, or why none was taken."""

    loss: float
    clipped: float  # share of tokens
    kl: float  # of the policy from pi_old, k3
    gradient: float
    rate: float
    skipped: bool  # loss or gradient is not finite
    kl_reference: float | None = None  # of the policy from the reference model, k3; None: none
    no_signal: bool = False  # the gradient is exactly 0: momentum alone must not move the weights

    @classmethod
    def without_loss(cls) -> "UpdateStats":
        """Statistics of a step that was skipped because no loss could be computed."""
        nan = math.nan
        return cls(loss=nan, clipped=nan, kl=nan, gradient=nan, rate=nan, skipped=True)


class TokenLoss(NamedTuple):
    """The loss of a micro-batch with its regularisers, and the sums of SUMS without gradients."""

    total: Tensor
    sums: Tensor


def token_loss(
    objective: Objective,
    samples: Sequence[TrainSample],
    logprob_R: Tensor,
    entropy_R: Tensor,
    share_R: Tensor,
    weight_R: Tensor,
    reference_R: Tensor | None = None,
) -> TokenLoss:
    """The objective on whole samples that have `old_logprob`, by learnt token.

    share: the coefficient of the objective's aggregate. weight: that of the corrections.
    reference: log-probs of the reference model, where the objective has a KL term.
    """
    terms = _terms(samples, logprob_R)
    surrogate = objective.surrogate(terms)
    loss = (surrogate.loss_T * weight_R * share_R).sum()
    total, reference_kl_R = loss, torch.zeros_like(share_R)
    if objective.entropy:
        total = total - objective.entropy * (entropy_R * share_R).sum()
    if objective.kl and reference_R is not None:
        reference_kl_R = reference_kl(terms.logprob_T, reference_R)
        total = total + objective.kl * (reference_kl_R * share_R).sum()
    sums = (
        loss.detach(),
        surrogate.clipped_T.sum(),
        reference_kl(terms.old_T, terms.logprob_T.detach()).sum(),
        reference_kl_R.detach().sum(),
    )
    return TokenLoss(total, torch.stack(sums))


def apply_gradients(
    optimiser: torch.optim.Optimizer,
    parameters: Iterable[Tensor],
    objective: Objective,
    sums: Mapping[str, float],
    *,
    tokens: int,
    rate: float,
    clip: float,
) -> UpdateStats:
    """Clip the gradients, take the optimiser step and drop them; sums: over all learnt tokens.

    No step is taken where the loss or the norm is not finite, or the gradient is exactly 0.
    """
    for group in optimiser.param_groups:
        group["lr"] = rate
    norm = float(full_tensor(nn.utils.clip_grad_norm_(parameters, clip)))
    skipped = not (math.isfinite(sums["loss"]) and math.isfinite(norm))
    if not skipped and norm > 0:
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    tokens = max(1, tokens)
    return UpdateStats(
        loss=sums["loss"],
        clipped=sums["clipped"] / tokens,
        kl=sums["kl"] / tokens,
        kl_reference=sums["kl_reference"] / tokens if objective.kl else None,
        gradient=norm,
        rate=rate,
        skipped=skipped,
        no_signal=norm == 0,
    )


def _terms(samples: Sequence[TrainSample], logprob_R: Tensor) -> Terms:
    device = logprob_R.device
    if any(sample.old_logprob is None for sample in samples):
        raise ValueError("update: a sample has no old_logprob; score it first")
    return Terms(
        logprob_T=logprob_R,
        old_T=join([s.old_logprob[s.loss_mask] for s in samples]).to(device),  # type: ignore[index]
        rollout_T=join([s.rollout_logprob[s.loss_mask] for s in samples]).to(device),
        advantage_T=by_token([sample.advantage for sample in samples], samples).to(device),
        sequence_T=join([np.full(s.learnt, n, np.int64) for n, s in enumerate(samples)]).to(device),
    )
