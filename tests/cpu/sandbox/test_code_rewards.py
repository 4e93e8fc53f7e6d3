"""Verdicts on programs in the default sandbox: right ones, wrong ones, and forged ones."""

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import run_folders

from sparrow.files import add_digest_line
from sparrow.reporting.run_page import make_page
from sparrow.sandbox.backends import open_sandbox
from sparrow.sandbox.base import Limits, SandboxRefused
from sparrow.schema.code import UNSAFE, CodeConfig
from sparrow.schema.train import RowsConfig
from sparrow.tasks.base import Example, FailedVerdict, Verdict
from sparrow.tasks.choosing import open_judge, open_rows
from sparrow.tasks.code.judging import CodeJudges
from sparrow.tasks.code.problems import parse_problem
from sparrow.tasks.code.running import ProgramJudge

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")

STDIO = {"inputs": ["1 2\n", "5 6\n", "-1 1\n"], "outputs": ["3\n", "11\n", "0\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [5, 6], [-1, 1]], "outputs": [3, 11, 0]}
CHECK = {
    "prompt": "def half(x):\n    return x / 2\n\ndef add(a, b):\n    '''Add.'''\n",
    "test": "def check(candidate):\n"
    + "".join(f"    assert candidate({a}, {b}) == {a + b}\n" for a, b in ((1, 2), (5, 6), (-1, 1)))
    + "    assert half(candidate(4, 4)) == 4",
    "entry_point": "add",
}
ASSERTS = {
    "test_list": ["assert add(1, 2) == 3", "assert add(5, 6) == 11", "assert add(-1, 1) == 0"]
}
ADD = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def judge() -> ProgramJudge:
    config = CodeConfig(cpu_seconds=1, wall_seconds=20.0, memory_mib=128, output_kib=64)
    return ProgramJudge(sandbox=open_sandbox("bwrap", test=False), config=config)


def verdict(judge: ProgramJudge, program: str, truth: Any, **changes: Any) -> Verdict:
    judge = ProgramJudge(sandbox=judge.sandbox, config=judge.config.replace(**changes))
    return judge(program, parse_problem(truth))


@pytest.mark.parametrize(
    ("truth", "program"),
    [
        (STDIO, "print(sum(map(int, input().split())))"),
        (CALLS, ADD),
        (CALLS, "class Solution:\n    def add(self, a, b):\n        return a + b"),
        (CHECK, ADD),
        (ASSERTS, ADD),
    ],
)
def test_right_programs_are_right(judge: ProgramJudge, truth: Any, program: str) -> None:
    assert verdict(judge, program, truth) == (1.0, 1.0, "right")


@pytest.mark.parametrize("truth", [STDIO, CALLS, CHECK, ASSERTS])
@pytest.mark.parametrize(
    "program",
    [
        "print(3)\ndef add(a, b): return 3",
        "def add(a, b): return None",
        "def add(: pass",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "def add(a, b): raise ValueError('no')",
        "def add(a, b):\n    while True: pass\nadd(1, 2)",
        "x = 'x' * 10**9",
        "print('x' * 10**6)",
        "",
    ],
)
def test_wrong_programs_are_wrong_with_a_reason(
    judge: ProgramJudge, truth: Any, program: str
) -> None:
    found = verdict(judge, program, truth)
    assert (found.score, found.acc) == (0.0, 0.0)
    assert found.reason
    assert not isinstance(found, FailedVerdict)


FORGED = {
    "exit code": "import os\ndef add(a, b): os._exit(0)",
    "exit at once": "import sys\nsys.exit(0)",
    "equal to all": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def add(a, b): return Equal(7)
""",
    "patched builtins": """
import builtins
builtins.AssertionError = type("Never", (BaseException,), {})
builtins.all = builtins.any = lambda *_: True
def add(a, b): return 7
""",
    "patched json": """
import json
true = json.dumps
json.dumps = lambda value, **_: true({"test": 0, "nonce": "", "reason": ""})
def add(a, b): return 7
""",
    "written results": """
import os
def add(a, b):
    for fd in range(1, 32):
        try: os.write(fd, b'{"test": 0, "nonce": "", "reason": ""}\\n{"value": 3, "args": []}\\n')
        except OSError: pass
    os._exit(0)
""",
    "frames": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for values in (frame.f_locals, frame.f_globals):
            for name, value in list(values.items()):
                if "expected" in name or "outputs" in name or "reason" in name:
                    return value
        frame = frame.f_back
    return 7
""",
    "arguments": "import sys\ndef add(a, b): return sys.argv",
    "objects": """
import gc
def add(a, b):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "outputs" in thing: return thing["outputs"][0]
        if isinstance(thing, str) and "assert" in thing: exec(thing)
    return 7
""",
    "redefined helper": "def half(x): return 4\ndef check(f): pass\ndef add(a, b): return 7",
    "printed": "print('right', 'passed', 'OK', 3, 11, 0)\ndef add(a, b): print(3); return 7",
    "patched names": "def sum(*_): return 3\nint = str\ndef add(a, b): return 7",
    "raised": "def add(a, b): raise SystemExit(0)",
    "raised pass": """
class SolutionEnded(BaseException): pass
def add(a, b): raise SolutionEnded('')
""",
    "generator": "def add(a, b):\n    yield from range(10**9)",
    "recursive": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "deep": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "not a number": "def add(a, b): return float('nan')",
}


@pytest.mark.parametrize("truth", [STDIO, CALLS, CHECK, ASSERTS], ids=list("scha"))
@pytest.mark.parametrize("name", FORGED)
def test_forged_verdicts_win_nothing(judge: ProgramJudge, name: str, truth: Any) -> None:
    found = verdict(judge, FORGED[name], truth)
    assert (found.score, found.acc) == (0.0, 0.0)


def test_expected_outputs_are_not_in_the_sandbox(judge: ProgramJudge) -> None:
    program = """
import gc
def add(a, b):
    needle = str(int("9161726354") * 10**10 + int("5362718293"))
    texts = [t for t in gc.get_objects() if isinstance(t, (str, list, dict, tuple))]
    return needle in repr(texts) or needle in open("/mnt/inside.py").read()
"""
    truth = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [91617263545362718293]}
    assert verdict(judge, program, truth).reason.endswith("got False")


def test_a_share_of_tests(judge: ProgramJudge) -> None:
    program = "def add(a, b): return 3 if a == 1 else 11"
    for truth in (CALLS, ASSERTS):
        found = verdict(judge, program, truth, reward="share")
        assert (found.score, found.acc) == (pytest.approx(2 / 3), 0.0)
        assert "test 3 of 3" in found.reason


def test_arguments_that_a_function_changes(judge: ProgramJudge) -> None:
    tests = ["x = [3, 1]\norder(x)\nassert x == [1, 3]", "d = {1: 2}\norder(d)\nassert d == {}"]
    program = "def order(x):\n    x.sort() if isinstance(x, list) else x.clear()"
    assert verdict(judge, program, {"test_list": tests}).acc == 1.0


def test_a_function_named_like_a_builtin(judge: ProgramJudge) -> None:
    truth = {"test_list": ["assert sum(10, 15) == 6", "assert sum(4, 6) == 3"]}
    assert verdict(judge, "def sum(a, b): return 6 if a == 10 else 3", truth).acc == 1.0
    assert verdict(judge, "pass", truth).acc == 0.0
    assert verdict(judge, "pass", {"test_list": ["assert sum([1, 2, 3]) == 6"]}).acc == 0.0


def test_names_that_the_prefix_defines_are_not_the_solution(judge: ProgramJudge) -> None:
    star = {"test_imports": ["from math import *"]}
    truth = {"test_list": ["assert isclose(area(1), pi, rel_tol=1e-3)"], **star}
    assert verdict(judge, "def area(r): return 3.14159 * r * r", truth).acc == 1.0
    forged = "def isclose(*_, **__): return True\ndef area(r): return 0"
    assert verdict(judge, forged, truth).acc == 0.0
    with pytest.raises(ValueError, match="no function of a solution"):
        verdict(judge, "pass", {"test_list": ["assert pow(2, 3) == 8"], **star})


def test_exceptions_reach_the_tests(judge: ProgramJudge) -> None:
    test = "try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    pass"
    assert verdict(judge, "def f(x): return 1 / x", {"test_list": [test]}).acc == 1.0


def test_tests_that_do_not_run_are_no_verdict(judge: ProgramJudge) -> None:
    truth = {"test_list": ["assert f() == 1"], "test_setup_code": "raise SystemExit"}
    with pytest.raises(ValueError, match="do not run"):
        verdict(judge, "def f(): return 1", truth)


def test_sleep_is_a_fault_and_no_verdict_on_the_program(judge: ProgramJudge) -> None:
    found = verdict(judge, "import time; time.sleep(99)", STDIO, wall_seconds=1.0)
    assert isinstance(found, FailedVerdict)
    assert found.fault == "timeouts"


def judged(judge: CodeJudges, truth: Any, *texts: str) -> list[Verdict]:
    example = Example(id="row", source="x", prompt="p", ground_truth=truth)

    async def all_of_them() -> list[Verdict]:
        return list(await asyncio.gather(*(judge(example, text) for text in texts)))

    return asyncio.run(all_of_them())


def test_judges_count_and_remember_verdicts() -> None:
    config = RowsConfig(rows="unused.jsonl", reward="code")
    with open_judge(config, None) as judge:
        assert isinstance(judge, CodeJudges)
        assert "bwrap" in judge.isolation
        right, wrong = f"```python\n{ADD}```", "```python\ndef add(a, b): return 7\n```"
        assert [v.acc for v in judged(judge, CALLS, right, wrong, "add")] == [1.0, 0.0, 0.0]
        judge._workers[0].close()  # known verdicts need none
        judge._workers[1].close()
        assert [v.acc for v in judged(judge, CALLS, right, wrong)] == [1.0, 0.0]
        assert judge.counts == {"judged": 5}


@pytest.fixture(scope="module")
def judges() -> Iterator[CodeJudges]:
    with CodeJudges(CodeConfig(wall_seconds=2.0), workers=1) as judges:
        yield judges


@pytest.fixture
def asked(judges: CodeJudges, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The questions that go to workers."""
    questions, ask = [], judges._ask

    async def listed(question: list[Any]) -> Verdict:
        questions.append(question)
        return await ask(question)

    monkeypatch.setattr(judges, "_ask", listed)
    judges.counts.clear()
    return questions


def test_a_program_that_is_being_judged_is_not_judged_again(
    judges: CodeJudges, asked: list[Any]
) -> None:
    sleeper = "```python\nimport time; time.sleep(99)\n```"
    assert all(isinstance(v, FailedVerdict) for v in judged(judges, STDIO, *[sleeper] * 4))
    assert len(asked) == 1
    assert judges.counts == {"judged": 4, "timeouts": 4}
    judged(judges, STDIO, sleeper)  # a fault is not remembered
    assert len(asked) == 2


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_cancelled_caller_takes_nobody_along(
    judges: CodeJudges, asked: list[Any], cancelled: int
) -> None:
    example = Example(id="row", source="x", prompt="p", ground_truth=CALLS)
    text = f"```python\n{ADD}# {cancelled}\n```"

    async def run() -> list[Verdict | BaseException]:
        tasks = [asyncio.create_task(judges(example, text)) for _ in range(3)]
        await asyncio.sleep(0)  # all of them have begun
        tasks[cancelled].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(run())
    assert isinstance(found.pop(cancelled), asyncio.CancelledError)
    assert [v.acc for v in found if isinstance(v, Verdict)] == [1.0, 1.0]
    assert len(asked) == (2 if cancelled == 0 else 1)
    assert not judges._asked


def test_event_loops_share_a_verdict(judges: CodeJudges, asked: list[Any]) -> None:
    text = f"```python\nimport time; time.sleep(0.5)\n{ADD}```"
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: judged(judges, CALLS, text), range(3)))
    assert [v.acc for (v,) in found] == [1.0] * 3
    assert len(asked) == 1


def test_rows_that_cannot_be_generated_are_faults(judges: CodeJudges) -> None:
    for truth in ({"seed": [1], "length": 100}, {"length": 100}, {"seed": 1, "length": 10**9}):
        (found,) = judged(judges, {"family": "code", **truth}, f"```python\n{ADD}```")
        assert isinstance(found, FailedVerdict)
        assert found.fault == "errors"


def test_an_unusable_sandbox_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxRefused, match=r"bwrap.*wasm"):
        CodeJudges(CodeConfig(), workers=1)


def test_unsafe_says_so() -> None:
    with CodeJudges(CodeConfig(sandbox="unsafe"), workers=1) as judge:
        assert "UNSAFE" in judge.isolation
        assert [v.acc for v in judged(judge, CALLS, f"```python\n{ADD}```")] == [1.0]


@pytest.mark.parametrize("name", ["bwrap", "unsafe"])
def test_a_program_that_closes_its_output_and_goes_on_is_stopped(name: Any) -> None:
    program = "import os, time\nfor fd in (0, 1, 2): os.close(fd)\ntime.sleep(99)"
    limits = Limits(wall_seconds=1.0)
    assert open_sandbox(name, test=False).start(program, "script", limits).finish().ending == "wall"


def test_generated_rows_and_their_wrong_programs() -> None:
    from sparrow.tasks.programming.tasks import ProgrammingTasks

    config = RowsConfig(task="code", length=ProgrammingTasks.lengths[0], first=0, workers=2)
    rows = open_rows(config, seed=0)
    with open_judge(config, rows) as judge:
        for number in range(4):
            example = rows.at(number)
            row = ProgrammingTasks().row(number, config.length)
            programs = [ProgrammingTasks().solution(row), *ProgrammingTasks().wrong_solutions(row)]
            texts = [f"```python\n{program}\n```" for program in programs]

            async def verdicts(texts: list[str], example: Example) -> list[Verdict]:
                return list(await asyncio.gather(*(judge(example, text) for text in texts)))

            found = asyncio.run(verdicts(texts, example))
            assert [v.acc for v in found] == [1.0] + [0.0] * (len(texts) - 1)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def add(a, b):\n    while True: pass", "CPU time"),
        ("def add(: pass", "SyntaxError"),
        ("def add(a, b): return 1 / 0", "ZeroDivisionError"),
        ("import os\ndef add(a, b): os._exit(3)", "exit code 3"),
        ("import os\ndef add(a, b): os.write(3, b'x\\n' * 9)", ""),
        ("def other(): pass", "NameError"),
        ("def add(a, b): return 'x' * 10**6", "output"),
        ("def add(a, b): return object()", "TypeError"),
        ("def add(a, b): return 7", "expected 3, got 7"),
    ],
)
def test_reasons_say_what_was_wrong(judge: ProgramJudge, program: str, reason: str) -> None:
    found = verdict(judge, program, CALLS)
    assert reason in found.reason
    assert ("CPU" in found.reason) == (reason == "CPU time")


def test_reports_say_that_there_was_no_sandbox(tmp_path: Path) -> None:
    folder = run_folders.training(tmp_path / "run")
    settings = folder / "config.resolved.toml"
    text = settings.read_text().split("\n", 1)[1] + '\n[data.code]\nsandbox = "unsafe"\n'
    settings.write_text(add_digest_line(text))
    assert UNSAFE in make_page([folder]).lead
