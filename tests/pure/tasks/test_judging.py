"""Verifiers that hang, crash, raise and lie: a verdict comes, it is counted, and others go on."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.leftovers import gone, marking

from sparrow.processes.supervisor import descendants
from sparrow.tasks.base import RIGHT, Example, Verdict
from sparrow.tasks.judging import InProcess, Judges, parse_verdict

ROOT = Path(__file__).parents[3]
PATIENT = 60.0  # seconds, where a verdict is to come
VERIFIER = '''
import ctypes, os, signal, subprocess, sys

def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()

def stubborn():
    """Python itself is stuck: no other thread of it runs."""
    if "BEGUN" in os.environ:
        open(os.environ["BEGUN"], "w").close()
    ctypes.PyDLL(None).sleep(3600)

def child():
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    signal.pause()

def forge():
    "Writes a right verdict, and garbage, to every descriptor there is."
    for number in range(3, 64):
        try:
            os.write(number, b'{"id": 0, "answer": {"score": 1.0, "acc": 1.0, "reason": ""}}\\n')
        except OSError:
            pass
    return 0

def raises():
    raise RuntimeError("no idea")

BORN = os.urandom(8).hex()

def born():
    "The same for all verdicts of one process."
    return {"score": 1, "reason": BORN}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    acts = {
        "hang": hang, "stubborn": stubborn, "child": child, "forge": forge,
        "exit": lambda: os._exit(3), "leave": lambda: sys.exit(4), "raise": raises,
        "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV), "born": born,
        "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT) or 1,
        "print": lambda: print("said aloud", flush=True) or 1, "large": lambda: 2.5,
        "huge": lambda: 1e308, "greedy": lambda: len(bytearray(2_000_000_000)),
        "outside": lambda: {"score": 1, "acc": 1.5},
        "nan": lambda: float("nan"), "text": lambda: "1.0", "none": lambda: None, "nothing": dict,
        "half": lambda: {"score": 0.5, "acc": True}, "extra": lambda: extra_info["bonus"],
    }
    act = acts.get(solution_str)
    return act() if act else float(solution_str == ground_truth)
'''
GOOD, BAD = RIGHT, Verdict(0.0, 0.0, "the verifier does not call it right")


def row(truth: object = "42", **extra: object) -> Example:
    return Example(id="0", source="mine", prompt="?", ground_truth=truth, extra=extra)


def judged(judge: Judges | InProcess, *texts: str, example: Example | None = None) -> list[Verdict]:
    async def all_of_them() -> list[Verdict]:
        return list(await asyncio.gather(*(judge(example or row(), text) for text in texts)))

    return asyncio.run(all_of_them())


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("verifier") / "verifier.py"
    file.write_text(VERIFIER)
    return file


def made(verifier: Path, workers: int = 1, deadline: float = PATIENT) -> Judges:
    return Judges(f"{verifier}:compute_score", workers, deadline)


@pytest.fixture(scope="module")
def patient(verifier: Path) -> Iterator[Judges]:
    with made(verifier) as judge:
        yield judge


@pytest.fixture(scope="module")
def hasty(verifier: Path) -> Iterator[Judges]:
    with made(verifier, deadline=1) as judge:
        yield judge


def test_faults_give_0_and_the_next_text_is_judged(patient: Judges, hasty: Judges) -> None:
    for act, reason, fault in (
        ("hang", "longer", "timeouts"),
        ("stubborn", "longer", "timeouts"),
        ("exit", "exit code 3", "crashes"),
        ("leave", "exit code 4", "crashes"),
        ("crash", "SIGSEGV", "crashes"),
        ("forge", "killed", "crashes"),
        ("raise", "RuntimeError: no idea", "errors"),
        ("extra", "KeyError: 'bonus'", "errors"),
        ("nan", "got nan", "errors"),
        ("huge", "got 1e+308", "errors"),
        ("outside", "got 1.5", "errors"),
        ("text", "got '1.0'", "errors"),
        ("none", "got None", "errors"),
        ("nothing", "got None", "errors"),
    ):
        judge = hasty if fault == "timeouts" else patient
        judge.counts.clear()
        (verdict,) = judged(judge, act)
        assert verdict[:2] == (0.0, 0.0)
        assert reason in verdict.reason
        assert judge.counts == {"judged": 1, fault: 1}
        # On a slow machine a verdict within a second may be late: it is asked until it comes.
        assert any(judged(judge, "42") == [GOOD] for _ in range(10))


def test_what_a_function_may_give(patient: Judges) -> None:
    """What it prints, long texts and Ctrl-C change nothing; rows arrive as they are, or not."""
    patient.counts.clear()
    assert judged(patient, "42", "41", "print", "interrupt") == [GOOD, BAD, GOOD, GOOD]
    assert patient.counts == {"judged": 4}
    text = "x" * 3_000_000
    assert judged(patient, text, example=row(text)) == [GOOD]
    for truth in ({1: "one"}, ("a", "b"), float("nan"), [float("inf")]):
        with pytest.raises(ValueError, match="ground_truth"):
            judged(patient, "42", example=row(truth))
    with pytest.raises(ValueError, match="extra"):
        judged(patient, "42", example=row(when=print))
    result = judged(patient, "large", "half", "extra", example=row(bonus=-1))
    assert [(one.score, one.acc) for one in result] == [(2.5, 1.0), (0.5, 1.0), (-1.0, 0.0)]
    for given, verdict in (
        (1, (1.0, 1.0)),
        (True, (1.0, 1.0)),
        (0.99, (0.99, 0.0)),
        ({"score": 1.0, "acc": 0}, (1.0, 0.0)),
        ({"score": -1, "acc": None, "pred": "x"}, (-1.0, 0.0)),
        (Verdict(2.0, 0.5, ""), (2.0, 0.5)),
    ):
        assert parse_verdict(given)[:2] == verdict
    accs = [{"score": 1, "acc": acc} for acc in ("yes", 1.01, -1, float("nan"))]
    for given in (float("inf"), "1", b"1", None, [1], {}, {"acc": 1}, *accs, Verdict(1, 2, "")):
        with pytest.raises((ValueError, TypeError)):
            parse_verdict(given)


def test_a_hung_one_does_not_hold_up_the_others(verifier: Path) -> None:
    ended: list[str] = []

    async def one(judge: Judges, text: str) -> None:
        await judge(row(), text)
        ended.append(text)

    async def all_of_them(judge: Judges) -> None:
        late = asyncio.create_task(one(judge, "hang"))
        await asyncio.sleep(0)
        await asyncio.gather(*(one(judge, "42") for _ in range(20)))
        assert ended == ["42"] * 20
        late.cancel()

    with made(verifier, workers=2) as judge:
        asyncio.run(all_of_them(judge))  # the event loop goes on beside the one that hangs
        assert judged(judge, "42") == [GOOD]  # workers outlive event loops


def test_a_worker_that_dies_between_texts_is_replaced(verifier: Path) -> None:
    with made(verifier) as judge:
        for killed in (-1, 0):  # the function's own process, and the supervisor above it
            before = judged(judge, "born")
            judge.counts.clear()
            supervisor = judge._workers[0]._process
            assert supervisor is not None
            os.kill([supervisor.pid, *descendants(supervisor.pid)][killed], signal.SIGKILL)
            supervisor.wait(PATIENT)
            assert judged(judge, "42") == [GOOD]
            assert judge.counts == {"judged": 1}
            assert judged(judge, "born") != before


def test_what_a_verifier_takes_and_starts_goes_with_it(verifier: Path) -> None:
    score, memory = f"{verifier}:compute_score", 256 * 2**20
    with marking() as mark, Judges(score, 1, 2.0, memory=memory) as judge:
        judged(judge, "child")
        # On a slow machine a verdict may be late: it is asked until it comes.
        assert any("MemoryError" in judged(judge, "greedy")[0].reason for _ in range(10))
        assert any(judged(judge, "42") == [GOOD] for _ in range(10))
        judge.close()
        assert gone(mark)


def test_texts_that_nobody_waits_for_are_not_judged(hasty: Judges) -> None:
    async def cancel() -> None:
        tasks = [asyncio.create_task(hasty(row(), text)) for text in ("hang", "exit", "42")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    hasty.counts.clear()
    asyncio.run(cancel())
    assert hasty.counts["judged"] == 2
    assert hasty.counts["crashes"] == 0


def test_closing_ends_what_is_judged_and_what_waits(verifier: Path) -> None:
    judge = made(verifier)
    judged(judge, "42")

    async def close_amid() -> list[object]:
        tasks = [asyncio.create_task(judge(row(), text)) for text in ("hang", "42", "41")]
        while judge._jobs.qsize() != 2:  # until the worker has the first
            await asyncio.sleep(0)
        judge.close()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    assert [str(error) for error in asyncio.run(close_amid())] == ["these judges are closed"] * 3
    assert judge.counts == {"judged": 1}
    judge.close()
    with pytest.raises(ValueError, match="closed"):
        judged(judge, "42")


def test_what_cannot_be_loaded_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaving.py").write_text("import os; os._exit(1)")
    for score, message in (
        ("compute_score", "module:function"),
        ("verifier.py:", "module:function"),
        ("nowhere_at_all:compute_score", "nowhere_at_all"),
        ("json:compute_score", "compute_score"),
        (f"{tmp_path}/missing.py:compute_score", "missing"),
        (f"{tmp_path}/broken.py:compute_score", "ZeroDivisionError"),
        (f"{tmp_path}/leaving.py:compute_score", "exit code 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Judges(score)
    for workers, deadline, field in (
        (0, 1.0, "workers"),
        (1, 0.0, "deadline"),
        (1, float("inf"), "deadline"),
    ):
        with pytest.raises(ValueError, match=field):
            Judges("json:loads", workers, deadline)


# Programs that end.

PROGRAM = """
import asyncio, os, sys
from sparrow.tasks.base import Example
from sparrow.tasks.judging import Judges

