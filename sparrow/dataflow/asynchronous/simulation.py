"""A simulator of asynchronous training: the real dispatcher and ledger, simulated clocks.

Workers answer prompts in slots; a token takes the same time whatever else runs. A group ends with
its longest answer. The learner takes a batch as soon as the dispatcher has one. Failures of a
worker give back its prompts. What is not simulated: learning itself, and how a busy engine slows.
"""

import heapq
import math
import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from sparrow.dataflow.asynchronous.dispatch import Dispatcher
from sparrow.dataflow.asynchronous.prompt_ledger import Lease, PromptLedger
from sparrow.dataflow.asynchronous.selection import make_data_algorithms
from sparrow.schema.simulation import SimulateConfig, SimulatedRun, SimulateResult
from sparrow.schema.types import Report

ENOUGH = 0.95  # of the best speed: the least staleness that reaches it is advised
IDLE = 0.10  # of the learner: above, more workers help
HOUR = 3600.0


class SimulatedGroup(NamedTuple):
    """Answers that began at a time, a token every so many seconds."""

    begun: float
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Answering:
    """A prompt under way."""

    lease: Lease
    worker: int
    group: SimulatedGroup
    rewards: tuple[float, ...]
    ends: float
    extra: float = 0.0  # seconds that keys and values took to recompute


@dataclass
class _Worker:
    free: int
    alive: bool = True
    life: int = 0  # failures so far: events of an earlier life are void


