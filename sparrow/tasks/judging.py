"""Judges: verdicts on texts while training, in worker processes that can be killed.

    with Judges("my_rewards:compute_score", workers=4, deadline=10.0) as judge:
        verdict = await judge(example, text)

A user's reward function on text of a model may hang, crash, print, start processes, or write to any
descriptor it finds. So it runs in a worker process (sparrow/processes) with a deadline, and its
answer must be a valid verdict on this very question. A timeout, a crash or an exception gives
reward 0 and is counted.

A reward function has one of two signatures:

    reward(text, answer)    any of text, answer, data_source and extra_info, by name
    compute_score(data_source, solution_str, ground_truth, extra_info)    verl's, by position

and returns a number, a bool, or a dict with "score" and, where it has them, "acc" (0 to 1) and
"reason".
"""

import asyncio
import contextlib
import importlib
import inspect
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

from sparrow.functions import resolve
from sparrow.processes.supervisor import MESSAGE_CHARACTERS, describe
from sparrow.processes.worker import Worker, WorkerFault
from sparrow.tasks.base import RIGHT, Example, FailedVerdict, Verdict, check_json

Score = Callable[[str, str, Any, Mapping[str, Any]], Any]  # verl's compute_score
SETTING = "data.reward"
SHORT = ("data_source", "text", "answer", "extra_info")  # parameters of the short signature
SIGNATURES = (
    "reward(text, answer) or compute_score(data_source, solution_str, ground_truth, extra_info)"
)
CLOSED = "these judges are closed"
LONGEST = 1 << 16  # bytes of a verdict
LARGEST = 1e9  # score: sums of squares of a batch stay far from overflow


class Unjudged(ValueError):
    """Every verdict of a training step or of an evaluation failed."""


class _Job(NamedTuple):
    question: list[Any]  # JSON data: the arguments of a scoring function
    future: "Future[Verdict]"


class CountingJudge:
    """Counts verdicts, and closes at the end of a with-block."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last_fault = ""  # the reason of the last verdict that failed
        self._lock = threading.Lock()

    def _count(self, verdict: Verdict) -> Verdict:
        with self._lock:
            self.counts["judged"] += 1
            if isinstance(verdict, FailedVerdict):
                self.counts[verdict.fault] += 1
                self.last_fault = verdict.reason
        return verdict

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what it holds."""


