"""Problems of reasoning-gym as environments of one step: the question, then an answer's score."""

from sparrow.tasks.base import Example, Row
from sparrow.tasks.environments.base import Observation, RowKey, Synchronous
from sparrow.tasks.gym import Gym

GYM = "gym/"


class GymEnvironment(Synchronous):
    """A dataset of reasoning-gym; its rows are those of the task gym/NAME.

    An action is a whole answer in the form that the question asks for, thoughts included.
    """

    def __init__(self, dataset: str) -> None:
        self.task = Gym(dataset=dataset)
        self._row: Row | None = None

    def begin(self, example: Example) -> Observation:
        key = RowKey.of(example)
        if key.family != f"{GYM}{self.task.dataset}":
            raise ValueError(f"expected a row of {GYM}{self.task.dataset}, got one of {key.family}")
        self._row = self.task.row(key.seed, key.length)
        return Observation(self._row.prompt)

    def act(self, action: str) -> Observation:
        if self._row is None:
            raise ValueError("expected reset before step")
        verdict = self.task.reward(self._row, action)
        return Observation(verdict.reason, verdict.score, True, {"acc": verdict.acc})
