"""RL objectives: small pure functions of rewards and log-probs, and their names in a config.

Notation: mu sampled (rollout), pi_old is the dense policy at the rollout's weights, pi is being
trained; r = pi / pi_old, rho = pi_old / mu. A token's loss is weight * surrogate, and the loss of a
mini-batch is the sum over sequences of their coefficient times the sum of their tokens' losses.
"""

from sparrow.training.objectives.surrogates import Surrogate as Surrogate  # for functions of users
from sparrow.training.objectives.surrogates import Terms as Terms
