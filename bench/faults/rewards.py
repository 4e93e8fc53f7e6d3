"""Hostile rewards and mathematics: whatever they do, every other verdict is right, none is left."""

import asyncio
import tempfile
import tomllib
from pathlib import Path
from textwrap import indent

from faults.outcomes import Progress, Try
from support.leftovers import gone, marking

from sparrow.tasks.base import Example
from sparrow.tasks.judging import Judges

DEADLINE = 2.0
HEAD = """
import ctypes, gc, json, os, pickle, resource, signal, socket, subprocess, sys, threading, time

def fds():
    return [fd for fd in range(3, 256) if os.path.lexists(f"/proc/self/fd/{fd}")]

def write(data):
    for fd in fds():
        try:
            os.write(fd, data)
        except OSError:
            pass

def number():
    "The number of the question that is being answered, found in the frames above."
    frame = sys._getframe()
    while frame is not None:
        question = frame.f_locals.get("question")
        if isinstance(question, dict) and "id" in question:
            return question["id"]
        frame = frame.f_back
    return "unknown"

def forged(score=1.0, number="0" * 32):
    answer = {"score": score, "acc": score, "reason": "forged"}
    return json.dumps({"id": number, "answer": answer}).encode() + b"\\n"

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hostile":
        return act()
    return float(solution_str == ground_truth)

"""
ACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TEXTS = [
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{" + "9**" * 300 + "9}",
    r"\boxed{" + "(" * 450 + ")" * 450 + "}",
    r"\boxed{" + r"\frac{1}{" * 100 + "1" + "}" * 100 + "}",
    r"\boxed{" + r"\sqrt{" * 150 + "2" + "}" * 150 + "}",
    r"\boxed{__import__('os').system('true')}",
    r"\boxed{\text{__import__('os')._exit(1)}}",
    "__import__('os')._exit(1)",
    r"\boxed{" + "x" * 1000 + "}",
    r"\boxed{\int_0^1 x^{x^{x}} dx}",
    r"\boxed{\sum_{n=1}^{10^{100}} n!}",
    r"\boxed{10^{10^{10}}!}",
    r"\boxed{\lim_{x \to 0} \frac{1}{x}}",
    r"\boxed{\begin{pmatrix}" + "1 & " * 200 + r"1\end{pmatrix}}",
    "\x00\x1b[2J\\boxed{42}\x00",
    "\ud800\\boxed{42}",
    r"\boxed{" * 2000,
    "}" * 5000,
    "",
    "4" * 1_000_000,
    r"\boxed{\{" + ",".join(map(str, range(300))) + r"\}}",
    r"\boxed{1/0}",
    r"\boxed{x = y = z = 0}",
    r"\boxed{\mathrm{e}^{i\pi}}",
    r"\boxed{nan}",
    r"\boxed{\infty}",
    r"\boxed{\binom{10^9}{5 \cdot 10^8}}",
    r"\boxed{\prod_{k=1}^{10^9} k}",
    r"\boxed{\left(" + "((((x+1)^9)^9)^9)^9" + r"\right)}",
    r"\boxed{0." + "3" * 20_000 + "}",
    r"\boxed{\sin(\sin(\sin(\sin(10^{30}))))}",
    r"\boxed{\def\x{\x\x}\x}",
    r"\boxed{\input{/etc/passwd}}",
    r"\boxed{" + r"\sqrt[9]{9^{9}}+" * 300 + "1}",
    r"\boxed{\unicode{x34}\phantom{2}}",
]


def run(count: int, seed: int, verb: str | None) -> list[Try]:
    """So many hostile rewards and texts: acts in a pid namespace and without, then mathematics."""
    progress = Progress("rewards", count)
    acts = [(name, namespace) for name in ACTS for namespace in (True, False)]
    texts = max(1, round(count * 0.35))
    chosen = [acts[i * len(acts) // (count - texts)] for i in range(min(count - texts, len(acts)))]
    for name, namespace in chosen:
        progress.add(
            f"hostile, {'namespace' if namespace else 'subreaper'}", *_act(name, namespace)
        )
    for number in range(count - len(chosen)):
        progress.add("mathematics", *_text(TEXTS[number % len(TEXTS)], number))
    return progress.tries


def _ask(judge: Judges, *texts: str, truth: str = "42") -> list[float]:
    async def ask() -> list[float]:
        row = Example(id="0", source="mine", prompt="?", ground_truth=truth)
        return [(await judge(row, text)).score for text in texts]

    return asyncio.run(ask())


def _act(name: str, namespace: bool) -> tuple[str, str]:
    """Honest verdicts around a hostile one must be right, or faults; at the end nothing is left.

    What a hostile act itself is given does not matter: the function may give any verdict.
    """
    with tempfile.TemporaryDirectory() as folder, marking() as mark:
        file = Path(folder) / "reward.py"
        file.write_text(f"{HEAD}\ndef act():\n{indent(ACTS[name], ' ' * 4)}\n")
        limits = {"memory": 1 << 30, "namespace": namespace}
        with Judges(f"{file}:compute_score", 1, DEADLINE, **limits) as judge:
            for _ in range(2):
                first, _, *honest = _ask(judge, "42", "hostile", *["42", "41"] * 6)
                wrong = [one for one in honest[1::2] if one != 0]
                faults = sum(judge.counts[kind] for kind in ("timeouts", "crashes", "errors"))
                lost = sum(one != 1 for one in (first, *honest[::2]))
                if wrong or lost > faults:
                    return "wrong verdict", f"{name}: {honest}, {dict(judge.counts)}"
        return ("right", name) if gone(mark) else ("orphan", name)


def _text(text: str, number: int) -> tuple[str, str]:
    """A hostile answer is never right, and the next one is judged."""
    with marking() as mark:
        with Judges("sparrow.tasks.math:compute_score", 1, DEADLINE, ["math_verify"]) as judge:
            hostile, honest, wrong = _ask(judge, text, r"\boxed{42}", r"\boxed{41}")
            right = "\\boxed{42}" in text  # within control characters
            lost = judge.counts["timeouts"] + judge.counts["crashes"]
            if hostile not in ((0.0, 1.0) if right else (0.0,)) or wrong or honest + lost < 1:
                return "wrong verdict", f"text {number}: {hostile}, {honest}, {dict(judge.counts)}"
        return ("right", "") if gone(mark) else ("orphan", f"text {number}")
