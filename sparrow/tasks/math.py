"""Rewards for mathematics by math-verify (`pip install 'sparrow-rl[math]'`): 1 or 0.

The answer is what follows the thoughts: the last \\boxed{...}, else the last expression. Timeouts
of math-verify use signals and are off, so this runs in a process that can be killed
(`sparrow.tasks.judging.Judges`): some powers never end.
"""

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparrow.tasks.base import END_THINK, optional_package

PACKAGE = "math_verify"
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are no braces
LONGEST = 1_000  # characters of an answer that are read
LAST = "####"  # stands before the answer in GSM8K


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Return 1 if the answer of a text equals the ground truth, else 0.

    Raises ValueError if the ground truth cannot be parsed, which is no fault of the text.
    """
    golds = _golds(ground_truth)
    answer = final_answer(solution_str)
    if answer is None:
        return 0.0
    return float(load().verify(list(golds), _parsed(answer), timeout_seconds=None))


def final_answer(text: str) -> str | None:
    """Return the last \\boxed{...} after the thoughts, or else the end of the text.

    None if it is empty or too long, or if the last box is not closed.
    """
    final = text.rpartition(END_THINK)[2].strip()
    boxes = list(BOX.finditer(final))
    if not boxes:
        return final[-LONGEST:] or None
    inside = boxed_text(final, boxes[-1].end())
    return _boxed(inside) if inside and len(inside) <= LONGEST else None


def boxed_text(text: str, start: int) -> str | None:
    """Return the text in braces, from after the opening brace; None if they are not closed."""
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[start : brace.start()].strip()
    return None


def _boxed(inside: str) -> str:
    return rf"\boxed{{{inside}}}"


def _golds(truth: Any) -> tuple[Any, ...]:
    """Parse a ground truth; a list holds alternatives that are all right."""
    several = isinstance(truth, Sequence) and not isinstance(truth, str)
    golds = [gold for text in (truth if several else [truth]) for gold in _gold(str(text))]
    if not golds:
        raise ValueError(f"the ground truth {truth!r:.80} cannot be parsed as mathematics")
    return tuple(golds)


@functools.lru_cache(maxsize=256)  # the answers to a prompt share it
def _gold(truth: str) -> tuple[Any, ...]:
    text = truth.rpartition(LAST)[2].strip()
    if not BOX.search(text):
        text = _boxed(text.strip("$"))
    return tuple(_parsed(final_answer(text) or ""))


def _parsed(text: str) -> list[Any]:
    return load().parse(text, parsing_timeout=None)


@functools.cache
def load() -> Any:
    """Import math-verify, without its warning that there is no timeout: the judge has one."""
    package = optional_package(PACKAGE, "math", "a reward for mathematics")
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    return package
