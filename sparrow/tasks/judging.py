"""Verdicts while training: in this process for code that is ours, in others for all else.

    with Judges("my_rewards:compute_score", workers=4, deadline=10.0) as judge:
        verdict = await judge(example, text)

Code of strangers on text of a model may hang, crash, print, start processes, or write to whatever
descriptor it finds. So it runs in a worker process (sparrow/processes), nobody waits for it beyond
a deadline, and what it answers is a verdict of the right form to this very question, or a fault:
what is late, crashed or raised gives reward 0 and is counted.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import math
import os
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from sparrow.processes.worker import Worker, WorkerFault
from sparrow.tasks.base import RIGHT, Example, Verdict, check_json, wrong

Score = Callable[[str, str, Any, Mapping[str, Any]], Any]  # verl's compute_score
CLOSED = "these judges are closed"
FORMS = "module:function or path/to/file.py:function"
TOLD = 500  # characters of what strangers' code says that are kept
LONGEST = 1 << 16  # bytes of a verdict
LARGEST = 1e9  # score: sums of squares of a batch stay far from overflow


class Outcome(NamedTuple):
    """A verdict, and what went wrong with the verifier, if anything."""

    verdict: Verdict
    fault: Literal["timeouts", "crashes", "errors"] | None = None


class _Job(NamedTuple):
    question: list[Any]  # the arguments of a scoring function, all of them JSON data
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
    limits: those of a `Worker`: memory and namespace

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
        **limits: Any,
    ) -> None:
        module, _, function = score.rpartition(":")
        if not (module and function.isidentifier()):
            raise ValueError(f"a scoring function is {FORMS}, got {score!r}")
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not 0 < deadline < math.inf:
            raise ValueError(f"deadline is seconds above 0, got {deadline}")
        self.counts: Counter[str] = Counter()
        self.last_fault = ""  # what the last verdict that failed says
        self._score, self._deadline = score, deadline
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        target = f"{__name__}:make_scorer"
        arguments = {"score": score, "preload": list(preload)}
        self._workers = [
            Worker(target, arguments, longest=LONGEST, **limits) for _ in range(workers)
        ]
        self._begin()
        self.isolation = self._workers[0].isolation  # pid namespace or subreaper

    def _begin(self) -> None:
        """The first worker is the probe: what cannot be loaded is told here."""
        try:
            self._wait(self._workers[0])
            for worker in self._workers[1:]:
                worker.start()
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            # Threads that a program's end does not wait for; a pool's would hold it up.
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    async def __call__(self, example: Example, text: str) -> Verdict:
        """Judge a text when a worker is free; other coroutines go on meanwhile."""
        truth, extra = example.ground_truth, example.extra
        check_json(truth, f"{example.id}: ground_truth")
        check_json(extra, f"{example.id}: extra")
        job = _Job([example.source, text, truth, extra], Future())
        with self._lock:
            if self._closed:
                raise ValueError(CLOSED)
            self._jobs.put(job)
        return await asyncio.wrap_future(job.future)

    def _serve(self, worker: Worker) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            outcome = self._judge(worker, job.question)
            if outcome.fault and self._closed:  # it is we who killed it
                job.future.set_exception(ValueError(CLOSED))
                continue
            self._count(outcome)
            job.future.set_result(outcome.verdict)
            with contextlib.suppress(ValueError):  # the next text tries again, and tells
                worker.start()

    def _judge(self, worker: Worker, question: list[Any]) -> Outcome:
        """Ask a worker. One that is late, gone or garbled is killed; the next text starts one."""
        try:
            self._wait(worker)
            return _outcome(worker.ask(question, self._deadline))
        except WorkerFault as fault:
            late, reason = fault.kind == "late", f"the verifier was killed: {fault}"
        except Exception as error:  # no question waits for ever because of it
            late, reason = False, f"the verifier did not start: {error!s:.500}"
        worker.kill()
        return Outcome(wrong(reason), "timeouts" if late else "crashes")

    def _wait(self, worker: Worker) -> None:
        """Wait until a worker can judge; a ValueError says why it cannot. No deadline counts."""
        try:
            worker.wait()
        except WorkerFault as fault:
            failed = "cannot be loaded" if fault.kind == "raised" else "failed as it started"
            raise ValueError(f"{self._score} {failed}: {fault}") from fault

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
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None and job.future.set_running_or_notify_cancel():
                    job.future.set_exception(ValueError(CLOSED))
        for worker in self._workers:
            worker.close()
        for _ in self._workers:
            self._jobs.put(None)


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


def _outcome(answer: Any) -> Outcome:
    """An answer of the worker, if it is a verdict; whatever else it may be is a fault."""
    match answer:
        case {"error": str(error), **rest} if not rest:
            return Outcome(wrong(f"the verifier raised {error[:TOLD]}"), "errors")
        case {"score": float(score), "acc": float(acc), "reason": str(reason), **rest} if not rest:
            if abs(score) <= LARGEST and abs(acc) <= LARGEST:
                return Outcome(Verdict(score, acc, reason[:TOLD]))
    raise WorkerFault("garbled", "it answered with what is no verdict")


# In the process.


def make_scorer(score: str, preload: list[str]) -> Callable[[list[Any]], dict[str, Any]]:
    """The scoring function as what a worker does with a question."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in preload:
        importlib.import_module(name)
    function = _loaded(score)

    def scorer(question: list[Any]) -> dict[str, Any]:
        try:
            return verdict_of(function(*question))._asdict()
        except Exception as error:  # code of strangers on text of a model: anything may come
            return {"error": f"{type(error).__name__}: {error}"[:TOLD]}

    return scorer


def _loaded(score: str) -> Score:
    place, _, function = score.rpartition(":")
    module = _file(place) if place.endswith(".py") else importlib.import_module(place)
    loaded = getattr(module, function, None)
    if not callable(loaded):
        raise ValueError(f"{place} has no function {function!r}")
    return loaded


def _file(place: str) -> Any:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"sparrow_score_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def verdict_of(result: Any) -> Verdict:
    """What a scoring function gave, a number or a dict with score, acc and reason, as a verdict.

    Without acc, a text is right where the score is 1 or more. Scores are taken as they are.
    """
    fields = result if isinstance(result, Mapping) else {"score": result}
    score = _number("score", fields.get("score"))
    acc = fields.get("acc")
    right = float(score >= 1) if acc is None else _number("acc", acc)
    reason = fields.get("reason")
    if not isinstance(reason, str):
        reason = RIGHT.reason if right >= 1 else "the verifier does not call it right"
    return Verdict(score, right, reason[:TOLD])


def _number(what: str, value: Any) -> float:
    """A number within bounds, of numpy too; text that looks like one is none."""
    if value is None or isinstance(value, str | bytes):
        raise ValueError(f"no number for {what}: {value!r:.80}")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"{number} for {what}, allowed: {-LARGEST:g} to {LARGEST:g}")
    return number
