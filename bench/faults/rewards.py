"""Hostile rewards and answers: all other verdicts must be right, and no process may remain."""

import asyncio
import tempfile
import tomllib
from pathlib import Path
from textwrap import indent

from faults.outcomes import Progress, Try, written_out
from support.leftovers import gone, marking

from sparrow.tasks.base import Example
from sparrow.tasks.judging import Judges

DEADLINE = 2.0
DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ACTS = DATA["acts"]
TEXTS = [*map(written_out, DATA["texts"]), "\ud800\\boxed{42}"]


def run(count: int, seed: int, verb: str | None) -> list[Try]:
    """Try hostile rewards, with and without a pid namespace, then hostile mathematics."""
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
        file.write_text(f"{DATA['head']}\ndef act():\n{indent(ACTS[name], ' ' * 4)}\n")
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
