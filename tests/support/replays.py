"""Answers of a sparse actor seen again: what a calibration must come to, by another way."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sparrow import ops
from sparrow.calibration.replay import acceptances, read
from sparrow.models import Decoder
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean


class Replay(NamedTuple):
    """Per sampled token of one sequence."""

    lengths: np.ndarray  # total, at which each token was drawn: what a schedule looks up
    alpha: np.ndarray  # exact acceptance, sum_v min(p(v), q(v))
    entropy: np.ndarray  # of the dense policy


@torch.no_grad()
def replay(
    model: Decoder,
    prompt: Sequence[int],
    answer: Sequence[int],
    schedule: Schedule,
    flow: Flow = block_mean,
) -> Replay:
    """Acceptance of every answer token under a schedule; pages are chosen again by its flow.

    The whole sequence runs twice in the model's own dtype: with float32 weights, what is seen is
    the difference that sparsity makes, and not that of rounding.
    """
    dense = read(model, [*prompt, *answer])
    alpha_T = acceptances(model, dense, len(prompt), schedule, flow)
    sources = slice(len(prompt) - 1, -1)
    stats = ops.token_stats(dense.hidden_TC[sources], model.head, dense.ids_T[len(prompt) :])
    lengths = len(prompt) + np.arange(len(answer))
    return Replay(lengths, alpha_T.cpu().numpy(), stats.entropy.cpu().numpy())
