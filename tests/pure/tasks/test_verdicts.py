"""Verdicts on any text: malformed completions, adversarial answers, and fuzz."""

import pytest

from sparrow.tasks import PUZZLES
from sparrow.tasks.base import RIGHT, Malformed, Puzzle, Row, answer_text, answer_words, wrong

ROWS: dict[str, tuple[Row, str]] = {  # a row of each family, and its answer
    "assignments": (
        Row(
            family="assignments",
            seed=0,
            length=100,
            prompt="",
            data={
                "program": {"x1": ("5",), "x2": ("90",), "x3": ("x1", "-", "x2")},
                "goal": "x3",
                "modulus": 97,
            },
        ),
        "12",
    ),
    "countdown": (
        Row(
            family="countdown",
            seed=0,
            length=100,
            prompt="",
            data={"numbers": [3, 7, 7], "target": 28},
        ),
        "3 * 7 = 21 ; 21 + 7 = 28",
    ),
    "graph": (
        Row(
            family="graph",
            seed=0,
            length=100,
            prompt="",
            data={
                "edges": [("x1", "x2"), ("x3", "x2"), ("x3", "x4"), ("x1", "x3"), ("x4", "x5")],
                "start": "x1",
                "goal": "x4",
            },
        ),
        "x1 x2 x3 x4",
    ),
}

MALFORMED = {
    "": "0 x </think>, wanted exactly 1",
    "\0": "0 x </think>, wanted exactly 1",
    "{a}": "0 x </think>, wanted exactly 1",
    "<answer> {a} </answer>": "0 x </think>, wanted exactly 1",
    "<answer> {a} </answer> </think>": "</think> is not followed by <answer>",
    "</think>": "</think> is not followed by <answer>",
    "</think> {a}": "</think> is not followed by <answer>",
    "</think> so <answer> {a} </answer>": "</think> is not followed by <answer>",
    "</think> </think> <answer> {a} </answer>": "2 x </think>, wanted exactly 1",
    "</think> <answer> {a} </think> </answer>": "2 x </think>, wanted exactly 1",
    "<think> </think> <answer> {a} </answer>": "<think> belongs to the prompt",
    "</think> <answer> {a}": "wanted one <answer> and one </answer>",
    "</think> <answer> {a} </answer> </answer>": "wanted one <answer> and one </answer>",
    "</think> <answer> <answer> {a} </answer>": "wanted one <answer> and one </answer>",
    "</think> <answer> {a} </answer> <answer> {a} </answer>": "wanted one <answer> and one",
    "</think> <answer> {a} </answer> so": "the text does not end with </answer>",
    "</think> <answer> {a} </answer> \0": "the text does not end with </answer>",
    "</think> <answer> </answer> {a}": "the text does not end with </answer>",
    "</think> <answer> </answer>": "the answer is empty",
    "</think> <answer> \u3000\n </answer>": "the answer is empty",
}
IN_THOUGHTS = [
    "<answer> {a} </answer> </think> <answer> {a} </answer>",
    "<answer> </think> <answer> {a} </answer>",
    "</answer> </think> <answer> {a} </answer>",
]

every_puzzle = pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=PUZZLES)


def judged(puzzle: Puzzle, answer: str) -> str:
    """The reason of the verdict on an answer in perfect form."""
    row, _ = ROWS[puzzle.name]
    verdict = puzzle.reward(row, f"so </think> <answer> {answer} </answer>")
    assert verdict == (RIGHT if verdict.reason == "right" else wrong(verdict.reason))
    return verdict.reason


@every_puzzle
def test_the_answer_alone_is_judged(puzzle: Puzzle) -> None:
    row, answer = ROWS[puzzle.name]
    assert puzzle.reward(row, f"</think> <answer> {answer} </answer>") == RIGHT
    assert puzzle.reward(row, f"no x9 = 1 ; \0 </think> <answer> {answer} </answer>") == RIGHT
    assert puzzle.reward(row, "x " * 500_000 + f"</think> <answer> {answer} </answer>") == RIGHT


@every_puzzle
@pytest.mark.parametrize("space", ["\n", "\t", "  ", "\u2003", "\x1c"])
def test_any_whitespace_separates(puzzle: Puzzle, space: str) -> None:
    row, answer = ROWS[puzzle.name]
    text = f" so </think> <answer> {answer} </answer> ".replace(" ", space)
    assert puzzle.reward(row, text) == RIGHT


@every_puzzle
@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_completions(puzzle: Puzzle, text: str) -> None:
    row, answer = ROWS[puzzle.name]
    verdict = puzzle.reward(row, text.replace("{a}", answer))
    assert verdict == wrong(verdict.reason)
    assert MALFORMED[text] in verdict.reason


@every_puzzle
@pytest.mark.parametrize("text", IN_THOUGHTS)
def test_no_answer_in_the_thoughts(puzzle: Puzzle, text: str) -> None:
    row, answer = ROWS[puzzle.name]
    assert "none in the thoughts" in puzzle.reward(row, text.replace("{a}", answer)).reason


