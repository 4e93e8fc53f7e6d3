"""Dispatch: which prompt starts when, and which groups are a batch. No clocks, no threads, no I/O.

The asynchronous loop and the simulator drive it. `staleness` bounds the versions between a token
and the update that uses it. **Admission**: a prompt starts only if, with what is under way and
buffered before it, its group is expected to be used within that bound, so generation waits instead
of being thrown away. With staleness 0 this is the synchronous loop: a batch of prompts starts, all
of them end, one update.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sparrow.dataflow.asynchronous.prompt_ledger import ENDED, LOST, Lease, PromptLedger
from sparrow.dataflow.asynchronous.selection import (
    AllPrompts,
    GroupFilter,
    Order,
    PromptFilter,
    Waiting,
    earliest_deadline,
    every_group,
)
from sparrow.schema.simulation import LateChoice, fresh_groups

G = TypeVar("G")
MEMORY = 0.95  # of the moving share of groups that are kept
MOST_SKIPPED = 2000  # prompts in a row that the filter leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup(Generic[G]):
    """A group with its lease and the version of its oldest token."""

    lease: Lease
    oldest: int
    group: G
    arrival: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedBatch(Generic[G]):
    """The groups of a step by position, those replayed last."""

    step: int
    fresh: tuple[FinishedGroup[G], ...]
    replayed: tuple[FinishedGroup[G], ...] = ()

    @property
    def groups(self) -> list[G]:
        return [finished.group for finished in (*self.fresh, *self.replayed)]


@dataclass(kw_only=True)
class Dispatcher(Generic[G]):
    """Prompts to workers, their groups to the learner; every end goes into the ledger.

    batch       groups of a step
    staleness   versions between a token and the update that uses it, at most
    row         name of the row at a position, for the prompt filter
    late        groups that must be used in this step and are under way: wait for them, or abort
    oversample  so many times the prompts that are needed; what is left over is aborted
    replay      share of a batch that earlier batches have used, while within the staleness
    attempts    to answer a prompt that fails, before it is dropped
    refills     times the prompts of a batch that may start where groups are filtered out
    """

    batch: int
    ledger: PromptLedger = field(default_factory=PromptLedger)  # in memory, unless it has a file
    staleness: int = 0
    row: Callable[[int], str] = str
    prompts: PromptFilter = field(default_factory=AllPrompts)
    keeps: GroupFilter = every_group
    order: Order = earliest_deadline
    late: LateChoice = "wait"
    oversample: float = 1.0
    replay: float = 0.0
    attempts: int = 3
    refills: int = 4
    seed: int = 0
    step: int = 0  # of the next batch
    version: int = 0  # of the weights: updates that reached a worker
    kept_share: float = 1.0  # of finished groups, moving
    dropped: Counter[str] = field(default_factory=Counter)
    under_way: dict[int, tuple[Lease, str]] = field(default_factory=dict)  # by number of the lease
    buffer: list[FinishedGroup[G]] = field(default_factory=list)
    used: list[FinishedGroup[G]] = field(default_factory=list)  # that may be replayed
    stale: list[FinishedGroup[G]] = field(default_factory=list)  # that the last `take` dropped
    arrivals: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.staleness < 0 or self.oversample < 1 or not 0 <= self.replay < 1:
            raise ValueError(
                "expected batch >= 1, staleness >= 0, oversample >= 1 and 0 <= replay < 1, got "
                f"{self.batch}, {self.staleness}, {self.oversample}, {self.replay}"
            )

    @property
    def fresh(self) -> int:
        """Groups of a batch that are not replayed."""
        return fresh_groups(self.batch, self.replay)

    # Workers.

    def next(self, worker: str, version: int | None = None) -> Lease | None:
        """Lease a prompt to a worker; None: none may start before the next update or end.

        version: of the worker's weights; None: the latest that reached one.
        """
        version = self.version if version is None else version
        if not self.admits(version):
            return None
        for _ in range(MOST_SKIPPED):
            lease = self.ledger.lease(worker, version)
            if lease.failures >= self.attempts:
                self._drop(lease, "failed too often")
            elif not self.prompts.admits(self.row(lease.position), self._draw(lease)):
                self._drop(lease, "prompt filter")
            else:
                self.under_way[lease.number] = (lease, worker)
                return lease
        raise ValueError(
            f"{MOST_SKIPPED} prompts in a row were left out by the prompt filter: nothing is left "
            "to learn by its rule"
        )

    def admits(self, version: int) -> bool:
        """Whether a prompt that starts now, under this version, is expected to be used in time.

        Those ahead of it fill the next batches first. Groups that will be filtered out fill none:
        their share is estimated, but for staleness 0, which starts what it needs.
        """
        share = max(self.kept_share, 1 / self.refills) if self.staleness else 1.0
        ahead = (len(self.buffer) + len(self.under_way) * share) / self.oversample
        return self.step + ahead // self.fresh - version <= self.staleness

    def _draw(self, lease: Lease) -> float:
        return random.Random(f"{self.seed} {lease.position}").random()

    def finish(self, lease: Lease, rewards: Sequence[float], oldest: int, group: G) -> None:
        """Take a group into the buffer, or drop it; one whose lease has ended is ignored."""
        if self.under_way.pop(lease.number, None) is None:
            return
        self.prompts.observe(self.row(lease.position), rewards)
        keeps = self.keeps(rewards)
        self.kept_share = MEMORY * self.kept_share + (1 - MEMORY) * keeps
        if not keeps:
            self._drop(lease, "uninformative")
            return
        self.arrivals += 1
        finished = FinishedGroup(lease=lease, oldest=oldest, group=group, arrival=self.arrivals)
        self.buffer.append(finished)

    def fail(self, lease: Lease, reason: str) -> None:
        """Give a prompt back, to be dispatched again: its episode failed."""
        if self.under_way.pop(lease.number, None) is not None:
            self.ledger.give_back(lease, reason, self.step)

    def lose(self, worker: str) -> list[Lease]:
        """Give back all prompts of a worker that is gone."""
        lost = [lease for lease, owner in self.under_way.values() if owner == worker]
        for lease in lost:
            self.fail(lease, LOST)
        return lost

    def release(self) -> None:
        """Give back what is under way or buffered: the run ends, or stops."""
        for lease in (
            *(one for one, _ in self.under_way.values()),
            *(b.lease for b in self.buffer),
        ):
            self.ledger.give_back(lease, ENDED, self.step)
        self.under_way, self.buffer = {}, []

    # The learner.

    def take(self) -> DispatchedBatch[G] | None:
        """The batch of the next step, recorded as used; None: not yet."""
        self._drop_stale()
        if len(self.buffer) < self.fresh:
            return None
        due = [lease for lease, _ in self.under_way.values() if self._is_due(lease.version)]
        if due and self.late == "wait":
            return None
        for lease in due:
            self.abort(lease)
        ranked = sorted(self.buffer, key=self._rank)
        chosen = sorted(ranked[: self.fresh], key=lambda one: one.lease.position)
        self.buffer = ranked[self.fresh :]
        replayed = self._replayed()
        leases = [[one.lease for one in part] for part in (chosen, replayed)]
        self.ledger.use(self.step, *leases)
        self.used = [*self._replayable(), *chosen] if self.replay else []
        self.step += 1
        return DispatchedBatch(step=self.step - 1, fresh=tuple(chosen), replayed=tuple(replayed))

    def advance(self) -> None:
        """Count an update that reached the workers: prompts start under its weights from now on."""
        if self.version >= self.step:
            raise ValueError(f"version {self.version + 1} needs a batch that was not taken")
        self.version += 1

    def abort(self, lease: Lease, reason: str = "straggler") -> None:
        """Drop a prompt that is under way."""
        del self.under_way[lease.number]
        self._drop(lease, reason)

    def _rank(self, finished: FinishedGroup[G]) -> Any:
        lease = finished.lease
        return self.order(Waiting(finished.arrival, finished.oldest, lease.position))

    def _is_due(self, oldest: int) -> bool:
        return self.step - oldest >= self.staleness

    def _drop_stale(self) -> None:
        self.stale = [finished for finished in self.buffer if self._is_stale(finished)]
        for finished in self.stale:
            self._drop(finished.lease, "stale")
        if self.stale:
            self.buffer = [finished for finished in self.buffer if not self._is_stale(finished)]

    def _is_stale(self, finished: FinishedGroup[G]) -> bool:
        return self.step - finished.oldest > self.staleness

    def _replayable(self) -> list[FinishedGroup[G]]:
        return [one for one in self.used if not self._is_stale(one)]

    def _replayed(self) -> list[FinishedGroup[G]]:
        """Earlier groups for the rest of the batch, drawn by the seed and the step."""
        pool = self._replayable()
        count = min(len(pool), self.batch - self.fresh)
        drawn = random.Random(f"{self.seed} replay {self.step}").sample(range(len(pool)), count)
        return [pool[number] for number in sorted(drawn)]

    def _drop(self, lease: Lease, reason: str) -> None:
        self.ledger.drop(lease, reason, self.step)
        self.dropped[reason] += 1