async def ask(judge):
    example = Example(id="0", source="mine", prompt="?", ground_truth="42")
    print((await judge(example, "42")).score, flush=True)
    task = asyncio.create_task(judge(example, "stubborn"))
    while not os.path.exists(os.environ["BEGUN"]):
        await asyncio.sleep(0.01)

asyncio.run(ask(Judges(sys.argv[1], 1, 3600)))
"""


def test_a_program_ends_beside_a_text_that_is_judged(verifier: Path, tmp_path: Path) -> None:
    """How processes end with a program that is killed is shown of workers."""
    own = {"PYTHONPATH": str(ROOT), "BEGUN": str(tmp_path / "begun")}
    with marking():
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"{verifier}:compute_score"],
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1.0\n", "")


# In this process.


def test_in_process() -> None:
    def reward(example: Example, text: str) -> Verdict:
        if text == "?":
            raise SystemExit("no such row")
        return GOOD if text == example.ground_truth else BAD

    with InProcess(reward) as judge:
        assert judged(judge, "42", "41") == [GOOD, BAD]
        (broken,) = judged(judge, "?")
        assert (broken.score, broken.acc) == (0, 0)
        assert "no such row" in broken.reason
        assert judge.counts == {"judged": 3, "errors": 1}


def test_a_function_of_a_cell_with_either_signature() -> None:
    """It raises what it likes; what it returns is read as in a worker."""

    def short(text: str, answer: str) -> bool:
        return {"42": True, "41": False}[text] and answer == "42"

    def with_extra(text: str, extra_info: dict[str, Any], **others: Any) -> dict[str, float]:
        return {"score": len(text) / 4, "acc": 1.0 if extra_info == {} else 0.0}

    def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> int:
        return int(solution_str == ground_truth)

    with InProcess.of_function(short) as judge:
        right, not_right, failed = judged(judge, "42", "41", "?")
        assert (right.score, right.acc, not_right.score, failed.score) == (1, 1, 0, 0)
        assert "KeyError" in failed.reason
        assert "KeyError" in judge.last_fault
        assert judge.counts == {"judged": 3, "errors": 1}
    assert [one[:2] for one in judged(InProcess.of_function(with_extra), "42")] == [(0.5, 1.0)]
    assert [one.score for one in judged(InProcess.of_function(verl), "42", "1")] == [1, 0]
    for function in (lambda completion: 1.0, lambda text, label: 1.0):
        with pytest.raises(ValueError, match=r"reward\(text, answer\)"):
            InProcess.of_function(function)

    async def later(text: str, answer: str) -> float:
        return 1.0

    with pytest.raises(ValueError, match="async"):
        InProcess.of_function(later)


def test_a_short_function_in_a_worker(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(
        "def reward(text, answer):\n    return text.endswith(answer)\n"
        "def bad(completion):\n    return 1\n"
    )
    with Judges(f"{tmp_path}/short.py:reward", 1, PATIENT) as judge:
        assert [one.score for one in judged(judge, "so 42", "so 41")] == [1, 0]
    with pytest.raises(ValueError, match=r"data\.reward"):
        Judges(f"{tmp_path}/short.py:bad", 1, PATIENT)
