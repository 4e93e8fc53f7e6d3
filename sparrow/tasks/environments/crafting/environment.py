"""The crafting world as an environment, which sub-agents share with their parent."""

from collections.abc import Mapping, Sequence
from typing import Any

from sparrow.tasks.base import Example, Row
from sparrow.tasks.environments.base import Observation, RowKey
from sparrow.tasks.environments.crafting.task import Crafting
from sparrow.tasks.environments.crafting.world import CraftingAction, CraftingWorld, Workshop

ITEM = "item"  # in the extra of a sub-agent's example


class CraftingEnvironment:
    """What all agents of a play make together; its reward is 1 at the step that makes the goal.

    An agent that may spawn others does so at a "spawn" action, with `subtask`, and keeps the ends
    of sub-agents to itself: here "spawn" is refused, and "end" is the end of the play.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    _task: Crafting
    _row: Row
    _workshop: Workshop
    _done: bool

    def __init__(self) -> None:
        self.notices: Mapping[str, str] = {}

    async def reset(self, example: Example) -> Observation:
        key = RowKey.of(example)
        self._task = Crafting.named(key.family)
        self.notices = self._task.language.notices
        self._row = self._task.row(key.seed, key.length)
        self._workshop, self._done = Workshop(CraftingWorld.of(self._row.data)), False
        return Observation(self._row.prompt)

    async def step(self, action: str) -> Observation:
        done, parsed = self._done, self.parse(action)
        outcome = self._workshop.act(parsed)
        ended = parsed is not None and parsed.kind == "end"
        self._done = done or ended or self._workshop.reached
        return Observation(
            self._task.language.answer(outcome, self._workshop.world),
            reward=float(self._workshop.reached and not done),
            done=self._done,
            info={"outcome": outcome.name, "accepted": outcome.accepted},
        )

    async def close(self) -> None:
        """Release nothing."""

    def parse(self, action: str) -> CraftingAction | None:
        """Read an action in the language of the row; None: it is none."""
        return self._task.language.parse(action)

    def subtask(self, item: str) -> Example | None:
        """The task of a sub-agent: to make one item in this world; None: no recipe makes it."""
        row = self._task.part(self._row, item)
        if row is None:
            return None
        return Example(
            id=row.id,
            source=row.family,
            prompt=row.prompt,
            ground_truth={"family": row.family, "seed": row.seed, "length": row.length},
            extra={ITEM: item},
        )

    def reached(self, example: Example) -> bool:
        """Whether what a task asks for is there: a sub-agent's item, or that the goal was made."""
        item = example.extra.get(ITEM)
        return self._workshop.reached if item is None else self._workshop.items[item] > 0
