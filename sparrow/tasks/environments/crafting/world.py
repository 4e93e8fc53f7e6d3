"""The world: which item is made of which two others, and what an agent has.

The recipes that a goal needs are a tree. One part of each item is one level less deep; the other
is of any smaller depth, more often a large one. Leaves are raw items, which can be taken as often
as one likes. A recipe uses up its parts, and every item of the tree is needed once, so agents that
share what they have take nothing from each other.

Distractors are further recipes. Most make another item, of items of the tree, of other distractors
or of further raw items. The others claim to make an item of the tree from one of its parts and
something that nobody can get.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple, Self

from sparrow.tasks.base import Data

DEAD_ENDS = 0.3  # share of distractors that cannot be carried out
NEW_RAW = 0.5  # probability that a distractor needs a raw item that nothing else needs
Recipe = tuple[str, str, str]  # an item and its parts
Kind = Literal["take", "make", "find", "show", "spawn", "end"]


class CraftingAction(NamedTuple):
    """What an agent does. items: an item, for "make" with its parts. text: of its end."""

    kind: Kind
    items: tuple[str, ...] = ()
    text: str = ""


class ActionResult(NamedTuple):
    """What came of an action: a name of `ACCEPTED` or `REFUSED`, with the items it is about."""

    name: str
    items: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        return self.name in ACCEPTED


ACCEPTED = ("taken", "made", "found", "held", "empty", "reached", "unreached")
REFUSED = ("not_raw", "no_recipe", "missing", "unknown", "alone", "unreadable")


class BookPage(NamedTuple):
    """Recipes and raw items, as an agent reads them."""

    recipes: Sequence[Recipe]
    raw: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CraftingWorld:
    """A goal, the recipes of its tree by item, all recipes and raw items as a prompt lists them."""

    goal: str
    tree: Mapping[str, tuple[str, str]]
    recipes: Sequence[Recipe]
    raw: Sequence[str]

    @classmethod
    def of(cls, data: Data) -> Self:
        """Read a world from the data of a row."""
        tree = {item: (parts[0], parts[1]) for item, parts in data["tree"].items()}
        recipes = [(recipe[0], recipe[1], recipe[2]) for recipe in data["recipes"]]
        return cls(goal=data["goal"], tree=tree, recipes=recipes, raw=list(data["raw"]))

    @property
    def book(self) -> BookPage:
        """All that there is."""
        return BookPage(self.recipes, self.raw)

    def page(self, item: str) -> BookPage:
        """What an agent needs to make an item, or to have parts of it made: its recipes, those of
        its parts, those that use it, and which of their items are raw."""
        made_of = {part for made, *parts in self.recipes if made == item for part in parts}
        shown = [recipe for recipe in self.recipes if recipe[0] in made_of or item in recipe]
        items = {item, *(item for recipe in shown for item in recipe)}
        return BookPage(shown, [raw for raw in self.raw if raw in items] if shown else [])

    def depth(self, item: str) -> int:
        """How deep the tree below an item is; 0: raw."""
        return 1 + max(map(self.depth, self.tree[item])) if item in self.tree else 0

    def recipe_of(self, product: str, parts: Iterable[str]) -> Recipe | None:
        """The recipe of these parts, in any order."""
        asked = sorted(parts)
        return next(
            (known for known in self.recipes if known[0] == product and sorted(known[1:]) == asked),
            None,
        )


class Workshop:
    """What agents have of a world, and whether its goal was ever made."""

    def __init__(self, world: CraftingWorld) -> None:
        self.world, self.items, self.reached = world, Counter[str](), False

    def act(self, action: CraftingAction | None) -> ActionResult:
        """Carry out an action, if it can be; None: one that nobody understands."""
        match action:
            case CraftingAction("take", (item,)):
                return self._take(item)
            case CraftingAction("make", (product, *parts)):
                return self._make(product, parts)
            case CraftingAction("find", (item,)):
                return ActionResult(
                    "found" if self.world.page(item).recipes else "unknown", (item,)
                )
            case CraftingAction("show"):
                held = tuple(sorted(self.items.elements()))
                return ActionResult("held" if held else "empty", held)
            case CraftingAction("spawn", items):
                return ActionResult("alone", items)
            case CraftingAction("end"):
                return ActionResult("reached" if self.reached else "unreached", (self.world.goal,))
        return ActionResult("unreadable")

    def _take(self, item: str) -> ActionResult:
        if item not in self.world.raw:
            return ActionResult("not_raw", (item,))
        self.items[item] += 1
        return ActionResult("taken", (item,))

    def _make(self, product: str, parts: Sequence[str]) -> ActionResult:
        if self.world.recipe_of(product, parts) is None:
            return ActionResult("no_recipe", (product,))
        if missing := tuple(part for part in parts if not self.items[part]):
            return ActionResult("missing", missing)
        self.items -= Counter(parts)  # drops what is used up
        self.items[product] += 1
        self.reached = self.reached or product == self.world.goal
        return ActionResult("made", (product,))


class WorldDraw:
    """A world while it is drawn; raw, made: names for its items, from which it takes."""

    def __init__(self, rng: Random, raw: list[str], made: list[str]) -> None:
        self.rng, self.raw, self.made = rng, raw, made
        self.tree: dict[str, tuple[str, str]] = {}
        self.taken: list[str] = []  # raw items
        self.recipes: list[Recipe] = []

    def world(self, depth: int, distractors: int) -> CraftingWorld:
        goal = self.made.pop()
        self._grow(goal, depth)
        for _ in range(distractors):
            dead_end = self.rng.random() < DEAD_ENDS
            self.recipes.append(self._dead_end() if dead_end else self._by_way())
        self.rng.shuffle(self.recipes)
        self.rng.shuffle(self.taken)
        return CraftingWorld(goal=goal, tree=self.tree, recipes=self.recipes, raw=self.taken)

    def _grow(self, item: str, depth: int) -> None:
        """Draw the recipe of an item, and the tree below it."""
        depths = [depth - 1, max(self.rng.randrange(depth), self.rng.randrange(depth))]
        self.rng.shuffle(depths)
        left, right = (self.made.pop() if below else self._new_raw() for below in depths)
        self.tree[item] = (left, right)
        self.recipes.append((item, left, right))
        for part, below in zip((left, right), depths, strict=True):
            if below:
                self._grow(part, below)

    def _new_raw(self) -> str:
        self.taken.append(self.raw.pop())
        return self.taken[-1]

    def _dead_end(self) -> Recipe:
        """Claim that an item of the tree is made of one of its parts and what nobody can get."""
        product = self.rng.choice(list(self.tree))
        parts = [self.rng.choice(self.tree[product]), self.made.pop()]
        self.rng.shuffle(parts)
        return (product, parts[0], parts[1])

    def _by_way(self) -> Recipe:
        """Draw another item, of parts that can be had."""
        known = [*self.taken, *dict.fromkeys(recipe[0] for recipe in self.recipes)]
        left, right = self.rng.sample(known, 2)
        if self.rng.random() < NEW_RAW:
            right = self._new_raw()
        return (self.made.pop(), left, right)
