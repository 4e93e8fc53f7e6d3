"""Proposals of candidates by code of others: a function or a program, ended when it is late."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from sparrow import functions
from sparrow.processes.worker import Worker, WorkerFault
from sparrow.schema.campaign import Candidate, FlowLoopConfig

MOST_SOURCE = 1 << 16  # characters of a proposal
MOST_OUTPUT = 1 << 20  # bytes that a program writes
MOST_ERROR = 500  # characters of an error that are kept

Json = dict[str, Any]


class Proposal(NamedTuple):
    """A flow's file, where it comes from, and its genes if it is of the built-in proposer."""

    source: str
    name: str
    parents: tuple[int, ...] = ()
    made: str = ""
    genes: Json | None = None

    def candidate(self, number: int) -> Candidate:
        about = self._asdict()
        del about["source"]
        return Candidate(number=number, status="scored", **about)


class Proposer:
    """The function or program of a campaign. A function runs in a process that keeps its state."""

    def __init__(self, config: FlowLoopConfig) -> None:
        self.config = config
        about = {"proposer": config.proposer}
        self._worker = Worker(f"{__name__}:make_proposer", about) if config.proposer else None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def propose(self, state: Json) -> Proposal:
        """The next proposal; ValueError if there is none."""
        seconds, number = self.config.seconds, state["number"]
        try:
            if self._worker is not None:
                return _given(_ask(self._worker, state, seconds), number)
            return _given(_run(str(self.config.command), state, seconds), number)
        except ValueError as error:
            text = f"the proposer failed on candidate {number}: {error}"
            raise ValueError(text) from error


def make_proposer(proposer: str) -> Callable[[Json], Any]:
    """The handler of a proposer's process."""
    return functions.resolve(proposer, "proposer")


def _ask(worker: Worker, state: Json, seconds: float) -> Any:
    """What a function returns."""
    try:
        worker.wait()
        return worker.ask(state, seconds)
    except WorkerFault as fault:
        worker.kill()
        raise ValueError(str(fault)) from fault


def _run(command: str, state: Json, seconds: float) -> str:
    """What a program writes; with all it started it is ended."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(state).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ValueError(f"it took longer than {seconds:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            said = _read(errors).decode(errors="replace")[-MOST_ERROR:]
            raise ValueError(f"it ended with {process.returncode}: {said}")
        written = _read(output)
    if len(written) > MOST_OUTPUT:
        raise ValueError(f"it wrote more than {MOST_OUTPUT} bytes")
    try:
        return written.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"its output is not UTF-8: {error}") from None


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MOST_OUTPUT + 1)


def _given(answer: Any, number: int) -> Proposal:
    """The proposal in an answer: a source, or {"source", "name", "parents", "made"}."""
    if isinstance(answer, str) and answer.lstrip().startswith("{"):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError as error:
            raise ValueError(f"its JSON cannot be read: {error}") from error
    given = {"source": answer} if isinstance(answer, str) else answer
    if not isinstance(given, dict):
        kind = type(answer).__name__
        raise ValueError(f"expected the source of a flow, or JSON with a source, got {kind}")
    source, parents = given.get("source"), given.get("parents") or []
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"expected the source of a flow, got {source!r:.80}")
    if len(source) > MOST_SOURCE:
        raise ValueError(f"a source may have {MOST_SOURCE} characters, got {len(source)}")
    if not isinstance(parents, list) or not all(type(parent) is int for parent in parents):
        raise ValueError(f"parents: expected a list of numbers, got {parents!r:.80}")
    name, made = (str(given.get(key) or "") for key in ("name", "made"))
    try:
        "".join((source, name, made)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from None
    name = name or f"proposal-{number}"
    return Proposal(source, name[:100], tuple(parents), made[:1000])
