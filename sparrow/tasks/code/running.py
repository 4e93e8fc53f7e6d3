"""Verdicts on programs: run their tests in a sandbox, and compare outside of it.

Expected outputs never enter the sandbox of a solution. Programs get their stdin; functions their
arguments, one call after the other; for asserts, tests run in a second sandbox, and every call of
the solution is relayed as plain data. So a solution meets neither the tests nor what they expect.
"""

import json
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparrow.files import printable
from sparrow.sandbox.base import Limits, Outcome, Running, Sandbox
from sparrow.sandbox.inside import pack, unpack
from sparrow.schema.code import CodeConfig
from sparrow.tasks.base import RIGHT, FailedVerdict, Verdict
from sparrow.tasks.code.comparing import same_output, same_value
from sparrow.tasks.code.problems import AssertTests, CallTests, Problem, StdioTests

Results = Generator[str, None, None]  # what is wrong with each test; empty: nothing
MESSAGE_CHARACTERS = 200  # of an exception
SHOWN = 60  # characters of an output in a reason


class ProgramEnded(Exception):
    """A solution that gave no answer; the message says why."""


class OutOfWallTime(Exception):
    """The backstop ended a program: it sleeps, or the machine is overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramJudge:
    """Judges programs by their tests, one at a time."""

    sandbox: Sandbox
    config: CodeConfig

    def limits(self, expected: Sequence[Any] = ()) -> Limits:
        """Limits of a program; it may write as much as it should, whatever the limit of output."""
        config = self.config
        needed = 2 * max((len(json.dumps(output)) for output in expected), default=0)
        return Limits(
            cpu_seconds=config.cpu_seconds,
            wall_seconds=config.wall_seconds,
            memory_bytes=config.memory_mib << 20,
            output_bytes=max(config.output_kib << 10, needed),
            scratch_bytes=config.scratch_mib << 20,
        )

    def __call__(self, program: str, problem: Problem) -> Verdict:
        """Judge a program; a verdict that failed says nothing about it."""
        passed, reason, results = 0, "", self._problems(program, problem)
        try:
            for number, found in enumerate(results, 1):
                passed += not found
                if found and not reason:
                    reason = f"test {number} of {_count(problem)}: {found}"
                if found and self.config.reward == "all":
                    break
        except OutOfWallTime:
            verdict = FailedVerdict(0.0, 0.0, f"out of wall time ({self.config.wall_seconds:g} s)")
            verdict.fault = "timeouts"
            return verdict
        except ProgramEnded as error:
            passed = min(passed, _count(problem) - 1)
            reason = reason or f"test {passed + 1} of {_count(problem)}: {error}"
        finally:
            results.close()  # ends what runs
        if passed == _count(problem):
            return RIGHT
        share = passed / _count(problem) if self.config.reward == "share" else 0.0
        return Verdict(share, 0.0, reason)

    def _problems(self, program: str, problem: Problem) -> Results:
        """What is wrong with each test; empty: nothing."""
        if isinstance(problem, StdioTests):
            return self._stdio(program, problem)
        if isinstance(problem, CallTests):
            return self._calls(program, problem)
        return self._asserts(program, problem)

    def _stdio(self, program: str, tests: StdioTests) -> Results:
        limits = self.limits(tests.outputs)
        until = time.monotonic() + limits.wall_seconds
        for text, expected in zip(tests.inputs, tests.outputs, strict=True):
            stdin = text.encode()
            limits = replace(limits, wall_seconds=until - time.monotonic())
            outcome = self.sandbox.start(program, "script", limits).finish(stdin)
            if outcome.ending == "wall":
                raise OutOfWallTime
            got = outcome.stdout.decode(errors="replace")
            if outcome.problem:
                yield outcome.problem
            elif same_output(expected, got, self.config.tolerance):
                yield ""
            else:
                yield f"expected {_short(expected)}, got {_short(got)}"

    def _calls(self, program: str, tests: CallTests) -> Results:
        limits = self.limits(tests.outputs)
        solution = Solution(self.sandbox.start(program, "calls", limits))
        try:
            solution.begin()
            for args, expected in zip(tests.inputs, tests.outputs, strict=True):
                reply = solution.call({"call": tests.function, "args": list(map(pack, args))})
                yield self._compare(reply, expected, wrapped=tests.wrapped)
            solution.check_time()
        finally:
            solution.end()

    def _compare(self, reply: dict[str, Any], expected: Any, *, wrapped: bool) -> str:
        if "raised" in reply:
            return f"raised {reply['raised']}: {reply['message']}"
        got = _value(reply)
        right = same_value(expected, got, self.config.tolerance)
        if right or (wrapped and same_value(expected[0], got, self.config.tolerance)):
            return ""
        return f"expected {_short(expected)}, got {_short(got)}"

    def _asserts(self, program: str, tests: AssertTests) -> Results:
        solution = Solution(self.sandbox.start(program, "calls", self.limits()))
        try:
            solution.begin()
            yield from self._run_tests(solution, tests)
            solution.check_time()
        finally:
            solution.end()

    def _run_tests(self, solution: "Solution", tests: AssertTests) -> Results:
        parts = ("prefix", "names", "entry", "tests")
        source = {name: getattr(tests, name) for name in parts}
        tester = self.sandbox.start(json.dumps(source), "tests", self.limits())
        nonce, done = secrets.token_hex(16), 0
        tester.send(nonce.encode() + b"\n")
        try:
            while done < len(tests.tests):
                line = tester.read_line()
                if line is None:
                    break
                message = json.loads(line)
                if "call" in message:
                    tester.send(json.dumps(solution.call(message)).encode() + b"\n")
                elif message.get("nonce") == nonce and message.get("test") == done:
                    done += 1
                    yield _plain(str(message["reason"]))
        finally:
            outcome = tester.end()
        if done < len(tests.tests):
            if outcome.ending == "wall":
                raise OutOfWallTime
            if outcome.ending == "time" and solution.calls:  # values that take long to compare
                raise ProgramEnded("out of CPU time in the tests")
            raise ValueError(f"the tests of this row do not run: {outcome.problem or 'they end'}")


class Solution:
    """A program in a sandbox that answers calls of its functions."""

    def __init__(self, running: Running) -> None:
        self._running, self.calls = running, 0

    def begin(self) -> None:
        """Wait until the program has run; ProgramEnded if it failed."""
        reply = self._receive()
        if "raised" in reply:
            raise ProgramEnded(f"{reply['raised']}: {reply['message']}")

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function: a reply with its value, or with what it raised."""
        self.calls += 1
        self._running.send(json.dumps(request).encode() + b"\n")
        return self._receive()

    def end(self) -> Outcome:
        return self._running.end()

    def check_time(self) -> None:
        """End it; ProgramEnded if it had used more CPU time than it may."""
        if (outcome := self.end()).ending == "time":
            raise ProgramEnded(outcome.problem)

    def _receive(self) -> dict[str, Any]:
        line = self._running.read_line()
        try:
            reply = None if line is None else json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        reply = _checked(reply)
        if reply is None:
            outcome = self.end()
            if outcome.ending == "wall":
                raise OutOfWallTime
            ended = line is None and outcome.problem
            raise ProgramEnded(ended or "it ended before it answered")
        return reply


def _checked(reply: Any) -> dict[str, Any] | None:
    """A reply with the keys that it may have, and no others; None if it is none."""
    match reply:
        case {"raised": str(name), "message": str(message)}:
            return {"raised": _plain(name), "message": _plain(message)}
        case {"value": value, "args": list(args)}:
            return {"value": value, "args": args}
        case {"ready": True}:
            return {"ready": True}
    return None


def _plain(text: str) -> str:
    """The beginning of a text from a sandbox, safe on a terminal and in a file."""
    return printable(text[:MESSAGE_CHARACTERS]).encode(errors="replace").decode()


def _value(reply: dict[str, Any]) -> Any:
    try:
        return unpack(reply.get("value"))
    except ValueError:
        return None


def _count(problem: Problem) -> int:
    return len(problem.tests if isinstance(problem, AssertTests) else problem.inputs)


def _short(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else value
    return f"{text!r}" if len(repr(text)) <= SHOWN else f"{text!r:.{SHOWN}}..."
