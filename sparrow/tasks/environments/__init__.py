"""Environments: worlds that agents act in, of one shape and under limits."""

from sparrow.tasks.environments.base import Environment, Observation, Synchronous
from sparrow.tasks.environments.limits import EnvironmentLimits, Limited
from sparrow.tasks.environments.opening import open_environment
