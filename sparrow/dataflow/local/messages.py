"""Messages between the sides of a run, and callbacks: no engine, no learner, no files.

    RolloutRequest    run -> rollout side: sample a step
    RolloutBatch      rollout side -> run -> learner side: its groups, and what became of its rows
    LearnerBatch      learner side -> run: measurements for the gate, and samples with weights
    UpdateStats       learner side -> run: an optimiser step (training/update.py)

Weights go from the learner side to the rollout side by Hugging Face names, with a version.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sparrow.schema.base import Float32Array, Record
from sparrow.schema.episode import Group, TrainSample, Trajectory
from sparrow.schema.gate import AcceptanceReading, RatioEstimate
from sparrow.schema.schedule import Schedule
from sparrow.tasks.judging import Unjudged as Unjudged
from sparrow.training.learner import SampleScores
from sparrow.training.policy import TeacherStates

FAILED = ("timeouts", "crashes", "errors")  # kinds of failed verdicts


class GateStop(Exception):
    """The gate found a tail that no budget can repair, or a stop rule was broken; see its text."""


class Diverged(Exception):
    """Too many steps in a row without a finite loss and gradient."""


class EpisodeFailed(Exception):
    """An episode raised, or returned no valid trajectories. Its step is not taken."""


class RolloutRequest(Record):
    """A step to sample: from which row on, how many answers, under which schedule."""

    step: int
    position: int  # of the first row
    schedule: Schedule | None  # None: dense
    prompts: int
    samples: int  # of a prompt
    watched: int  # trajectories that carry hidden states, at most


class RolloutBatch(Record):
    """The groups of a step, and what became of the rows that it took."""

    groups: tuple[Group, ...]
    position: int  # of the first row of the next step
    overlong: tuple[str, ...] = ()  # rows whose prompt does not fit, by name
    uninformative: int = 0  # groups that dynamic sampling left out
    watched: tuple[Trajectory, ...] = ()  # of those: with hidden states, for the gate alone
    acc: float | None = None  # over all answers, those left out included
    outcomes: dict[str, float] = {}  # noqa: RUF012 (pydantic copies it); shares, over the same
    rounds: int = 1
    verdicts: dict[str, int] = {}  # noqa: RUF012 (pydantic copies it); counts by kind
    fault: str = ""  # why a verdict failed, where one did
    metrics: dict[str, float] = {}  # noqa: RUF012 (pydantic copies it); of the rollout side alone

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def failed(self) -> dict[str, int]:
        """Failed verdicts by kind; those answers got a reward of 0."""
        return {name: self.verdicts[name] for name in FAILED if self.verdicts.get(name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBatch:
    """A step's samples for the optimiser, and how far actor and policy are apart."""

    samples: tuple[TrainSample, ...] = ()
    groups: tuple[int, ...] = ()  # which group each sample belongs to
    weights: tuple[Float32Array, ...] = ()  # of each learnt token, by the corrections
    scores: tuple[SampleScores, ...] = ()
    references: tuple[Float32Array, ...] | None = None  # by learnt token: of the reference model
    readings: tuple[AcceptanceReading, ...] = ()  # exact acceptance, of the watched trajectories
    estimates: tuple[RatioEstimate, ...] = ()  # its cheap estimate, of all
    mismatch: dict[str, float] = field(default_factory=dict)
    teacher: TeacherStates | None = None  # of this dense pass, if distillation wants it
    broken: bool = False  # the dense pass gave values that are not finite

    @property
    def entropy(self) -> float | None:
        """Mean entropy of the policy over the learnt tokens, in nats; None without tokens."""
        tokens = np.concatenate([np.zeros(0), *(scores.entropy for scores in self.scores)])
        return float(tokens.mean()) if len(tokens) else None

    def shares(self, updates: int) -> list[list[int]]:
        """The samples of each optimiser step, by number: whole groups, evenly; none is empty."""
        parts = np.array_split(np.unique(np.array(self.groups, dtype=int)), updates)
        numbers = [[n for n, group in enumerate(self.groups) if group in part] for part in parts]
        return [share for share in numbers if share]


# Callbacks.


class Callbacks(Protocol):
    """Called while a run goes on, to show progress; they change nothing."""

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        return None

    def step(self, metrics: Mapping[str, float]) -> None:
        return None

    def event(self, text: str, style: str = "") -> None:
        return None


class NoCallbacks(Callbacks):
    """Callbacks that do nothing."""


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - begun

    def seconds(self) -> dict[str, float]:
        """Seconds of each part, and of the whole "step"."""
        return {**self._parts, "step": time.monotonic() - self._begun}
