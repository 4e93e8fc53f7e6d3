"""Rewards for mathematics by math-verify (`pip install 'sparrow-rl[math]'`): 1 or 0.

What counts is what comes after the thoughts: the last \\boxed{...}, else the last expression.
math-verify's own deadlines are signals, which its caller may not want: they are off. So this runs
where it can be killed (`sparrow.tasks.judging.Judges`): some powers take for ever.
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
    """1 where the answer of a text equals the ground truth, else 0, whatever the text says.

    A ground truth that cannot be read is a ValueError: that is no fault of the text.
    """
    golds = _golds(ground_truth)
    answer = answer_of(solution_str)
    if answer is None:
        return 0.0
    return float(load().verify(list(golds), _parsed(answer), timeout_seconds=None))


def answer_of(text: str) -> str | None:
    """The last \\boxed{...} after the thoughts; where there is none, the end of the text.

    None where that is empty or too long, or where the last box is not closed: unfinished.
    """
    final = text.rpartition(END_THINK)[2].strip()
    boxes = list(BOX.finditer(final))
    if not boxes:
        return final[-LONGEST:] or None
    inside = boxed_text(final, boxes[-1].end())
    return _boxed(inside) if inside and len(inside) <= LONGEST else None


def boxed_text(text: str, start: int) -> str | None:
    """What stands in braces, from behind the opening one; None where they are not closed."""
    depth = 1
    for found in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return text[start : found.start()].strip()
    return None


def _boxed(inside: str) -> str:
    return rf"\boxed{{{inside}}}"


def _golds(truth: Any) -> tuple[Any, ...]:
    """Everything that a ground truth may be read as; a list names answers that are all right."""
    several = isinstance(truth, Sequence) and not isinstance(truth, str)
    found = [each for one in (truth if several else [truth]) for each in _gold(str(one))]
    if not found:
        raise ValueError(f"the ground truth {truth!r:.80} cannot be read as mathematics")
    return tuple(found)


@functools.lru_cache(maxsize=256)  # the answers to a prompt share it
def _gold(truth: str) -> tuple[Any, ...]:
    text = truth.rpartition(LAST)[2].strip()
    if not BOX.search(text):
        text = _boxed(text.strip("$"))
    return tuple(_parsed(answer_of(text) or ""))


def _parsed(text: str) -> list[Any]:
    return load().parse(text, parsing_timeout=None)


@functools.cache
def load() -> Any:
    """math-verify, without its warning that a deadline is wanted: there is one."""
    package = optional_package(PACKAGE, "math", "a reward for mathematics")
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    return package
