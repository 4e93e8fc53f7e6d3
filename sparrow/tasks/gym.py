"""Tasks of reasoning-gym (`pip install 'sparrow-rl[gym]'`), for models that write plain text.

A dataset of the gym has settings for how hard it is, whose defaults are taken, and none for how
long one thinks: a row's `length` is recorded, and changes nothing that is asked.

The gym judges answers. Some of its verifiers run the answer as Python, or call too much right:
`REFUSED` names datasets that cannot be trusted with what a model writes, `PLAIN` those that can
where the answer is of plain characters. Both were found in reasoning-gym 0.1.25.
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
    check_dial,
    check_row,
    optional_package,
    wrong,
)

HOW = (
    f"Think first and end your thoughts with {END_THINK}. Then give your answer alone, as "
    f"{ANSWER}your answer{END_ANSWER}, and write nothing after it."
)
LONGEST = 10_000  # characters of an answer that a verifier gets to see: some take quadratic time

CODE = "its verifier runs the answer as code"
UNSTEADY = "it draws other rows in every process"
REFUSED: dict[str, str] = {
    "composite": "it mixes other datasets; name one of those",
    "game_of_life_halting": "its verifier calls every answer right",
    "intermediate_integration": CODE,
    "isomorphic_strings": UNSTEADY,
    "knight_swap": UNSTEADY,
    "list_functions": UNSTEADY,
    "polynomial_multiplication": CODE,
    "puzzle24": "its verifier does not look at the numbers given",
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
    """dataset: its name in reasoning-gym"""

    lengths: ClassVar[tuple[int, int]] = (1, 1 << 20)
    dataset: str
    _judge: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = _package().factory.DATASETS
        if self.dataset not in known:
            near = ", ".join(get_close_matches(self.dataset, known) or sorted(known))
            raise ValueError(f"reasoning-gym has no dataset {self.dataset!r}; it has {near}")
        if self.dataset in REFUSED:
            why = REFUSED[self.dataset]
            raise ValueError(f"reasoning-gym's {self.dataset} is refused: {why}")
        object.__setattr__(self, "_judge", self._made(0))

    @property
    def name(self) -> str:
        return f"gym-{self.dataset}"

    def row(self, seed: int, length: int) -> Row:
        """The first row of the dataset with that seed: others may depend on what came before."""
        check_dial(self.name, seed, length, self.lengths)
        entry = self._made(seed)[0]
        data = {key: entry[key] for key in ("question", "answer", "metadata")}
        prompt = f"{entry['question']}\n\n{HOW}"
        return Row(family=self.name, seed=seed, length=length, prompt=prompt, data=data)

    def reward(self, row: Row, text: str) -> Verdict:
        """The gym's score; it is right only where that is 1.

        Some chat templates open the thoughts and some leave that to the model: both are fine.
        """
        check_row(self.name, row)
        try:
            answer = answer_text(text.lstrip().removeprefix(THINK))
        except Malformed as error:
            return wrong(str(error))
        if len(answer) > LONGEST:
            return wrong(f"the answer has more than {LONGEST} characters")
        if self.dataset in PLAIN and not PLAIN[self.dataset].fullmatch(answer):
            return wrong("the answer is not of the plain form that can be judged")
        return self._judged(answer, row)

    def _judged(self, answer: str, row: Row) -> Verdict:
        try:
            score = float(self._judge.score_answer(answer, dict(row.data)))
        except Exception as error:  # code of others on text of a model: anything may come
            return wrong(f"the verifier raised {type(error).__name__}")
        if not 0 <= score <= 1:
            return wrong(f"the verifier gave {score}, which is no score")
        return RIGHT if score == 1 else Verdict(score, 0.0, "the verifier does not call it right")

    def _made(self, seed: int) -> Any:
        """The gym's dataset of that seed."""
        return _package().create_dataset(self.dataset, seed=seed, size=1)


def _package() -> Any:
    return optional_package("reasoning_gym", "gym", "a task of reasoning-gym")
