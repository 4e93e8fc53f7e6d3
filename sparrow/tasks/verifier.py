"""One process with one scoring function in it: it can be asked, and it can be killed.

Code of strangers on text of a model may hang, crash, print, start processes, or write to whatever
descriptor it finds. So it runs in a worker process (sparrow/processes), nobody waits for it beyond
a deadline, and what it answers is a verdict of the right form to this very question, or a fault.
"""

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sparrow.processes.worker import Worker, WorkerFault
from sparrow.tasks.base import RIGHT, Verdict, wrong

Score = Callable[[str, str, Any, Mapping[str, Any]], Any]  # verl's compute_score
Fault = Literal["timeouts", "crashes", "errors"]

FORMS = "module:function or path/to/file.py:function"
TOLD = 500  # characters of what strangers' code says that are kept
LONGEST = 1 << 16  # bytes of a verdict
LARGEST = 1e9  # score: sums of squares of a batch stay far from overflow


class Question(NamedTuple):
    """The arguments of a scoring function, all of them JSON data."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


class Outcome(NamedTuple):
    """A verdict, and what went wrong with the verifier, if anything."""

    verdict: Verdict
    fault: Fault | None = None


class Verifier:
    """A process that judges one text at a time. Its start counts against no deadline.

    One thread asks; any thread may close it.

    score: the function, as module:function or file.py:function
    deadline: seconds that one verdict may take
    preload: modules that the function will import when called, so that no verdict waits for them
    limits: those of a `Worker`: memory and namespace
    """

    def __init__(
        self, score: str, deadline: float, preload: Sequence[str] = (), **limits: Any
    ) -> None:
        module, colon, function = score.rpartition(":")
        if not (module and colon and function.isidentifier()):
            raise ValueError(f"a scoring function is {FORMS}, got {score!r}")
        if not 0 < deadline < math.inf:
            raise ValueError(f"deadline is seconds above 0, got {deadline}")
        self._score, self._deadline = score, deadline
        arguments = {"score": score, "preload": list(preload)}
        self._worker = Worker(f"{__name__}:make_scorer", arguments, longest=LONGEST, **limits)

    @property
    def isolation(self) -> str:
        """How the process is kept apart: pid namespace or subreaper."""
        return self._worker.isolation

    def start(self) -> None:
        """Start the process, where none is alive, without waiting for it."""
        self._worker.start()

    def wait(self) -> None:
        """Wait until it can judge; a ValueError says why it cannot."""
        try:
            self._worker.wait()
        except WorkerFault as fault:
            if fault.kind == "raised":
                raise ValueError(f"{self._score} cannot be loaded: {fault}") from fault
            raise ValueError(f"{self._score} failed as it started: {fault}") from fault

    def judge(self, question: Question) -> Outcome:
        """Ask it. Where it is late, gone or garbled it is killed; the next question starts one."""
        try:
            self.wait()
            outcome = _outcome(self._worker.ask(question, self._deadline))
        except ValueError as error:
            outcome = Outcome(wrong(f"the verifier did not start: {error}"), "crashes")
        except WorkerFault as fault:
            kind: Fault = "timeouts" if fault.kind == "late" else "crashes"
            outcome = Outcome(wrong(f"the verifier was killed: {fault}"), kind)
        if outcome.fault in ("timeouts", "crashes"):
            self._worker.kill()
        return outcome

    def close(self) -> None:
        """Kill it, for good."""
        self._worker.close()


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