class Judges(CountingJudge):
    """Verdicts by a reward function in worker processes, each of which can be killed alone.

    score: module:function or path/to/file.py:function, with a signature of the module docstring
    workers: processes; each judges one text at a time
    deadline: seconds that a verdict may take, from when a worker has the text
    preload: modules that workers import before they take a text
    handler: what makes the function of a worker, with arguments; None: by `score`
    limits: those of a `Worker`: memory and namespace

    `counts` has every verdict under "judged", and faults of the reward function under "timeouts",
    "crashes" and "errors" (it raised, or returned no number). Nothing here belongs to an event
    loop: workers live as long as this object.
    """

    def __init__(
        self,
        score: str,
        workers: int = 2,
        deadline: float = 10.0,
        preload: Sequence[str] = (),
        handler: tuple[str, Mapping[str, Any]] | None = None,
        **limits: Any,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not 0 < deadline < math.inf:
            raise ValueError(f"deadline must be above 0 seconds, got {deadline}")
        super().__init__()
        self._score, self._deadline, self.workers = score, deadline, workers
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        usual = (f"{__name__}:make_scorer", {"score": score, "preload": list(preload)})
        target, arguments = handler or usual
        self._workers = [
            Worker(target, arguments, longest=LONGEST, **limits) for _ in range(workers)
        ]
        self._begin()
        self.isolation = self._workers[0].isolation  # pid namespace or subreaper

    def _begin(self) -> None:
        """Start the workers; the first shows whether the reward function can be loaded."""
        try:
            self._wait(self._workers[0])
            for worker in self._workers[1:]:
                worker.start()
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            # Daemon threads: the end of the program does not wait for them, as for a pool's.
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    async def __call__(self, example: Example, text: str) -> Verdict:
        """Judge a text as soon as a worker is free; other coroutines run meanwhile."""
        truth, extra = example.ground_truth, example.extra
        check_json(truth, f"{example.id}: ground_truth")
        check_json(extra, f"{example.id}: extra")
        return await self._ask([example.source, text, truth, extra])

    async def _ask(self, question: list[Any]) -> Verdict:
        job = _Job(question, Future())
        with self._lock:
            if self._closed:
                raise ValueError(CLOSED)
            self._jobs.put(job)
        return await asyncio.wrap_future(job.future)

    def _serve(self, worker: Worker) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue  # cancelled
            verdict = self._judge(worker, job.question)
            if isinstance(verdict, FailedVerdict) and self._closed:  # killed by close()
                job.future.set_exception(ValueError(CLOSED))
                continue
            job.future.set_result(self._count(verdict))
            with contextlib.suppress(ValueError):  # the next text tries again and reports it
                worker.start()

    def _judge(self, worker: Worker, question: list[Any]) -> Verdict:
        """Ask a worker; a late, dead or garbled one is killed, and the next text starts another."""
        try:
            self._wait(worker)
            return _received(worker.ask(question, self._deadline))
        except WorkerFault as fault:
            late, reason = fault.kind == "late", f"the verifier was killed: {fault}"
        except Exception as error:  # otherwise the caller would wait forever
            late, reason = False, f"the verifier did not start: {error!s:.500}"
        worker.kill()
        return failed_verdict(reason, "timeouts" if late else "crashes")

    def _wait(self, worker: Worker) -> None:
        """Wait until a worker is ready, without a deadline; raise ValueError if it fails."""
        try:
            worker.wait()
        except WorkerFault as fault:
            raise ValueError(f"{self._score} cannot be loaded: {fault}") from fault

    def close(self) -> None:
        """Kill all workers, whatever they are doing; pending calls raise ValueError."""
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


class InProcess(CountingJudge):
    """Verdicts in this process: by a puzzle, or by a function defined in a notebook cell.

    It has the interface of `Judges`, but no deadline and no isolation.
    """

    def __init__(self, reward: Callable[[Example, str], Verdict]) -> None:
        super().__init__()
        self._reward = reward

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> Self:
        """Judge by a user's function, with a signature of the module docstring."""
        score = adapted(function)

        def reward(example: Example, text: str) -> Verdict:
            return parse_verdict(score(example.source, text, example.ground_truth, example.extra))

        return cls(reward)

    async def __call__(self, example: Example, text: str) -> Verdict:
        """Judge a text now; an exception gives reward 0 and is counted."""
        try:
            return self._count(self._reward(example, text))
        except (Exception, SystemExit) as error:  # a user's code: anything may be raised
            return self._count(failed_verdict(f"the verifier raised {describe(error)}"))


def failed_verdict(reason: str, fault: str = "errors") -> Verdict:
    verdict = FailedVerdict(0.0, 0.0, reason)
    verdict.fault = fault
    return verdict


def _received(answer: Any) -> Verdict:
    """Read a worker's answer; anything but a valid verdict is a fault."""
    match answer:
        case {"error": str(error), **rest} if not rest:
            return failed_verdict(f"the verifier raised {error[:MESSAGE_CHARACTERS]}")
        case {"fault": "timeouts" as kind, "reason": str(reason), **rest} if not rest:
            return failed_verdict(reason[:MESSAGE_CHARACTERS], kind)
        case {"score": float(score), "acc": float(acc), "reason": str(reason), **rest} if not rest:
            if abs(score) <= LARGEST and 0 <= acc <= 1:
                return Verdict(score, acc, reason[:MESSAGE_CHARACTERS])
    raise WorkerFault("garbled", "its answer is not a verdict")


# In the worker process.


def make_scorer(score: str, preload: list[str]) -> Callable[[list[Any]], dict[str, Any]]:
    """Make the function that answers a worker's questions by a reward function."""
    for name in preload:
        importlib.import_module(name)
    function = adapted(resolve(score, SETTING))

    def scorer(question: list[Any]) -> dict[str, Any]:
        try:
            return parse_verdict(function(*question))._asdict()
        except Exception as error:  # a user's code on text of a model: anything may be raised
            return {"error": describe(error)}

    return scorer


def adapted(function: Callable[..., Any]) -> Score:
    """Return a reward function with verl's signature, whichever of the two it has."""
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{SETTING}: expected {SIGNATURES}, got async {function.__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable of C
        return function
    names = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
    if "text" in names and {*names} <= {*SHORT}:
        return lambda *question: function(
            **{name: value for name, value in zip(SHORT, question, strict=True) if name in names}
        )
    try:
        signature.bind(*SHORT)
    except TypeError:
        name = getattr(function, "__name__", "reward")
        raise ValueError(f"{SETTING}: expected {SIGNATURES}, got {name}{signature}") from None
    return function


def parse_verdict(result: Any) -> Verdict:
    """Make a verdict of a number, of a dict with score, acc and reason, or of a verdict.

    Without acc, a text is right if its score is at least 1. Scores are not clipped.
    """
    if isinstance(result, Verdict):
        result = result._asdict()
    fields = result if isinstance(result, Mapping) else {"score": result}
    score = _number("score", fields.get("score"), -LARGEST, LARGEST)
    acc = fields.get("acc")
    right = float(score >= 1) if acc is None else _number("acc", acc, 0, 1)
    reason = fields.get("reason")
    if not isinstance(reason, str):
        reason = RIGHT.reason if right >= 1 else "the verifier does not call it right"
    return Verdict(score, right, reason[:MESSAGE_CHARACTERS])


def _number(what: str, value: Any, low: float, high: float) -> float:
    """Return a number within bounds, also of a numpy scalar; text is refused."""
    if value is None or isinstance(value, str | bytes):
        raise ValueError(f"{what} must be a number, got {value!r:.80}")
    number = float(value)
    if not low <= number <= high:
        raise ValueError(f"{what} must be {low:g} to {high:g}, got {number}")
    return number
