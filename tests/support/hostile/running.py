"""One hostile program in a sandbox: what the judge sees, and whether it got through."""

import json
import time
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from sparrow.sandbox.base import Ending, Limits, Mode, Outcome, Running, Sandbox
from sparrow.sandbox.inside import unpack
from support.hostile.aims import Aims
from support.hostile.kinds import Kind, complete

SLACK = 6.0  # seconds over the wall clock's limit after which a judge has hung
CALL = b'{"call": "solve", "args": [1, [2], {"dict": [["a", 1]]}]}\n'
CALLS = 3
STDIN = b"2 3\n" * 20_000


class Tried(NamedTuple):
    """A program that was run. problem: how it got through; empty: it did not."""

    problem: str
    outcome: Outcome | None
    seconds: float


def run_kind(sandbox: Sandbox, kind: Kind, aim: Aims) -> Tried:
    source = complete(kind.source, aim.values())
    return run_source(sandbox, source, kind.mode, kind.limit(), kind.endings, aim.marker)


def run_source(
    sandbox: Sandbox,
    source: str,
    mode: Mode,
    limits: Limits,
    endings: Sequence[Ending],
    marker: str,
) -> Tried:
    """Run a program as the judge would; ValueError is the one error that a judge expects."""
    begun = time.monotonic()
    problem, outcome = "", None
    try:
        running = sandbox.start(source, mode, limits)
        if mode == "script":
            outcome = running.finish(STDIN)
        else:
            outcome, problem = _ask(running)
    except ValueError:
        pass  # refused
    except BaseException:
        problem = "the judge crashed: " + traceback.format_exc().strip().splitlines()[-1]
    seconds = time.monotonic() - begun
    if outcome is not None and not problem:
        if marker.encode() in outcome.stdout + outcome.stderr:
            problem = "the marker was printed"
        elif outcome.ending.replace("asleep", "wall") not in endings:
            problem = f"it ended by {outcome.ending} ({outcome.code}), not {' or '.join(endings)}"
    if not problem and seconds > limits.wall_seconds + SLACK:
        problem = f"it took {seconds:.1f} s"
    return Tried(problem, outcome, seconds)


def _ask(running: Running) -> tuple[Outcome, str]:
    """Calls and answers, until one is no answer."""
    problem = ""
    try:
        for number in range(CALLS + 1):
            if number:
                running.send(CALL)
            if (line := running.read_line()) is None:
                break
            try:
                reply = json.loads(line)
                if number and isinstance(reply, dict) and "value" in reply:
                    unpack(reply["value"])
            except ValueError:
                break
            except RecursionError as error:
                if "in json" not in traceback.format_exc() and _in_unpack(error):
                    problem = "the judge crashed: RecursionError in unpack"
                break
    except Exception as error:
        problem = f"the judge crashed: {type(error).__name__}: {error}"
    return running.end(), problem


def _in_unpack(error: BaseException) -> bool:
    return any(frame.name == "unpack" for frame in traceback.extract_tb(error.__traceback__))
