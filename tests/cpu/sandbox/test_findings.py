"""What a reviewer found: honest programs that were judged wrong, and ways to win or to hold on."""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from sparrow.dataflow.evaluation import open_run_rows
from sparrow.sandbox import bubblewrap
from sparrow.sandbox.backends import open_sandbox
from sparrow.sandbox.base import Limits, Mode, Running, Sandbox, SandboxRefused
from sparrow.sandbox.selftest import self_test
from sparrow.schema.code import CodeConfig
from sparrow.schema.evaluation import EvalConfig
from sparrow.schema.train import RowsConfig, TrainConfig
from sparrow.tasks.choosing import open_rows
from sparrow.tasks.code.problems import parse_problem
from sparrow.tasks.code.running import ProgramJudge
from sparrow.tasks.rows import FileRows

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")


@pytest.fixture(scope="module")
def judge() -> ProgramJudge:
    config = CodeConfig(cpu_seconds=2, wall_seconds=20.0, memory_mib=256, output_kib=64)
    return ProgramJudge(sandbox=open_sandbox("bwrap", test=False), config=config)


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)"])
def test_programs_may_leave_by_exit(judge: ProgramJudge, end: str) -> None:
    problem = parse_problem({"inputs": ["2\n"], "outputs": ["4\n"]})
    assert judge(f"print(2 * int(input()))\n{end}\n", problem).acc == 1


def test_large_arguments_and_expected_outputs_count_for_no_limit(judge: ProgramJudge) -> None:
    numbers = list(range(60_000))
    total = parse_problem({"fn_name": "f", "inputs": [[numbers]], "outputs": [sum(numbers)]})
    assert judge("def f(x): return sum(x)", total).acc == 1
    same = parse_problem({"fn_name": "f", "inputs": [[60_000]], "outputs": [numbers]})
    assert judge("def f(n): return list(range(n))", same).acc == 1
    text = "".join(f"{n}\n" for n in numbers)
    lines = parse_problem({"inputs": ["60000\n"], "outputs": [text]})
    assert judge("for n in range(int(input())): print(n)", lines).acc == 1
    assert "output" in judge("while True: print('x' * 999)", total).reason


@pytest.mark.parametrize(
    "program",
    [
        "class Solution:\n    def f(self, x: List[int]) -> Optional[int]: return x[0]",
        "from enum import Enum\nclass A(str, Enum):\n    B = 'b'\n\ndef f(x): return x[0]",
    ],
)
def test_names_of_typing_are_there_for_solutions_of_leetcode(
    judge: ProgramJudge, program: str
) -> None:
    problem = parse_problem({"fn_name": "f", "inputs": [[[7]]], "outputs": [7]})
    assert judge(program, problem).acc == 1


def test_an_exception_of_the_solution_ends_no_loop_of_the_tests(judge: ProgramJudge) -> None:
    tests = ["for a, b in zip(map(f, [1, 2]), [1, 2]): assert a == b"]
    problem = parse_problem({"test_list": tests})
    assert judge("def f(x): raise StopIteration", problem).acc == 0
    assert judge("def f(x): return x", problem).acc == 1


def test_numbers_that_hash_alike_cost_the_judge_nothing(judge: ProgramJudge) -> None:
    program = f"def f(x): return {{i * {sys.hash_info.modulus} for i in range(9000)}}"
    problem = parse_problem({"fn_name": "f", "inputs": [[1]], "outputs": [1]})
    assert judge(program, problem).acc == 0


def test_a_program_that_sleeps_is_wrong_and_ends_early(judge: ProgramJudge) -> None:
    limits = Limits(wall_seconds=60.0, asleep_seconds=1.0)
    for source in ("import time\ntime.sleep(50)", "import os\nos.close(1); os.close(2)\ninput()\n"):
        source += "\nimport time\ntime.sleep(50)"
        outcome = judge.sandbox.start(source, "script", limits).finish(b"x\n")
        assert (outcome.ending, outcome.problem) == ("asleep", "it sleeps")
    busy = "import time\nend = time.process_time() + 2\nwhile time.process_time() < end: pass\n"
    assert judge.sandbox.start(busy, "script", limits).finish().ending == "exited"


def test_a_program_that_writes_now_and_then_is_out_of_wall_time(judge: ProgramJudge) -> None:
    source = "import time\nwhile True:\n    print(1, flush=True)\n    time.sleep(0.05)"
    limits = Limits(wall_seconds=1.5, asleep_seconds=1.0)
    assert judge.sandbox.start(source, "script", limits).finish().ending == "wall"


