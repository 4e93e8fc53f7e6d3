"""Rows of the crafting world, by seed, and the verdict on the text of a flat agent.

The name of a task says all that a world is drawn from but its seed:

    crafting-3               depth 3, in the language of the puzzles
    crafting-text-3          the same worlds in plain English
    crafting-book-3          the prompt has the goal's page only; others are to be looked up
    crafting-3-20            with 20 distractors
    crafting-3/x7            the task of a sub-agent: one item of the same world, with its page
"""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

from sparrow.tasks.base import (
    RIGHT,
    Row,
    Verdict,
    check_row,
    check_seed,
    keyed_random,
    wrong,
)
from sparrow.tasks.environments.crafting.languages import ENGLISH, PUZZLE, CraftingLanguage
from sparrow.tasks.environments.crafting.oracle import Oracle
from sparrow.tasks.environments.crafting.world import BookPage, CraftingWorld, Workshop, WorldDraw

CRAFTING = "crafting"
DEPTHS = (1, 6)
DISTRACTORS, MOST_DISTRACTORS = 6, 90  # names are for so many
NAME = re.compile(rf"{CRAFTING}(-text)?(-book)?-(\d)(?:-(\d{{1,3}}))?(?:/(.+))?")
FORMS = f"{CRAFTING}[-text][-book]-DEPTH[-DISTRACTORS]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crafting:
    """Make an item of raw ones. depth: of the tree of recipes. A row's `length` is recorded only.

    text: in plain English. book: recipes are to be looked up. item: of a sub-agent; "": the goal.
    """

    lengths: ClassVar[tuple[int, int]] = (1, 1 << 20)
    depth: int
    distractors: int = DISTRACTORS
    text: bool = False
    book: bool = False
    item: str = ""

    def __post_init__(self) -> None:
        for what, value, low, high in (
            ("depth", self.depth, *DEPTHS),
            ("distractors", self.distractors, 0, MOST_DISTRACTORS),
        ):
            if not low <= value <= high:
                raise ValueError(f"{CRAFTING}: expected {low} to {high} as {what}, got {value}")

    @classmethod
    def named(cls, name: str) -> Self:
        """The task of a name; ValueError if it is none."""
        found = NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"expected {FORMS} as a task of this world, got {name!r}")
        text, book, depth, distractors, item = found.groups()
        return cls(
            depth=int(depth),
            distractors=DISTRACTORS if distractors is None else int(distractors),
            text=bool(text),
            book=bool(book),
            item=item or "",
        )

    @property
    def name(self) -> str:
        kind = f"{'-text' * self.text}{'-book' * self.book}-{self.depth}"
        distractors = f"-{self.distractors}" * (self.distractors != DISTRACTORS)
        return f"{CRAFTING}{kind}{distractors}{'/' * bool(self.item)}{self.item}"

    @property
    def language(self) -> CraftingLanguage:
        return ENGLISH if self.text else PUZZLE

    def row(self, seed: int, length: int) -> Row:
        check_seed(self.name, seed, length, self.lengths)
        world = self._world(seed)
        prompt = self.language.ask(world.goal, self._page(world))
        return Row(family=self.name, seed=seed, length=length, prompt=prompt, data=asdict(world))

    def reward(self, row: Row, text: str) -> Verdict:
        """Judge a whole play, by carrying it out: every action of it must be possible.

        Nobody answers its actions, so an agent that learns from refusals is not judged by this but
        by the environment.
        """
        check_row(self.name, row)
        workshop = Workshop(CraftingWorld.of(row.data))
        for number, action in enumerate(self.language.parse_play(text), 1):
            if action is None:
                return wrong(f"action {number} is not one of this world")
            if workshop.reached and action.kind != "end":
                return wrong(f"action {number} follows the goal and is not an end")
            outcome = workshop.act(action)
            if not outcome.accepted:
                return wrong(f"action {number} cannot be done: {outcome.name}")
            if action.kind == "end" and not workshop.reached:
                return wrong(f"action {number} ends the play without the goal")
        return RIGHT if workshop.reached else wrong("the goal is not made")

    def chain(self, row: Row, seed: int) -> str:
        """Write a right text, another for each seed."""
        oracle = self._oracle(row, seed, None)
        return self.language.play(oracle.agents[0].actions)

    def gold(self, row: Row, seed: int = 0, *, spawn_from: int | None = None) -> list[Any]:
        """The conversations of a gold play, for `sparrow sft`: of the root, then of sub-agents.

        spawn_from: depth of the items that are delegated; None: none, by a flat agent.
        """
        return [agent.row for agent in self._oracle(row, seed, spawn_from).agents]

    def part(self, row: Row, item: str) -> Row | None:
        """The row of a sub-agent in the same world; None: no recipe makes this item."""
        if not any(recipe[0] == item for recipe in row.data["recipes"]):
            return None
        return replace(self, item=item).row(row.seed, row.length)

    def _oracle(self, row: Row, seed: int, spawn_from: int | None) -> Oracle:
        check_row(self.name, row)
        world = CraftingWorld.of(row.data)
        rng = keyed_random(self.name, row.seed, "gold", seed)
        oracle = Oracle(world, self.language, rng, spawn_from=spawn_from)
        oracle.play(self._page(world))
        return oracle

    def _page(self, world: CraftingWorld) -> BookPage:
        whole = not self.book and not self.item
        return world.book if whole else world.page(world.goal)

    def _world(self, seed: int) -> CraftingWorld:
        key = (CRAFTING, self.depth, self.distractors, seed)
        names = self.language.draw_names(keyed_random(*key, "names", self.text))
        world = WorldDraw(keyed_random(*key), *names).world(self.depth, self.distractors)
        if self.item and not any(recipe[0] == self.item for recipe in world.recipes):
            raise ValueError(f"{self.name}: no recipe of seed {seed} makes {self.item!r}")
        return replace(world, goal=self.item or world.goal)


def is_crafting(name: str) -> bool:
    """Whether a name is that of a task of this world."""
    return NAME.fullmatch(name) is not None
