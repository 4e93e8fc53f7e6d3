"""Mathematics: right answers in many forms are right, and no text breaks the verifier."""

import asyncio
from importlib.util import find_spec
from typing import Any

import pytest

from sparrow.tasks.base import Example, Verdict
from sparrow.tasks.judging import Judges
from sparrow.tasks.math import LONGEST, compute_score, final_answer

NEEDS = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify")


def test_where_the_answer_stands() -> None:
    for text, answer in (
        (r"so \boxed{42}.", r"\boxed{42}"),
        (r"\boxed{1} or \boxed{2}", r"\boxed{2}"),
        (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{ \{1, 2\} }", r"\boxed{\{1, 2\}}"),
        (r"\boxed{\left\{ x \right.}", r"\boxed{\left\{ x \right.}"),
        (r"\fbox {7}", r"\boxed{7}"),
        (r"\boxed{3}</think> It is 4.", "It is 4."),
        ("</think>a</think> b ", "b"),
        ("7" * (LONGEST + 1), "7" * LONGEST),
        (r"\boxed{" + "7" * (LONGEST + 1) + "}", None),
        (r"\boxed{3}, no, \boxed{4", None),
        (r"\boxed{", None),
        (r"\boxed{ }", None),
        (r"\boxed{5} </think>", None),
        ("", None),
    ):
        assert final_answer(text) == answer


@NEEDS
def test_right() -> None:
    for text, truth in (
        (r"\boxed{42}", "42"),
        (r"\boxed{42}", 42),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{1,000}", "1000"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{p-q}", "p - q"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{\{1,2\}}", r"\{2,1\}"),
        (r"\boxed{2\sqrt{2}}", r"$\sqrt{8}$"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{10\%}", "0.1"),
        (r"\boxed{18}", r"\boxed{18}"),
        (r"\boxed{72}", ["71", "72"]),
        (r"<think>\boxed{3}</think> It is 4.", "4"),
        ("Half of 48 is 24.\n#### 72", "48/2 = 24, 48 + 24 = 72 #### 72"),
    ):
        assert compute_score("math", text, truth, {}) == 1.0, text


@NEEDS
def test_wrong_and_never_broken() -> None:
    for text in (
        "",
        "no number here",
        r"\boxed{1} \boxed{2}",
        r"\boxed{1",
        r"\boxed{}",
        r"<think>\boxed{1}</think> It is 4.",
        r"\boxed{1/0}",
        r"\boxed{\frac{1}{}}",
        r"\boxed{" + "(" * 200 + "}",
        r"\boxed{" + "9" * 900 + "}",
        r"\boxed{" * 20_000,
        r"\boxed{9999999999^{99}}",
        "{" * 100_000,
        "7 " * 100_000,
        "\ud800\x00",
    ):
        assert compute_score("math", text, "1", {}) == 0.0, text[:40]


@NEEDS
def test_a_ground_truth_that_is_none() -> None:
    truths: tuple[Any, ...] = ("", "$", [], "####")
    for truth in truths:
        with pytest.raises(ValueError, match="ground truth"):
            compute_score("math", r"\boxed{1}", truth, {})


@NEEDS
def test_a_power_that_takes_for_ever_is_killed() -> None:
    """math-verify's own deadlines are off; that of the worker is not."""
    example = Example(id="0", source="math", prompt="?", ground_truth="1")

    async def both(judge: Judges) -> tuple[Verdict, Verdict]:
        late = await judge(example, r"\boxed{7^{7^{7^{7^{7}}}} - 1}")
        return late, await judge(example, r"\boxed{1}")

    with Judges("sparrow.tasks.math:compute_score", 1, 2.0, ["math_verify"]) as judge:
        late, right = asyncio.run(both(judge))
    assert late.score == 0
    assert right.score == 1
