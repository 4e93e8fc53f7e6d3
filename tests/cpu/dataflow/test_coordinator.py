"""The coordinator with workers that a test plays: what is sent to them, and when."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.async_runs import group
from support.waiting import until

from sparrow import models
from sparrow.dataflow.asynchronous import coordinator as module
from sparrow.dataflow.asynchronous.coordinator import Coordinator
from sparrow.dataflow.asynchronous.dispatch import Dispatcher
from sparrow.dataflow.asynchronous.messages import (
    EvaluateStep,
    EvaluationEnded,
    GroupEnded,
    LoadWeights,
    Opened,
    Role,
    StartGroup,
    WeightsLoaded,
    WorkerFailed,
)
from sparrow.dataflow.asynchronous.workers import WorkerLost
from sparrow.dataflow.local.messages import EpisodeFailed
from sparrow.models import model_identity
from sparrow.schema.base import Record
from sparrow.schema.episode import Turn
from sparrow.schema.evaluation import Evaluation


class PlayedWorker:
    """A worker process as the coordinator sees it; a test says what it answers."""

    pid = 0

    def __init__(self, role: Role) -> None:
        self.role, self.heard = role, time.monotonic()
        self.connection, self._own = socket.socketpair()
        self.sent: list[Record] = []
        self._answers: list[Record | None] = []

    def send(self, message: Record) -> None:
        self.sent.append(message)

    def receive(self) -> Record:
        self.connection.recv(1)
        message = self._answers.pop(0)
        if message is None:
            raise WorkerLost("killed")
        return message

    def say(self, message: Record | None) -> None:
        """None: it is killed."""
        self._answers.append(message)
        self._own.send(b"x")

    def close(self) -> None:
        self.connection.close()
        self._own.close()

    def messages(self, kind: type[Record]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class Play:
    """A coordinator that runs, and the workers that it has started."""

    def __init__(self, **settings: Any) -> None:
        self.workers: list[PlayedWorker] = []
        dispatch = {"batch": 2, **settings.pop("dispatch", {})}
        self.coordinator = Coordinator(
            dispatcher=Dispatcher(**dispatch),
            start_worker=self._start,
            **{"overlong": lambda position: None, "samples": 1, **settings},
        )

    def _start(self, role: Role) -> Any:
        self.workers.append(PlayedWorker(role))
        return self.workers[-1]

    def worker(self, role: Role, number: int = 0) -> PlayedWorker:
        def own() -> list[PlayedWorker]:
            return [worker for worker in self.workers if worker.role == role]

        until(lambda: len(own()) > number)
        return own()[number]

    def open(self, role: Role = "rollout", number: int = 0) -> PlayedWorker:
        worker = self.worker(role, number)
        worker.say(Opened(header="", isolation=None))
        return worker

    def end(self, worker: PlayedWorker, started: StartGroup) -> None:
        """Finish a group."""
        ended = group(f"{started.position}", (started.version,))
        worker.say(GroupEnded(lease=started.lease, group=ended, verdicts={}, fault=""))


@pytest.fixture
def play() -> Iterator[Callable[..., Play]]:
    made: list[Play] = []

    def make(**settings: Any) -> Play:
        made.append(Play(**settings))
        made[-1].coordinator.start(0)
        return made[-1]

    yield make
    for one in made:
        one.coordinator.close()


WEIGHTS = {"w": torch.ones(2)}


def test_weights_that_come_while_a_worker_loads_older_ones_reach_it(play: Any) -> None:
    """Otherwise nothing more may start at staleness 0."""
    own = play()
    first = own.open()
    until(lambda: len(first.messages(StartGroup)) == 2)
    for started in first.messages(StartGroup):
        own.end(first, started)
    assert own.coordinator.next_batch(lambda: False) is not None
    own.coordinator.load_weights(WEIGHTS, 1, torch.float32)
    until(lambda: first.messages(LoadWeights))
    first.say(None)
    second = own.open(number=1)
    until(lambda: second.messages(LoadWeights))
    own.coordinator.dispatcher.step = 2  # a step that was learnt meanwhile
    own.coordinator.load_weights(WEIGHTS, 2, torch.float32)
    for version in (1, 2):
        second.say(WeightsLoaded(version=version, seconds=0.0, tokens=0))
    until(lambda: len(second.messages(StartGroup)) == 2)
    assert [message.version for message in second.messages(LoadWeights)] == [1, 2]


def test_weights_are_not_kept_for_a_worker_that_has_not_begun(play: Any) -> None:
    """On a cluster one may wait for room all the time; it gets the latest when it opens."""
    own = play(workers=2)
    first, late = own.open(), own.worker("rollout", 1)
    for version in (1, 2, 3):
        own.coordinator.dispatcher.step = version  # that many were learnt
        own.coordinator.load_weights(WEIGHTS, version, torch.float32)
        until(lambda v=version: len(first.messages(LoadWeights)) == v)
        first.say(WeightsLoaded(version=version, seconds=0.0, tokens=0))
        until(lambda v=version: own.coordinator.dispatcher.version == v)
    until(lambda: len(own.coordinator._files) == 1)
    files = [message.file for message in first.messages(LoadWeights)]
    assert files[2] == files[0] != files[1]  # the memory of a version that is not read any more
    late.say(Opened(header="", isolation=None))
    until(lambda: late.messages(LoadWeights))
    assert [message.version for message in late.messages(LoadWeights)] == [3]


def test_evaluations_are_made_one_at_a_time_in_their_order(play: Any) -> None:
    own = play()
    coordinator = own.coordinator
    for step in range(3):
        coordinator.evaluate(step, None, lambda: False)
    worker = own.open("evaluation")
    until(lambda: worker.sent)
    coordinator.evaluate(3, None, lambda: False)
    result = Evaluation.model_construct(cells=())
    worker.say(EvaluationEnded(step=0, evaluation=result))
    until(lambda: len(worker.sent) == 2)
    worker.say(None)
    second = own.open("evaluation", 1)
    for step in (1, 2, 3):
        until(lambda step=step: len(second.sent) == step)
        second.say(EvaluationEnded(step=step, evaluation=result))
    ended = coordinator.evaluations(lambda: False)
    assert [step for step, _ in ended] == [0, 1, 2, 3]
    assert [message.step for message in second.messages(EvaluateStep)] == [1, 2, 3]


def test_the_learner_waits_where_too_many_evaluations_wait(play: Any) -> None:
    own, asked = play(), []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 2

    for step in range(module.MOST_EVALUATIONS):
        own.coordinator.evaluate(step, None, stop)
        assert not asked
    own.coordinator.evaluate(module.MOST_EVALUATIONS, None, stop)
    assert asked


def test_prompts_that_are_all_too_long_end_the_run(play: Any) -> None:
    own = play(overlong=lambda position: f"row {position}")
    own.open()
    with pytest.raises(EpisodeFailed, match=r"raise rollout\.max_prompt"):
        own.coordinator.next_batch(lambda: False)


def test_a_worker_that_says_nothing_is_started_again(play: Any) -> None:
    own = play(deadline=0.2)
    first = own.open()
    second = own.open(number=1)
    until(lambda: len(second.messages(StartGroup)) == 2)
    positions = [message.position for message in first.messages(StartGroup)[:2]]
    assert [message.position for message in second.messages(StartGroup)] == positions


def test_stale_groups_are_counted_with_their_tokens(play: Any) -> None:
    own = play(dispatch={"batch": 1, "staleness": 1})
    worker = own.open()
    until(lambda: len(worker.messages(StartGroup)) == 2)
    for started in worker.messages(StartGroup):
        own.end(worker, started)
    until(lambda: len(own.coordinator.dispatcher.buffer) == 2)
    own.coordinator.dispatcher.step = 2
    time.sleep(0.05)
    assert own.coordinator.next_batch(lambda: True) is None
    assert own.coordinator.interval.dropped == {"stale": 2}
    assert own.coordinator.interval.wasted_tokens == 4


# Several workers, and those of other machines.


def far(own: Play, name: str = "far", *, opened: bool = True, **about: Any) -> PlayedWorker:
    """A worker of another machine that has joined, and has the weights there are."""
    worker = PlayedWorker("rollout")
    own.coordinator.join(worker, name)
    if opened:
        worker.say(Opened(header="", isolation=None, **about))
        until(lambda: worker.messages(LoadWeights))
        load = worker.messages(LoadWeights)[-1]
        assert load.file == ""
        worker.say(WeightsLoaded(version=load.version, seconds=0.0, tokens=0))
    return worker


def starts(*workers: PlayedWorker) -> list[int]:
    return [len(worker.messages(StartGroup)) for worker in workers]


def test_prompts_go_to_the_worker_with_the_fewest_for_its_size(play: Any) -> None:
    own = play(workers=2, dispatch={"batch": 10})
    first, second = own.worker("rollout"), own.worker("rollout", 1)
    third = far(own, opened=False)
    with own.coordinator._changed:
        for worker, room in zip(own.coordinator.rollout_workers, (2, 2, 6), strict=True):
            worker.version, worker.room = 0, room
    until(lambda: sum(starts(first, second, third)) == 10)
    assert starts(first, second, third) == [2, 2, 6]
    assert {w.name for w in own.coordinator.rollout_workers} == {"rollout", "rollout-2", "far"}


def test_a_full_worker_leaves_prompts_to_one_that_loads_weights(play: Any) -> None:
    own = play(dispatch={"batch": 4})
    slow = far(own, opened=False)
    slow.say(Opened(header="", isolation=None))
    until(lambda: slow.messages(LoadWeights))
    first = own.open()
    until(lambda: starts(first) == [1])
    own.end(first, first.messages(StartGroup)[0])
    until(lambda: starts(first) == [2])
    assert starts(slow) == [0]
    slow.say(WeightsLoaded(version=0, seconds=0.0, tokens=0))
    assert until(lambda: starts(slow) == [1])


def test_a_worker_that_is_behind_gets_prompts_while_they_can_be_used(play: Any) -> None:
    own = play(dispatch={"batch": 1, "staleness": 2})
    slow = far(own)
    until(lambda: starts(slow) == [3])
    own.end(slow, slow.messages(StartGroup)[0])
    assert own.coordinator.next_batch(lambda: False) is not None
    own.coordinator.load_weights(WEIGHTS, 1, torch.float32)
    first = own.open()
    until(lambda: starts(first) == [0] and first.messages(LoadWeights))
    first.say(WeightsLoaded(version=1, seconds=0.0, tokens=0))
    until(lambda: starts(first) == [1])  # the slow one would draw it under version 0: too old
    assert [start.version for start in first.messages(StartGroup)] == [1]
    assert starts(slow) == [3]
    assert slow.messages(LoadWeights)[-1].version == 1


def test_names_of_workers_are_unique(play: Any) -> None:
    own = play()
    for expected in ("far", "far-2", "far-3"):
        worker = PlayedWorker("rollout")
        assert own.coordinator.join(worker, "far") == expected
    worker = PlayedWorker("rollout")
    assert own.coordinator.join(worker, "evaluation") == "evaluation-2"


def test_a_worker_that_lies_is_refused_and_then_dropped(play: Any) -> None:
    """Its prompts are dispatched again, and nothing of what it said is used."""
    heard: list[str] = []
    own = play(workers=0, dispatch={"batch": 3}, report=heard.append)
    liar = far(own)
    until(lambda: starts(liar) == [3])
    first, second, third = liar.messages(StartGroup)

    def ended(lease: int, prompt: int, version: int) -> GroupEnded:
        return GroupEnded(lease=lease, group=group(f"{prompt}", (version,)), verdicts={}, fault="")

    liar.say(ended(first.lease, first.position, 5))  # a version that it was never sent
    liar.say(ended(second.lease, third.position, 0))  # another prompt than that of the lease
    until(lambda: starts(liar) == [5])  # these are dispatched again
    assert not own.coordinator.dispatcher.buffer
    own.end(liar, third)
    until(lambda: own.coordinator.dispatcher.buffer)
    own.end(liar, third)  # twice
    until(lambda: "worker far was lost: 3 of its messages were refused" in heard)
    assert len(own.coordinator.dispatcher.buffer) == 1
    assert own.coordinator.interval.refused == 3
    honest = far(own, "honest")
    until(lambda: starts(honest) == [2])
    assert {s.position for s in honest.messages(StartGroup)} == {first.position, second.position}
    honest.say(WeightsLoaded(version=9, seconds=0.0, tokens=0))
    until(lambda: own.coordinator.interval.refused == 4)
    assert own.coordinator.dispatcher.version == 0


def test_a_worker_of_another_machine_that_is_silent_or_fails_ends_nothing(play: Any) -> None:
    heard: list[str] = []
    own = play(workers=0, dispatch={"batch": 2}, worker_timeout=0.5, report=heard.append)
    silent = far(own, "silent")
    until(lambda: starts(silent) == [2])
    until(lambda: any("silent was lost: no request" in text for text in heard))
    failing = far(own, "failing")
    until(lambda: starts(failing) == [2])
    failing.say(WorkerFailed(reason="no GPU", fatal=True))
    until(lambda: "worker failing was lost: no GPU" in heard)
    last = far(own, "last")
    until(lambda: starts(last) == [2])
    for started in last.messages(StartGroup):
        own.end(last, started)
    batch, interval = own.coordinator.next_batch(lambda: False)
    assert (interval.lost, interval.again) == (2, 4)
    assert {t.worker for g in batch.groups for t in g.trajectories} == {"last"}


def test_a_worker_that_differs_carries_no_states_for_the_gate(play: Any) -> None:
    own = play(workers=0, watched=2, dtype="float32")
    other = far(own, dtype="bfloat16")
    until(lambda: starts(other) == [2])
    assert [start.watched for start in other.messages(StartGroup)] == [0, 0]
    assert [worker.differs for worker in own.coordinator.rollout_workers] == [True]


def test_what_the_learner_cannot_take_is_refused(play: Any) -> None:
    model = models.random(
        "qwen3-0.6b",
        layers=1,
        hidden=8,
        intermediate=8,
        heads=1,
        kv_heads=1,
        head_size=8,
        vocabulary=4,
        max_positions=8,
        seed=0,
    )
    own = play(workers=0, model=model)
    far(own, opened=False).say(Opened(header="", isolation=None, model="another"))
    assert until(lambda: own.coordinator.interval.lost == 1)
    changes: list[dict[str, Any]] = [
        {"ids": np.array([1, 2, 4])},
        {"ids": np.array([1, 2, 2**30])},
        {"hidden": np.zeros((2, 7), np.float32)},
        {"reward": None},
        {"loss_mask": np.zeros(3, bool)},
        {name: np.repeat(getattr(group("0", (0,)).trajectories[0], name), 3) for name in LONG}
        | {"turns": (Turn(start=0, stop=3, role="user"), Turn(start=3, stop=9, role="assistant"))},
    ]
    for three in (changes[:3], changes[3:]):
        _refused(play(workers=0, dispatch={"batch": 3}, model=model), three, model)


LONG = ("ids", "loss_mask", "rollout_logprob", "weight_version", "policy_id")


def _refused(own: Any, changes: list[dict[str, Any]], model: Any) -> None:
    bad = far(own, model=model_identity(model))
    until(lambda: starts(bad) == [3])
    for started, change in zip(bad.messages(StartGroup), changes, strict=True):
        whole = group(f"{started.position}", (0,))
        wrong = whole.replace(trajectories=(whole.trajectories[0].replace(**change),))
        bad.say(GroupEnded(lease=started.lease, group=wrong, verdicts={}, fault=""))
    assert until(lambda: own.coordinator.interval.lost == 1)
    assert own.coordinator.interval.refused == 3
    assert not own.coordinator.dispatcher.buffer
