"""Data algorithms at four points: which prompt, which group, in which order, in what mix.

Each is a small object or function; `PROMPTS`, `GROUPS` and `ORDERS` have them by name, with checked
settings; one of your own can be passed instead, or named as module:function. Rows are named; the
rewards of a group are the accuracies of its samples.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sparrow.schema.simulation import DispatchConfig
from sparrow.schema.types import Count, Setting, Share
from sparrow.training.objectives.advantages import informative
from sparrow.training.objectives.algorithms import bind, find_function, try_function

# Which prompt.


@runtime_checkable
class PromptFilter(Protocol):
    """Decides before the rollout whether a row is worth it; learns from what came out.

    Its state is numbers by name, for a checkpoint.
    """

    def admits(self, row: str, draw: float) -> bool:
        """draw: a random number of this prompt, 0 to 1."""
        ...

    def observe(self, row: str, rewards: Sequence[float]) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class AllPrompts:
    """Every prompt."""

    def admits(self, _row: str, _draw: float) -> bool:
        return True

    def observe(self, row: str, rewards: Sequence[float]) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        return None


@dataclass(kw_only=True)
class DropSolved:
    """Leave out rows whose mean reward, as a moving average over visits, exceeds a threshold."""

    threshold: Share = 0.95
    decay: Share = 0.5  # weight of the average so far
    means: dict[str, float] = field(default_factory=dict, init=False)

    def admits(self, row: str, _draw: float) -> bool:
        return self.means.get(row, 0.0) <= self.threshold

    def observe(self, row: str, rewards: Sequence[float]) -> None:
        now = sum(rewards) / len(rewards)
        before = self.means.get(row, now)
        self.means[row] = self.decay * before + (1 - self.decay) * now

    def state(self) -> dict[str, Any]:
        return {"means": dict(self.means)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.means = {row: float(mean) for row, mean in state["means"].items()}


@dataclass(kw_only=True)
class Greso:
    """Skip a row with probability 1 - p^z after z visits in a row whose rewards were all equal.

    p differs between easy rows (all right) and hard ones, and moves by `step` after every `window`
    visits: down if a larger share of them than its target came out equal, up otherwise. After GRESO
    (arXiv 2506.02177), with its targets. A row is never skipped with more than 1 - `least`.
    """

    easy_target: Share = 0.083
    hard_target: Share = 0.167
    step: Share = 0.01
    least: Share = 0.05
    most: Share = 0.95
    window: Count = 64
    keep: dict[str, float] = field(init=False)
    seen: dict[str, int] = field(init=False)  # visits of this window, and equal ones by kind
    streaks: dict[str, tuple[str, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least must be at most {self.most}, got {self.least}")
        self.keep = {"easy": 0.5, "hard": 0.5}
        self.seen = {"visits": 0, "easy": 0, "hard": 0}

    def admits(self, row: str, draw: float) -> bool:
        kind, equal = self.streaks.get(row, ("easy", 0))
        return draw < max(self.least, self.keep[kind] ** equal)

    def observe(self, row: str, rewards: Sequence[float]) -> None:
        self.seen["visits"] += 1
        if not informative(rewards):
            kind = "easy" if rewards[0] >= 1 else "hard"
            before, equal = self.streaks.get(row, (kind, 0))
            self.streaks[row] = (kind, equal + 1 if before == kind else 1)
            self.seen[kind] += 1
        else:
            self.streaks.pop(row, None)
        if self.seen["visits"] < self.window:
            return
        for name, target in (("easy", self.easy_target), ("hard", self.hard_target)):
            change = -self.step if self.seen[name] > target * self.window else self.step
            self.keep[name] = min(self.most, max(self.least, self.keep[name] + change))
        self.seen = dict.fromkeys(self.seen, 0)

    def state(self) -> dict[str, Any]:
        streaks = {row: list(streak) for row, streak in self.streaks.items()}
        return {"keep": dict(self.keep), "seen": dict(self.seen), "streaks": streaks}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.keep, self.seen = dict(state["keep"]), dict(state["seen"])
        self.streaks = {row: (kind, n) for row, (kind, n) in state["streaks"].items()}


PROMPTS: dict[str, Callable[[], PromptFilter]] = {
    "all": AllPrompts,
    "drop_solved": DropSolved,
    "greso": Greso,
}


# Which group.

GroupFilter = Callable[[Sequence[float]], bool]
"""Whether a group with these rewards is learnt from."""


def every_group(_rewards: Sequence[float]) -> bool:
    return True


GROUPS: dict[str, GroupFilter] = {"all": every_group, "informative": informative}


# In which order.


class Waiting(NamedTuple):
    """A group in the buffer, as its order sees it."""

    arrival: int
    oldest: int  # version of its oldest token
    position: int


Order = Callable[[Waiting], Any]
"""A sort key: the smallest are taken first."""


def fifo(group: Waiting) -> int:
    return group.arrival


def earliest_deadline(group: Waiting) -> tuple[int, int]:
    """The group whose oldest tokens are the oldest has to be used first."""
    return group.oldest, group.position


ORDERS: dict[str, Order] = {"fifo": fifo, "earliest_deadline": earliest_deadline}


# By name.


class DataAlgorithms(NamedTuple):
    """The data algorithms of a configuration."""

    prompts: PromptFilter
    keeps: GroupFilter
    order: Order


def make_data_algorithms(config: DispatchConfig) -> DataAlgorithms:
    """Make what a configuration names; each is tried once, so that faults show at the start."""
    points: list[tuple[str, Mapping[str, Callable[..., Any]], Mapping[str, Setting]]] = [
        ("prompt_filter", PROMPTS, config.prompt_settings),
        ("group_filter", GROUPS, config.group_settings),
        ("order", ORDERS, {}),
    ]
    made = []
    for point, known, settings in points:
        text = getattr(config, point)
        what = f"dispatch.{point} {text!r}"
        made.append((bind(find_function(text, known, f"dispatch.{point}"), settings, what), what))
    (make, what), keeps, order = made
    prompts = try_function(make, what)
    if not isinstance(prompts, PromptFilter):
        raise ValueError(f"{what}: expected admits, observe, state and restore, got {prompts!r}")
    try_function(partial(_try_filter, prompts), what)
    for rewards in ([0.0, 1.0], [1.0, 1.0]):
        try_function(*keeps, rewards)
    key, what = order
    try_function(lambda: sorted([Waiting(0, 1, 0), Waiting(1, 0, 1)], key=key), what)
    return DataAlgorithms(make(), keeps[0], key)


def _try_filter(prompts: PromptFilter) -> None:
    prompts.admits("row", 0.5)
    for rewards in ([0.0, 1.0], [1.0, 1.0]):
        prompts.observe("row", rewards)
    prompts.restore(json.loads(json.dumps(prompts.state())))
