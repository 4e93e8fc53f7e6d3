"""Verdicts while training: in this process for code that is ours, in others for all else.

    with Judges("my_rewards:compute_score", workers=4, deadline=10.0) as judge:
        verdict = await judge(example, text)

A verdict comes back whatever the verifier does. What is late, crashed or raised gives reward 0 and
is counted.
"""

import asyncio
import contextlib
import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

from sparrow.tasks.base import Example, Verdict, wrong
from sparrow.tasks.verifier import Outcome, Question, Verifier

CLOSED = "these judges are closed"


class _Job(NamedTuple):
    question: Question
    future: "Future[Verdict]"


class _Closed:
    """Closed at the end of a with-block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is held."""


class Judges(_Closed):
    """Verdicts by worker processes, each of which can be killed alone.

    score: module:function or path/to/file.py:function, with verl's signature
        compute_score(data_source, solution_str, ground_truth, extra_info)
    workers: processes; each judges one text at a time
    deadline: seconds that a verdict may take, from when a worker has the text
    preload: modules that workers import before they take a text
    memory: bytes that a worker and what it starts may take; None: no limit
    namespace: whether workers get pid namespaces where those are allowed

    `counts` has every verdict under "judged", and under "timeouts", "crashes" and "errors" (the
    function raised, or gave no number) those that the verifier owes. Nothing here belongs to an
    event loop: workers live as long as this does.
    """

    def __init__(
        self,
        score: str,
        workers: int = 2,
        deadline: float = 10.0,
        preload: Sequence[str] = (),
        *,
        memory: int | None = None,
        namespace: bool = True,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.counts: Counter[str] = Counter()
        self.last_fault = ""  # what the last verdict that failed says
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._verifiers = [
            Verifier(score, deadline, preload, memory=memory, namespace=namespace)
            for _ in range(workers)
        ]
        self._begin()
        self.isolation = self._verifiers[0].isolation  # pid namespace or subreaper

    def _begin(self) -> None:
        """The first worker is the probe: what cannot be loaded is told here."""
        try:
            self._verifiers[0].wait()
            for verifier in self._verifiers[1:]:
                verifier.start()
        except BaseException:
            self.close()
            raise
        for verifier in self._verifiers:
            # Threads that a program's end does not wait for; a pool's would hold it up.
            threading.Thread(target=self._serve, args=(verifier,), daemon=True).start()

    async def __call__(self, example: Example, text: str) -> Verdict:
        """Judge a text when a worker is free; other coroutines go on meanwhile."""
        truth, extra = _as_json(example, "ground_truth"), _as_json(example, "extra")
        job = _Job(Question(example.source, text, truth, extra), Future())
        with self._lock:
            if self._closed:
                raise ValueError(CLOSED)
            self._jobs.put(job)
        return await asyncio.wrap_future(job.future)

    def _serve(self, verifier: Verifier) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            try:
                outcome = verifier.judge(job.question)
            except Exception as error:  # ours: no question waits for ever because of it
                outcome = Outcome(wrong(f"judging failed: {error!r:.200}"), "crashes")
            if outcome.fault and self._closed:  # it is we who killed it
                job.future.set_exception(ValueError(CLOSED))
                continue
            self._count(outcome)
            job.future.set_result(outcome.verdict)
            with contextlib.suppress(ValueError):  # the next text tries again, and tells
                verifier.start()

    def _count(self, outcome: Outcome) -> None:
        with self._lock:
            self.counts["judged"] += 1
            if outcome.fault:
                self.counts[outcome.fault] += 1
                self.last_fault = outcome.verdict.reason

    def close(self) -> None:
        """Kill all workers, whatever they are doing. Who waits gets a ValueError."""
        with self._lock:
            self._closed = True
        self._turn_away()
        for verifier in self._verifiers:
            verifier.close()
        for _ in self._verifiers:
            self._jobs.put(None)

    def _turn_away(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None and job.future.set_running_or_notify_cancel():
                    job.future.set_exception(ValueError(CLOSED))


class InProcess(_Closed):
    """Verdicts in this process, by code that is trusted to be quick and to raise ValueError only.

    It has the manners of `Judges`, so that either can stand for the other.
    """

    def __init__(self, reward: Callable[[Example, str], Verdict]) -> None:
        self._reward = reward
        self.counts: Counter[str] = Counter()
        self.last_fault = ""

    async def __call__(self, example: Example, text: str) -> Verdict:
        """Judge a text now. A row that cannot be judged gives 0 and is counted."""
        self.counts["judged"] += 1
        try:
            return self._reward(example, text)
        except ValueError as error:
            self.counts["errors"] += 1
            self.last_fault = f"the verifier raised ValueError: {error}"
            return wrong(self.last_fault)


def _as_json(example: Example, field: str) -> Any:
    """A field of a row, which goes to another process as JSON and must come out as it is here."""
    value = getattr(example, field)
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise ValueError(
            f"{example.id}: {field} must be JSON data to be judged in another process (lists, "
            f"objects with text keys, text, finite numbers, true, false, null), got {value!r:.80}"
        )
    return value
