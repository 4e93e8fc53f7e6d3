"""The judge of programs while training: worker processes, each with a sandbox of its own.

    with CodeJudges(CodeConfig(), workers=4) as judge:
        verdict = await judge(example, text)      # of the last fenced block of Python in the text

The sandbox is tested before the first program, in such a worker process, and refused if an attack
gets through. Verdicts are kept by program and tests.
"""

import asyncio
import functools
import hashlib
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from sparrow.processes.supervisor import describe
from sparrow.processes.worker import Worker, WorkerFault
from sparrow.sandbox.backends import open_sandbox
from sparrow.sandbox.base import SandboxRefused
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.code import CodeConfig
from sparrow.tasks.base import END_THINK, Example, FailedVerdict, Verdict, check_seed, wrong
from sparrow.tasks.code.problems import parse_problem
from sparrow.tasks.code.running import ProgramJudge
from sparrow.tasks.judging import Judges
from sparrow.tasks.programming.tasks import ProgrammingTasks

FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})([^\n]*)", re.M)  # in linear time
TAG = re.compile(r"\w[\w+#.-]*")  # the first word behind a fence, also in {.python}
PYTHON = re.compile(r"py(thon)?[0-9.]*", re.I)
NO_PROGRAM = "no fenced block of Python"
LONGEST_PROGRAM = 1 << 20  # characters
DEEPER = 3  # spaces that a closing fence may have more than the opening one
SELF_TEST_SECONDS = 120.0
MARGIN_SECONDS = 30.0  # for a verdict, beyond the wall time of a program


def extract_program(text: str) -> str | None:
    """The last fenced block of Python after the thoughts; None if there is none.

    Blocks without a tag count only if no block is tagged as Python.
    """
    tagged = untagged = None
    for tags, block in fenced_blocks(text.rpartition(END_THINK)[2]):
        tag = TAG.search(tags)
        if tag is None:
            untagged = block
        elif PYTHON.fullmatch(tag[0]):
            tagged = block
    program = untagged if tagged is None else tagged
    return None if program is None or len(program) > LONGEST_PROGRAM else program


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of Markdown: what stands behind the fence, and the block.

    A fence may be indented, as in a list; its block is dedented by as much. A block that is not
    closed is none.
    """
    opened, tags, margin, start = "", "", 0, 0
    for match in FENCE.finditer(text):
        indent, fence, behind = len(match[1]), match[2], match[3].strip()
        if not opened and not ("`" in fence and "`" in behind):  # that is code in a line of text
            opened, tags, margin, start = fence, behind, indent, match.end() + 1
        elif opened and fence.startswith(opened) and not behind and indent <= margin + DEEPER:
            block = text[start : match.start()].replace("\r\n", "\n")
            yield tags, re.sub(rf"^[ \t]{{1,{margin}}}", "", block, flags=re.M) if margin else block
            opened = ""


class CodeJudges(Judges):
    """Verdicts on programs in sandboxes. Raises SandboxRefused if the chosen one is not safe."""

    def __init__(self, config: CodeConfig, workers: int = 2) -> None:
        self._config = config
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._asked: dict[bytes, Future[Verdict | None]] = {}
        sandbox = check_sandbox(config)
        super().__init__(
            f"the sandbox {config.sandbox}",
            workers,
            config.wall_seconds + MARGIN_SECONDS,
            handler=(f"{__name__}:make_program_judge", {"config": to_dict(config)}),
        )
        self.isolation = f"{sandbox}; judges by {self.isolation}"

    async def __call__(self, example: Example, text: str) -> Verdict:
        """Judge the program of a text, or remember its verdict."""
        program = extract_program(text)
        if program is None:
            return self._count(wrong(NO_PROGRAM))
        question = [program, example.ground_truth]
        key = hashlib.sha256(json.dumps(question).encode()).digest()
        return await self._ask_once(key, question)

    async def _ask_once(self, key: bytes, question: list[Any]) -> Verdict:
        """Ask, unless the verdict is known, or another caller is asking: then wait for that one.

        Callers may be of several event loops. If the one who asks gives up, the next one asks.
        """
        own: Future[Verdict | None] = Future()
        own.set_running_or_notify_cancel()  # so that those who wait cannot cancel it
        with self._lock:
            verdict = self._verdicts.get(key)
            asking = own if verdict is not None else self._asked.setdefault(key, own)
        if asking is not own:
            verdict = await asyncio.wrap_future(asking)
            if verdict is None:
                return await self._ask_once(key, question)
        if verdict is not None:
            return self._count(verdict)
        try:
            verdict = await self._ask(question)
            return verdict
        finally:
            with self._lock:
                del self._asked[key]
                self._remember(key, verdict)
            own.set_result(verdict)

    def _remember(self, key: bytes, verdict: Verdict | None) -> None:
        if verdict is not None and not isinstance(verdict, FailedVerdict):
            self._verdicts[key] = verdict
            while len(self._verdicts) > self._config.cache:
                self._verdicts.popitem(last=False)


def check_sandbox(config: CodeConfig) -> str:
    """Test a sandbox in a worker process, as judges use it; what its isolation is."""
    arguments = {"config": to_dict(config)}
    worker = Worker(f"{__name__}:make_sandbox_test", arguments)
    try:
        return str(worker.ask(None, SELF_TEST_SECONDS))
    except WorkerFault as fault:
        raise SandboxRefused(f"programs are not judged: {fault}") from fault
    finally:
        worker.close()


# In the worker process.


def _tests(truth: Any) -> Any:
    """The tests of a ground truth; those of a generated row come from its seed."""
    if isinstance(truth, Mapping) and truth.get("family") == ProgrammingTasks.name:
        seed: Any = truth.get("seed")
        length: Any = truth.get("length")
        check_seed(ProgrammingTasks.name, seed, length, ProgrammingTasks.lengths)
        return _generated(seed, length)
    return truth


@functools.lru_cache(maxsize=256)  # the answers to a prompt come together
def _generated(seed: int, length: int) -> Mapping[str, Any]:
    return ProgrammingTasks().row(seed, length).data


def make_sandbox_test(config: Mapping[str, Any]) -> Callable[[None], str]:
    settings = from_dict(CodeConfig, config)
    sandbox = open_sandbox(settings.sandbox, cgroup=settings.cgroup)
    return lambda _: sandbox.isolation


def make_program_judge(config: Mapping[str, Any]) -> Callable[[list[Any]], dict[str, Any]]:
    """Make the function that answers a worker's questions: a program and its ground truth."""
    settings = from_dict(CodeConfig, config)
    sys.set_int_max_str_digits(0)  # outputs are limited anyway
    sandbox = open_sandbox(settings.sandbox, cgroup=settings.cgroup, test=False)
    judge = ProgramJudge(sandbox=sandbox, config=settings)

    def answer(question: list[Any]) -> dict[str, Any]:
        program, truth = question
        try:
            verdict = judge(program, parse_problem(_tests(truth)))
        except (ValueError, RecursionError) as error:  # of the row, not of the program
            return {"error": describe(error)}
        if isinstance(verdict, FailedVerdict):
            return {"fault": verdict.fault, "reason": verdict.reason}
        return verdict._asdict()

    return answer
