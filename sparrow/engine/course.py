"""Which schedule drew which tokens of a sample: what a completion says of attention."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sparrow.schema.schedule import Schedule

Shares = npt.NDArray[np.float32]


class Course:
    """The schedules that decode one sample, each from so many drawn tokens on; None: dense."""

    def __init__(self, schedule: Schedule | None) -> None:
        self._starts: list[tuple[int, Schedule | None]] = [(0, schedule)]

    @property
    def dense(self) -> bool:
        """Whether nothing but dense attention has ever run."""
        return all(schedule is None for _, schedule in self._starts)

    def change(self, drawn: int, schedule: Schedule | None) -> None:
        """Another schedule from the next token on, after this many.

        The first token comes from the prompt: until a second is drawn nothing has been decoded.
        """
        if drawn < 2:
            self._starts = [(0, schedule)]
            return
        if self._starts[-1][0] == drawn:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != schedule:
            self._starts.append((drawn, schedule))

    def describe(self, prompt: int, tokens: int) -> str:
        """All that ran for a prompt and an answer of these lengths, and the length it began at."""
        ran = [
            ("" if not start else f"; from length {prompt + start}: ")
            + ("dense" if schedule is None else schedule.describe())
            for start, schedule in self._starts
            if start < tokens or not start
        ]
        return "".join(ran)

    def join(self, of: Callable[[Schedule | None], Shares | None]) -> Shares | None:
        """Values by token, each from those of the schedule that drew it; None where one is None."""
        (_, first), *later = self._starts
        joined = of(first)
        for start, schedule in later:
            part = of(schedule)
            if joined is None or part is None:
                return None
            joined[start:] = part[start:]
        return joined