@dataclass(kw_only=True)
class Simulation:
    """One staleness, simulated; `run` returns what came out."""

    config: SimulateConfig
    staleness: int
    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0
    updates: list[float] = field(default_factory=list)  # when each version reached the workers
    step_ends: list[float] = field(default_factory=list)
    learning: bool = False
    under_way: dict[int, _Answering] = field(default_factory=dict)
    busy_slots: float = 0.0  # slot-seconds
    there_slots: float = 0.0
    learner_busy: float = 0.0
    buffered: float = 0.0  # group-seconds
    generated: int = 0  # tokens
    used_tokens: int = 0
    used_staleness: float = 0.0  # summed over tokens
    oldest: int = 0

    def __post_init__(self) -> None:
        config = self.config
        self.ledger = PromptLedger()
        self.dispatcher: Dispatcher[SimulatedGroup] = Dispatcher(
            ledger=self.ledger,
            batch=config.batch,
            staleness=self.staleness,
            row=lambda position: str(position % config.rows),
            **make_data_algorithms(config)._asdict(),
            late=config.late,
            oversample=config.oversample,
            replay=config.replay,
            seed=config.seed,
        )
        self.workers = [_Worker(config.slots) for _ in range(config.workers)]
        self.idle = deque(range(config.workers))  # workers with a free slot, perhaps; in turn
        self.alive = config.workers * config.slots  # slots
        self.random = random.Random(f"{config.seed} failures")
        self.solve_rates: dict[int, float] = {}

    def run(self) -> SimulatedRun:
        config, end = self.config, self.config.hours * HOUR
        for number in range(len(self.workers)):
            self._plan_failure(number)
        if config.lose:
            self._at(config.lose_hour * HOUR, self._lose_some)
        self._go_on()
        while self.events and self.events[0][0] <= end:
            time, _, event = heapq.heappop(self.events)
            self._pass(time)
            event()
            self._go_on()
        self._pass(end)
        with self.ledger:
            audit = self.ledger.audit()
        if audit.problems:
            raise AssertionError("; ".join(audit.problems))
        again = sum(count.leases for count in audit.counts if count.end == "returned")
        return SimulatedRun(
            staleness=self.staleness,
            steps=len(self.step_ends),
            seconds_per_step=self._pace(end),
            speed_up=None,
            learner_idle=1 - self.learner_busy / end,
            rollout_idle=1 - self.busy_slots / self.there_slots,
            token_staleness=self.used_staleness / max(1, self.used_tokens),
            oldest=self.oldest,
            buffered=self.buffered / end,
            wasted=self._wasted(),
            dropped=dict(self.dispatcher.dropped),
            again=again,
        )

    def _pace(self, end: float) -> float | None:
        """Seconds of a step in the second half, when buffers are full; None: no step ended."""
        late = sum(time > end / 2 for time in self.step_ends)
        if not late:
            return end / len(self.step_ends) if self.step_ends else None
        return end / 2 / late

    def _wasted(self) -> float:
        """Share of the generated tokens that ended without a use; those under way do not count."""
        held = sum(sum(one.group.tokens) for one in self.dispatcher.buffer)
        return max(0.0, 1 - (self.used_tokens + held) / max(1, self.generated))

    # Time.

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, event))

    def _pass(self, time: float) -> None:
        """Let time pass: add up who was busy."""
        passed = time - self.now
        self.there_slots += passed * self.alive
        self.busy_slots += passed * len(self.under_way)
        self.learner_busy += passed * self.learning
        self.buffered += passed * len(self.dispatcher.buffer)
        self.now = time

    def _go_on(self) -> None:
        """Start what may start: an update, prompts."""
        self._learn()
        while self.idle:
            number = self.idle[0]
            worker = self.workers[number]
            if not worker.alive or not worker.free:
                self.idle.popleft()
                continue
            lease = self.dispatcher.next(str(number))
            if lease is None:
                return
            worker.free -= 1
            self.idle.rotate(-1)
            self._answer(lease, number)

    def _free(self, number: int) -> None:
        self.workers[number].free += 1
        self.idle.append(number)

    # Workers.

    def _answer(self, lease: Lease, number: int) -> None:
        config, rate = self.config, self._solve_rate(lease.position % self.config.rows)
        draws = random.Random(f"{config.seed} answers {lease.position}")
        middle, samples = math.log(config.tokens), range(config.samples)
        lengths = [int(draws.lognormvariate(middle, config.spread)) for _ in samples]
        tokens = tuple(min(max(1, length), config.max_tokens) for length in lengths)
        rewards = tuple(float(draws.random() < rate) for _ in samples)
        group = SimulatedGroup(self.now, tokens)
        answering = _Answering(lease, number, group, rewards, 0.0)
        self.under_way[lease.number] = answering
        self._plan_end(answering)

    def _solve_rate(self, row: int) -> float:
        """How often a row is solved: the same at every visit, widely spread about the mean."""
        if row not in self.solve_rates:
            draws, mean = random.Random(f"{self.config.seed} row {row}"), self.config.solved
            self.solve_rates[row] = draws.betavariate(2 * mean, 2 * (1 - mean))
        return self.solve_rates[row]

    def _plan_end(self, answering: _Answering) -> None:
        seconds = max(answering.group.tokens) * self.config.token_ms / 1000 + answering.extra
        answering.ends = answering.group.begun + seconds
        ends, life = answering.ends, self.workers[answering.worker].life
        self._at(ends, lambda: self._end(answering, ends, life))

    def _end(self, answering: _Answering, planned: float, life: int) -> None:
        worker = self.workers[answering.worker]
        if planned != answering.ends or life != worker.life:
            return  # it ends later, or its worker failed
        if self.under_way.pop(answering.lease.number, None) is None:
            return
        self._free(answering.worker)
        self.generated += sum(answering.group.tokens)
        oldest = self._version(answering.group.begun)
        self.dispatcher.finish(answering.lease, answering.rewards, oldest, answering.group)

    def _plan_failure(self, number: int) -> None:
        if self.config.failure_hours:
            wait = self.random.expovariate(1 / (self.config.failure_hours * HOUR))
            self._at(self.now + wait, lambda: self._fail(number, for_good=False))

    def _fail(self, number: int, *, for_good: bool) -> None:
        worker = self.workers[number]
        if not worker.alive:
            return
        worker.alive, worker.free, worker.life = False, self.config.slots, worker.life + 1
        self.alive -= self.config.slots
        for lease in self.dispatcher.lose(str(number)):
            lost = self.under_way.pop(lease.number)
            passed = self.now - lost.group.begun
            done = int(passed * 1000 / self.config.token_ms)
            self.generated += sum(min(done, tokens) for tokens in lost.group.tokens)
        if not for_good:
            self._at(self.now + self.config.repair_seconds, lambda: self._repair(number))

    def _repair(self, number: int) -> None:
        self.workers[number].alive = True
        self.alive += self.config.slots
        self.idle.append(number)
        self._plan_failure(number)

    def _lose_some(self) -> None:
        for number in range(int(len(self.workers) * self.config.lose)):
            self._fail(number, for_good=True)

    # The learner.

    def _learn(self) -> None:
        if self.learning:
            return
        batch = self.dispatcher.take()
        if batch is None:
            return
        for number in self.under_way.keys() - self.dispatcher.under_way.keys():
            self._stop(number)
        self.learning = True
        for answered in (*batch.fresh, *batch.replayed):
            self.oldest = max(self.oldest, batch.step - answered.oldest)
        for answered in batch.fresh:
            self._count_used(answered.group, batch.step)
        self._at(self.now + self.config.learn_seconds, self._updated)

    def _stop(self, number: int) -> None:
        """A sample under way was aborted: what it has written is lost."""
        aborted = self.under_way.pop(number)
        self._free(aborted.worker)
        done = int((self.now - aborted.group.begun) * 1000 / self.config.token_ms)
        self.generated += sum(min(done, tokens) for tokens in aborted.group.tokens)

    def _updated(self) -> None:
        self.learning = False
        self.step_ends.append(self.now)
        self._at(self.now + self.config.sync_seconds, self._renew)

    def _renew(self) -> None:
        """New weights reach the workers; prompts under way go on, with keys recomputed, or anew."""
        self.updates.append(self.now)
        self.dispatcher.advance()
        if self.config.in_flight == "keep":
            return
        for answering in self.under_way.values():
            if self.config.in_flight == "recompute":
                answering.extra += self.config.recompute_seconds
            else:
                done = int((self.now - answering.group.begun) * 1000 / self.config.token_ms)
                self.generated += sum(min(done, tokens) for tokens in answering.group.tokens)
                answering.group = answering.group._replace(begun=self.now)
            self._plan_end(answering)

    def _version(self, time: float) -> int:
        """The version that workers have at a time."""
        return bisect_right(self.updates, time)

    def _count_used(self, group: SimulatedGroup, step: int) -> None:
        """Staleness of every token: versions between its draw and this step."""
        first, seconds = self._version(group.begun), self.config.token_ms / 1000
        for tokens in group.tokens:
            ends = group.begun + tokens * seconds
            newer = sum(ends - time for time in self.updates[first:] if time < ends)
            self.used_tokens += tokens
            self.used_staleness += (step - first) * tokens - newer / seconds


