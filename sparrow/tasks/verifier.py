"""One process with one scoring function in it: it can be asked, and it can be killed.

Code of strangers on text of a model may hang, crash, print or start processes. So it runs in a
process of its own, in a session of its own (no Ctrl-C of the terminal reaches it, and it is killed
with all it started), and nobody waits for it beyond a deadline.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import math
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sparrow.tasks.base import RIGHT, Verdict, wrong

Score = Callable[[str, str, Any, Mapping[str, Any]], Any]  # verl's compute_score
Fault = Literal["timeouts", "crashes", "errors"]

SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit a GPU that it cannot use
FORMS = "module:function or path/to/file.py:function"
START = 300.0  # seconds until a process must have loaded its function
GUARD = 60.0  # seconds after which a pipe that takes or gives nothing is called broken
ORPHANED = 2.0  # seconds between looks at the parent, and past a deadline that nobody enforced
TOLD = 500  # characters of what strangers' code says that are kept


class Question(NamedTuple):
    """The arguments of a scoring function."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


class Outcome(NamedTuple):
    """A verdict, and what went wrong with the verifier, if anything."""

    verdict: Verdict
    fault: Fault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """score: the function, as module:function or file.py:function
    deadline: seconds that one verdict may take
    preload: modules that the function will import when called, so that no verdict waits for them
    """

    score: str
    deadline: float
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        module, colon, function = self.score.rpartition(":")
        if not (module and colon and function.isidentifier()):
            raise ValueError(f"a scoring function is {FORMS}, got {self.score!r}")
        if not 0 < self.deadline < math.inf:
            raise ValueError(f"deadline is seconds above 0, got {self.deadline}")


class Verifier:
    """A process that judges one text at a time. Its start counts against no deadline.

    One thread asks; any thread may close it.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._ready = False
        self._closed = False

    def start(self) -> None:
        """Start the process, where none is alive, without waiting for it."""
        with self._lock:
            if self._process is not None and self._process.is_alive():
                return
            self._end()
            if self._closed:
                raise ValueError("the verifier is closed")
            self._pipe, theirs = SPAWN.Pipe()
            _guard(self._pipe)
            self._process = SPAWN.Process(target=serve, args=(theirs, self._setup))
            with theirs, _uninterrupted():
                try:
                    self._process.start()
                except OSError as error:
                    self._process = None
                    raise ValueError(f"no process could be started: {error}") from error

    def wait(self) -> None:
        """Wait until it can judge; a ValueError says why it cannot."""
        self.start()
        if self._ready:
            return
        assert self._pipe is not None
        try:
            if not self._pipe.poll(START):
                raise ValueError(f"{self._setup.score} was not loaded within {START:g} s")
            failure = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ValueError(
                f"{self._setup.score}: its process ended as it started ({self._ending()}). Does "
                'the script that asks for it stand under if __name__ == "__main__"?'
            ) from error
        if failure:
            raise ValueError(f"{self._setup.score} cannot be loaded: {failure}")
        self._ready = True

    def judge(self, question: Question) -> Outcome:
        """Ask it. Where it is late or gone, the process is killed; the next question starts one."""
        try:
            self.wait()
        except ValueError as error:
            self.kill()
            return Outcome(wrong(f"the verifier did not start: {error}"), "crashes")
        outcome = self._asked(question)
        if outcome.fault in ("timeouts", "crashes"):
            self.kill()
        return outcome

    def _asked(self, question: Question) -> Outcome:
        assert self._pipe is not None
        deadline = self._setup.deadline
        try:
            self._pipe.send(question)
            if not self._pipe.poll(deadline):
                told = f"the verifier took longer than {deadline:g} s and was killed"
                return Outcome(wrong(told), "timeouts")
            return Outcome(*self._pipe.recv())
        except (EOFError, OSError):
            return Outcome(wrong(f"the verifier's process ended ({self._ending()})"), "crashes")

    def _ending(self) -> str:
        process = self._process
        if process is None:
            return "it was closed"
        process.join(1.0)
        code = process.exitcode
        if code is None:
            return "nothing comes from it"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def kill(self) -> None:
        """End the process at once, with all that it started."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """Kill it, for good."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        self._ready = False
        if self._process is None or self._process.pid is None:
            return
        self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # none, or not yet its own
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join(1.0)
        self._process = None


def _guard(pipe: Connection) -> None:
    """No read or write blocks for ever, even if a stray process holds the other end open."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as shared:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            shared.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(GUARD), 0))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes started here do not get Ctrl-C, from their first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the process.


def serve(pipe: Connection, setup: Setup) -> None:
    """Judge what comes until nothing can come any more."""
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what verifiers print is no output of the program
    try:
        score = _loaded(setup)
    except Exception as error:  # a module of strangers: anything may come
        pipe.send(_told(error))
        return
    with contextlib.suppress(EOFError, OSError), open(os.devnull, "w") as nowhere:
        pipe.send("")
        while True:
            question = pipe.recv()
            # Where the program that should kill is gone; it works even if Python itself is stuck.
            faulthandler.dump_traceback_later(setup.deadline + ORPHANED, exit=True, file=nowhere)
            outcome = _scored(score, question)
            faulthandler.cancel_dump_traceback_later()
            pipe.send(outcome)


def _end_with(parent: int) -> None:
    """End this process and all it started soon after the one that would have killed it is gone."""
    while os.getppid() == parent:
        time.sleep(ORPHANED)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _loaded(setup: Setup) -> Score:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in setup.preload:
        importlib.import_module(name)
    place, _, function = setup.score.rpartition(":")
    module = _file(place) if place.endswith(".py") else importlib.import_module(place)
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{place} has no function {function!r}")
    return found


def _file(place: str) -> Any:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"sparrow_score_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickles look there
    spec.loader.exec_module(module)
    return module


def _scored(score: Score, question: Question) -> Outcome:
    try:
        return Outcome(verdict_of(score(*question)))
    except Exception as error:  # code of strangers on text of a model: anything may come
        return Outcome(wrong(f"the verifier raised {_told(error)}"), "errors")


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
    """A finite number, of numpy too; text that looks like one is none."""
    if value is None or isinstance(value, str | bytes):
        raise ValueError(f"no number for {what}: {value!r:.80}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} for {what}")
    return number


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:TOLD]
