"""Limits of an environment, as data."""

from typing import Annotated

from pydantic import Field

from sparrow.schema.base import Record
from sparrow.schema.types import Seconds, Steps


class EnvironmentLimits(Record):
    """What an environment may take; sub-agents that share it share its steps."""

    steps: Steps = 256
    seconds: Seconds = 10.0  # of one step
    characters: Annotated[int, Field(ge=1, le=2**20)] = 8192  # of an observation, without its note