def test_free_text_may_mention_the_marks_of_an_answer() -> None:
    text = "I write <answer> later </think>\n<answer>a\n  b </answer>\n"
    assert answer_text(text) == "a\n  b"
    with pytest.raises(Malformed, match="none in the thoughts"):
        answer_words(text)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("12", "right"),
        ("13", "the value is wrong"),
        ("109", "the answer is not below the modulus 97"),  # 12 + 97
        ("97", "the answer is not below the modulus 97"),
        ("12 12", "the answer is not one number"),
        ("x3 = 12", "the answer is not one number"),
        ("012", "the answer is not one number"),
        ("+12", "the answer is not one number"),
        ("-85", "the answer is not one number"),
        ("\uff11\uff12", "the answer is not one number"),
        ("١٢", "the answer is not one number"),
        ("12\0", "the answer is not one number"),
        ("12.", "the answer is not one number"),
        ("9" * 5000, "the answer is not one number"),
        ("12 " * 100_000, "the answer is not one number"),
    ],
)
def test_assignments_answers(answer: str, reason: str) -> None:
    assert judged(PUZZLES["assignments"], answer) == reason


FORM = "a step is not of the form: number sign number = number"
HAND = "a step uses a number that is not at hand"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("3 * 7 = 21 ; 21 + 7 = 28", "right"),
        ("7 * 3 = 21 ; 7 + 21 = 28", "right"),
        ("3 * 7 = 21 ; 21 + 7 = 28 ; 28 + 7 = 35", HAND),
        ("3 + 7 = 10 ; 3 + 7 = 10 ; 10 + 10 = 20", HAND),  # the 3 again
        ("7 + 7 = 14 ; 7 + 14 = 21", HAND),
        ("3 + 3 = 6 ; 7 + 6 = 13", HAND),
        ("4 * 7 = 28", HAND),
        ("3 * 7 = 22 ; 22 + 7 = 29", "a step is false"),
        ("7 - 7 = 0 ; 3 / 0 = 0", "a step is false"),
        ("7 - 7 = 0 ; 0 / 3 = 0", "the target is not reached"),
        ("7 / 3 = 2 ; 2 + 7 = 9", "a step is false"),
        ("3 - 7 = 4 ; 4 * 7 = 28", "a step is false"),
        ("3 * 7 = 21", "a number was not used"),
        ("3 + 7 = 10 ; 10 + 7 = 17", "the target is not reached"),
        ("28", FORM),
        (";", FORM),
        ("; 3 * 7 = 21 ; 21 + 7 = 28", FORM),
        ("3 * 7 = 21 ; 21 + 7 = 28 ;", FORM),
        ("3 * 7 = 21 ; ; 21 + 7 = 28", FORM),
        ("3 * 7 = 21 21 + 7 = 28", FORM),
        ("3 * 7 21 = 28", FORM),
        ("3 +- 7 = 21 ; 21 + 7 = 28", FORM),
        ("3 */ 7 = 21 ; 21 + 7 = 28", FORM),
        ("3 +-*/ 7 = 21 ; 21 + 7 = 28", FORM),
        ("3 ** 7 = 21 ; 21 + 7 = 28", FORM),
        ("3 x 7 = 21 ; 21 + 7 = 28", FORM),
        ("03 * 7 = 21 ; 21 + 7 = 28", FORM),
        ("٣ * 7 = 21 ; 21 + 7 = 28", FORM),
        ("3 - 7 = -4 ; 7 * -4 = -28", FORM),
        ("3 * 7 = " + "9" * 5000, FORM),
        ("3 * 7 == 21 ; 21 + 7 = 28", FORM),
        ("3 * 7 = 21 ; " * 50_000 + "21 + 7 = 28", HAND),
    ],
)
def test_countdown_answers(answer: str, reason: str) -> None:
    assert judged(PUZZLES["countdown"], answer) == reason


def test_nothing_divided_by_nothing_is_not_what_one_likes() -> None:
    data = {"numbers": [5, 5, 7, 7], "target": 9}
    row = Row(family="countdown", seed=0, length=100, prompt="", data=data)
    text = "</think> <answer> 5 - 5 = 0 ; 7 - 7 = 0 ; 0 / 0 = 9 </answer>"
    assert PUZZLES["countdown"].reward(row, text) == wrong("a step is false")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("x1 x2 x3 x4", "right"),
        ("x1 x3 x4", "right"),
        ("x1 x4", "the path uses an edge that is not there"),
        ("x1 x1 x3 x4", "the path uses an edge that is not there"),
        ("x1 x99 x4", "the path uses an edge that is not there"),
        ("x1 - x3 - x4", "the path uses an edge that is not there"),
        ("x1 x2 x1 x3 x4", "the path visits a node twice"),
        ("x1 x3 x4 x5 x4", "the path visits a node twice"),
        ("x2 x3 x4", "the path does not begin at the start"),
        ("x4 x3 x1", "the path does not begin at the start"),
        ("X1 x3 x4", "the path does not begin at the start"),
        ("x01 x3 x4", "the path does not begin at the start"),
        ("x1", "the path does not end at the target"),
        ("x1 x3 x4 x5", "the path does not end at the target"),
        ("x1 x3 x4\0", "the path does not end at the target"),
        ("x1 " + "x2 x1 " * 100_000 + "x3 x4", "the path visits a node twice"),
    ],
)
def test_graph_answers(answer: str, reason: str) -> None:
    assert judged(PUZZLES["graph"], answer) == reason