def simulate(config: SimulateConfig, report: Report | None = None) -> SimulateResult:
    """Simulate every staleness on the same prompts, and advise."""
    runs = []
    for staleness in config.staleness:
        if report is not None:
            report(f"staleness {staleness}")
        runs.append(Simulation(config=config, staleness=staleness).run())
    first = runs[0].seconds_per_step
    rows = tuple(
        run.replace(speed_up=first / own) if first and (own := run.seconds_per_step) else run
        for run in runs
    )
    return SimulateResult(
        workers=config.workers, hours=config.hours, rows=rows, advice=tuple(_advise(config, rows))
    )


def _advise(config: SimulateConfig, rows: tuple[SimulatedRun, ...]) -> list[str]:
    paces = {run.staleness: run.seconds_per_step for run in rows if run.seconds_per_step}
    if not paces:
        return [f"no step ended: {_without_steps(rows)}"]
    enough = min(paces.values()) / ENOUGH
    staleness = min(number for number, pace in paces.items() if pace <= enough)
    chosen, seconds = next(run for run in rows if run.staleness == staleness), paces[staleness]
    age = f"{chosen.token_staleness:.2g} versions old on average, {chosen.oldest} at most"
    pace = f"{seconds:.0f} s a step, within {1 - ENOUGH:.0%} of the fastest"
    advice = [f"staleness {chosen.staleness}: {pace}; tokens are {age}"]
    busy = 1 - chosen.rollout_idle
    needed = max(1.0, config.workers * busy * seconds / config.learn_seconds)
    if min(chosen.learner_idle, chosen.rollout_idle) > IDLE:
        waits = f"{chosen.learner_idle:.0%} and {chosen.rollout_idle:.0%} of the time"
        advice.append(
            f"learner and workers both wait, {waits}: for the longest answers of a batch. A larger "
            "staleness or batch hides them, late=abort drops them"
        )
    elif chosen.learner_idle > IDLE:
        advice.append(
            f"the learner waits {chosen.learner_idle:.0%} of the time: about {needed:.0f} workers "
            "would keep it busy"
        )
    elif chosen.rollout_idle > IDLE:
        advice.append(
            f"workers wait {chosen.rollout_idle:.0%} of the time: about {needed:.0f} would do"
        )
    return advice


def _without_steps(rows: tuple[SimulatedRun, ...]) -> str:
    """What became of prompts that no step has used."""
    again, dropped = sum(run.again for run in rows), Counter[str]()
    for run in rows:
        dropped.update(run.dropped)
    what = [f"{count} prompts were dropped ({why})" for why, count in dropped.items()]
    what += [f"{again} were dispatched again"] * bool(again)
    return ", ".join(what) or "simulate more hours, or use more workers"
