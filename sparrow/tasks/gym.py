"""Tasks of reasoning-gym (`pip install 'sparrow-rl[gym]'`), for models that write plain text.

A dataset of the gym has settings for difficulty, whose defaults are used, and none for the length
of thoughts: a row's `length` is recorded and does not change the question.

The gym judges answers. Some of its verifiers run the answer as Python, or accept wrong answers:
`REFUSED` lists datasets that are unsafe with what a model writes, `PLAIN` those that are safe if
the answer has plain characters only. Both lists are for reasoning-gym 0.1.25.
"""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, ClassVar

from sparrow.tasks.base import (
    ANSWER,
    END_ANSWER,
    END_THINK,
    RIGHT,
    THINK,
    Malformed,
    Row,
    Verdict,
    answer_text,
    check_row,
    check_seed,
    optional_package,
    wrong,
)

HOW = (
    f"Think first and end your thoughts with {END_THINK}. Then give your answer alone, as "
    f"{ANSWER}your answer{END_ANSWER}, and write nothing after it."
)
LONGEST = 10_000  # characters of an answer that a verifier gets: some take quadratic time

CODE = "its verifier runs the answer as code"
UNSTEADY = "it generates other rows in every process"
REFUSED: dict[str, str] = {
    "composite": "it mixes other datasets; use one of those",
    "game_of_life_halting": "its verifier calls every answer right",
    "intermediate_integration": CODE,
    "isomorphic_strings": UNSTEADY,
    "knight_swap": UNSTEADY,
    "list_functions": UNSTEADY,
    "polynomial_multiplication": CODE,
    "puzzle24": "its verifier ignores the numbers of the question",
    "ransom_note": UNSTEADY,
    "simple_integration": CODE,
    "word_ladder": UNSTEADY,
}
PLAIN: dict[str, re.Pattern[str]] = {
    # These evaluate the answer: no names, no calls, no powers.
    "binary_matrix": re.compile(r"[0-9,\[\]\s]+"),
    "countdown": re.compile(r"(?!.*(\*\*|//))[0-9+*/() -]{1,200}"),
    "n_queens": re.compile(r"""[Q_,\[\]"'\s]+"""),
    "spiral_matrix": re.compile(r"[0-9,\[\]\s-]+"),
    "string_insertion": re.compile(r"""[A-E,\[\]"'\s]+"""),
    # An exponent of nine digits takes forever; nan is as near to a number as the number itself.
    "coin_flip": re.compile(r"[0-9.,/ ]{1,100}(e-?[0-9]{1,2})?"),
    "complex_arithmetic": re.compile(r"[0-9.+()ij -]{1,100}"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gym:
    """A dataset of reasoning-gym, by its name there."""

    lengths: ClassVar[tuple[int, int]] = (1, 1 << 20)
    dataset: str
    _judge: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        datasets = _package().factory.DATASETS
        if self.dataset not in datasets:
            near = ", ".join(get_close_matches(self.dataset, datasets) or sorted(datasets))
            raise ValueError(f"reasoning-gym has no dataset {self.dataset!r}; it has {near}")
        if self.dataset in REFUSED:
            reason = REFUSED[self.dataset]
            raise ValueError(f"reasoning-gym's {self.dataset} is refused: {reason}")
        object.__setattr__(self, "_judge", self._create(0))

    @property
    def name(self) -> str:
        return f"gym-{self.dataset}"

    def row(self, seed: int, length: int) -> Row:
        """Generate the first row of the dataset with this seed: others may depend on it."""
        check_seed(self.name, seed, length, self.lengths)
        entry = self._create(seed)[0]
        data = {key: entry[key] for key in ("question", "answer", "metadata")}
        prompt = f"{entry['question']}\n\n{HOW}"
        return Row(family=self.name, seed=seed, length=length, prompt=prompt, data=data)

    def reward(self, row: Row, text: str) -> Verdict:
        """Judge by the gym's score; an answer is right only if that is 1.

        The thoughts may be opened by the chat template or by the model.
        """
        check_row(self.name, row)
        try:
            answer = answer_text(text.lstrip().removeprefix(THINK))
        except Malformed as error:
            return wrong(str(error))
        if len(answer) > LONGEST:
            return wrong(f"the answer has more than {LONGEST} characters")
        if self.dataset in PLAIN and not PLAIN[self.dataset].fullmatch(answer):
            return wrong("the answer has characters that the verifier cannot be given")
        return self._judged(answer, row)

    def _judged(self, answer: str, row: Row) -> Verdict:
        try:
            score = float(self._judge.score_answer(answer, dict(row.data)))
        except Exception as error:  # third-party code on text of a model: anything may be raised
            return wrong(f"the verifier raised {type(error).__name__}")
        if not 0 <= score <= 1:
            return wrong(f"the verifier returned {score}, expected 0 to 1")
        return RIGHT if score == 1 else Verdict(score, 0.0, "the verifier does not call it right")

    def _create(self, seed: int) -> Any:
        """Create the gym's dataset of a seed."""
        return _package().create_dataset(self.dataset, seed=seed, size=1)


def _package() -> Any:
    return optional_package("reasoning_gym", "gym", "a task of reasoning-gym")