def test_waiting_for_the_next_call_is_no_sleep(judge: ProgramJudge) -> None:
    limits = Limits(wall_seconds=60.0, asleep_seconds=0.5)
    running = judge.sandbox.start("def f(): return 1", "calls", limits)
    assert running.read_line() == b'{"ready": true}'
    time.sleep(1.5)
    running.send(b'{"call": "f", "args": []}\n')
    assert running.read_line() == b'{"value": 1, "args": []}'
    running.end()


def test_installed_packages_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packages lie below the standard library, problem sets with solutions may be there."""
    found = bubblewrap.find_interpreter(bubblewrap.sandbox_user())
    library = next(path for path in found.paths if Path(path, "os.py").exists())
    copy = tmp_path / "lib" / Path(library).name
    shutil.copytree(library, copy, ignore=shutil.ignore_patterns("test", "__pycache__", "config-*"))
    for place in (copy / "site-packages", tmp_path / "lib" / "dist-packages"):
        place.mkdir(exist_ok=True)
        (place / "answers.py").write_text("ANSWER = 42")
    (tmp_path / "bin").mkdir()
    shutil.copy(found.executable, tmp_path / "bin" / Path(found.executable).name)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    own = bubblewrap.Interpreter(
        str(tmp_path / "bin" / Path(found.executable).name), bubblewrap.sandbox_user()
    )
    if not own.packages:
        pytest.skip("this Python does not move")
    monkeypatch.setattr(bubblewrap, "find_interpreter", lambda user: own)
    sandbox = bubblewrap.Bubblewrap()
    source = f"import os\nprint(os.listdir({own.packages[0]!r}))"
    assert sandbox.start(source, "script", Limits()).finish().stdout == b"[]\n"
    self_test(sandbox)
    own.packages.clear()
    with pytest.raises(SandboxRefused, match="installed packages"):
        self_test(sandbox)


class Crashing(Sandbox):
    """A sandbox in which attacks crash: that none succeeded says nothing."""

    name = "crashing"

    def __init__(self, inner: Sandbox) -> None:
        self._inner, self.isolation = inner, "none"

    def start(self, source: str, mode: Mode, limits: Limits) -> Running:
        crash = "import os\nos._exit(1)\n" if "attempt" in source else ""
        return self._inner.start(crash + source, mode, limits)


def test_attacks_that_do_not_run_are_no_proof(judge: ProgramJudge) -> None:
    with pytest.raises(SandboxRefused, match="did not run to its end"):
        self_test(Crashing(judge.sandbox))


def test_limits_in_somebody_elses_run_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy: dict[str, Any] = {"memory_mib": 2**20, "scratch_mib": 2**14, "cpu_seconds": 3600}
    greedy["reward"] = "share"
    data = {"task": "code", "length": 50, "code": greedy}
    run = TrainConfig.model_validate({"model": {"name": "x"}, "data": data})
    taken = list[CodeConfig]()
    monkeypatch.setattr(
        "sparrow.dataflow.evaluation.open_validation",
        lambda run, judges, **changes: taken.append(run.data.code),
    )
    told = list[str]()
    open_run_rows(run, EvalConfig(model="x"), None, told.append)
    (code,) = taken
    usual = CodeConfig()
    assert (code.memory_mib, code.scratch_mib) == (usual.memory_mib, usual.scratch_mib)
    assert (code.cpu_seconds, code.reward) == (usual.cpu_seconds, "share")
    assert len(told) == 2


def test_rows_with_wrong_tests_are_left_out_before_anything_runs(tmp_path: Path) -> None:
    truths: list[Any] = [
        {"inputs": ["1\n"], "outputs": ["1\n"]},
        {"inputs": ["1\n"], "outputs": ["1\n", "2\n"]},
        {"inputs": ["1\n"], "outputs": [{"any": []}]},
        [{"input": "1", "output": "1", "type": "foo"}],
        [{"input": "1", "output": "1", "type": t, "func_name": "f"} for t in ("stdin", "func")],
        {"test_list": ["assert True"]},
        "not json",
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"problem {n}", "reward_model": {"ground_truth": truth}}) + "\n"
            for n, truth in enumerate(truths)
        )
    )
    rows = open_rows(RowsConfig(rows=str(file), reward="code"), seed=0)
    assert isinstance(rows, FileRows)
    assert (len(rows.examples), len(rows.problems)) == (1, len(truths) - 1)
    file.write_text(file.read_text().partition("\n")[2])
    with pytest.raises(ValueError, match="no usable row"):
        open_rows(RowsConfig(rows=str(file), reward="code"), seed=0)
