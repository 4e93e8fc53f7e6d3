"""Objectives of RL: small pure functions on rewards and log-probs, and how a config names them.

Notation: mu sampled (rollout), pi_old is the dense policy at the rollout's weights, pi is being
trained; r = pi / pi_old, rho = pi_old / mu. A token's loss is weight * surrogate, and the loss of a
mini-batch is the sum over sequences of their coefficient times the sum of their tokens' losses.
"""

from sparrow.train.objectives.advantages import (
    Advantage,
    Rewards,
    batch_normalised,
    grpo,
    informative,
    mean_centred,
    overlong_penalty,
    remax,
    rloo,
)
from sparrow.train.objectives.algorithms import Algorithm, algorithm_of
from sparrow.train.objectives.corrections import (
    Correction,
    combine,
    diagnose,
    geometric_mask,
    icepop,
    m2po,
    sequence_tis,
    sparse_rl_paper,
    sparse_rl_release,
    token_tis,
    veto,
)
from sparrow.train.objectives.surrogates import (
    Aggregate,
    Surrogate,
    Terms,
    cispo,
    dppo_tv,
    gspo,
    ppo,
    reinforce,
    seq_mean_token_mean,
    seq_mean_token_sum_norm,
    token_mean,
)
