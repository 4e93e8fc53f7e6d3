"""The two languages of the crafting world: the words of the puzzles, and plain English.

A language is data: a form of every action with its pattern, an answer to every outcome, and how
recipes are written.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random

from sparrow.tasks.base import NAMES, THINK
from sparrow.tasks.environments.base import without_thoughts
from sparrow.tasks.environments.crafting.world import (
    ActionResult,
    BookPage,
    CraftingAction,
    CraftingWorld,
    Kind,
)

QUALITIES = [
    "amber",
    "birch",
    "cedar",
    "coral",
    "desert",
    "forest",
    "harbor",
    "island",
    "ivory",
    "marble",
    "meadow",
    "mountain",
    "oak",
    "pearl",
    "river",
    "winter",
]
RAW = [
    "bark",
    "bone",
    "clay",
    "feather",
    "fiber",
    "flint",
    "hide",
    "moss",
    "ore",
    "reed",
    "resin",
    "shell",
]
MADE = [
    "axle",
    "bell",
    "canopy",
    "chest",
    "frame",
    "hinge",
    "ladder",
    "lamp",
    "loom",
    "rope",
    "sail",
    "wheel",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CraftingLanguage:
    """Names of items, and the words for actions and outcomes.

    between: what separates the actions of a text, which has a whole play. items: what separates
    items. raw: the last line of a page. ready: the final message of an agent that made its item.
    notices: in place of those of `Limited`.
    """

    raw_names: Sequence[str]
    made_names: Sequence[str] | None  # None: items have one kind of names
    prompt: str
    forms: Mapping[Kind, str]
    patterns: Mapping[Kind, str]
    between: tuple[str, str]  # to write, and the pattern to read
    lines: str  # what separates recipes
    raw: str
    items: str
    ready: str
    answers: Mapping[str, str]
    notices: Mapping[str, str] = field(default_factory=dict)

    def draw_names(self, rng: Random) -> tuple[list[str], list[str]]:
        """The names of raw and of other items, in random order."""
        raw = rng.sample(self.raw_names, len(self.raw_names))
        if self.made_names is None:
            return raw, raw
        return raw, rng.sample(self.made_names, len(self.made_names))

    def ask(self, item: str, page: BookPage) -> str:
        """Write the prompt of an agent that is to make an item."""
        return self.prompt.format(item=item, page=self.page(page))

    def page(self, page: BookPage) -> str:
        lines = [self.say(CraftingAction("make", recipe)) for recipe in page.recipes]
        if page.raw:
            lines.append(self.raw.format(self.items.join(page.raw)))
        return self.lines.join(lines)

    def say(self, action: CraftingAction) -> str:
        return self.forms[action.kind].format(*action.items, text=action.text)

    def play(self, actions: Sequence[CraftingAction]) -> str:
        """Write a whole play."""
        return self.between[0].join(map(self.say, actions))

    def parse(self, said: str) -> CraftingAction | None:
        """Read one action, which follows the thoughts, if there are any; None: it is none."""
        text = re.sub(r"[ \t]+", " ", without_thoughts(said)).rstrip(".")
        for kind, pattern in self.patterns.items():
            if found := re.fullmatch(pattern, text, re.IGNORECASE):
                words = [word or "" for word in found.groups()]
                if kind == "end":
                    return CraftingAction(kind, text=words[0])
                return CraftingAction(kind, tuple(word.lower() for word in words))
        return None

    def parse_play(self, text: str) -> list[CraftingAction | None]:
        """Read a whole play; None for what is no action."""
        parts = re.split(self.between[1], without_thoughts(text))
        return [self.parse(part) for part in parts if part.strip()]

    def answer(self, outcome: ActionResult, world: CraftingWorld) -> str:
        """Write what an agent reads about an outcome."""
        page = ""
        if outcome.name == "found":
            page = self.page(world.page(outcome.items[0]))
        return self.answers[outcome.name].format(items=self.items.join(outcome.items), page=page)


PUZZLE = CraftingLanguage(
    raw_names=[f"x{number}" for number in range(NAMES)],
    made_names=None,
    prompt=f"find {{item}} with {{page}} {THINK}",
    forms={
        "take": "take {}",
        "make": "{} = {} + {}",
        "find": "find {}",
        "show": "now",
        "spawn": "try {}",
        "end": "end {text}",
    },
    patterns={
        "take": r"take (x\d+)",
        "make": r"(x\d+) = (x\d+) \+ (x\d+)",
        "find": r"find (x\d+)",
        "show": r"now",
        "spawn": r"try (x\d+)",
        "end": r"end (yes|no)",
    },
    between=(" ; ", r"\s+(?:;\s+)?(?=(?:take|find|now|try|end)\b|x\d+ =)|\s+;$"),
    lines=" ; ",
    raw="take {}",
    items=" ",
    ready="yes",
    answers={
        **dict.fromkeys(("taken", "made", "reached"), "yes"),
        **dict.fromkeys(("not_raw", "no_recipe", "unknown", "alone", "unreadable"), "no"),
        **dict.fromkeys(("empty", "unreached"), "no"),
        "missing": "no {items}",
        "found": "{page}",
        "held": "yes {items}",
    },
    notices={**dict.fromkeys(("timeout", "failed", "steps"), "end no"), "shortened": "; no"},
)

ENGLISH = CraftingLanguage(
    raw_names=[" ".join(pair) for pair in product(QUALITIES, RAW)],
    made_names=[" ".join(pair) for pair in product(QUALITIES, MADE)],
    prompt="""\
Make this item: {item}

Recipes, each of which uses up its two parts:
{page}

Write one action at a time, each on a line of its own:
get ITEM (a raw item)
craft ITEM using ITEM and ITEM
look up ITEM (the recipes about it)
inventory
delegate: craft ITEM (a helper makes it with all that you have)
done: MESSAGE (at the end)
""",
    forms={
        "take": "get {}",
        "make": "craft {} using {} and {}",
        "find": "look up {}",
        "show": "inventory",
        "spawn": "delegate: craft {}",
        "end": "done: {text}",
    },
    patterns={
        "take": r"get (.+)",
        "make": r"craft (.+) using (.+) and (.+)",
        "find": r"look up (.+)",
        "show": r"inventory",
        "spawn": r"delegate: ?craft (.+)",
        "end": r"(?s)done(?:: ?(.*))?",
    },
    between=("\n", r"\n"),
    lines="\n",
    raw="Raw items: {}",
    items=", ",
    ready="{} is ready",
    answers={
        "taken": "You have {items} now.\n",
        "made": "You made {items}.\n",
        "found": "{page}\n",
        "held": "You have: {items}\n",
        "empty": "You have nothing.\n",
        "reached": "{items} was made.\n",
        "unreached": "{items} was not made.\n",
        "not_raw": "You cannot get {items}: it is not a raw item.\n",
        "no_recipe": "No recipe makes {items} of these two.\n",
        "missing": "You lack {items}.\n",
        "unknown": "No recipe is about {items}.\n",
        "alone": "There is no helper to craft {items}.\n",
        "unreadable": "Expected one action: get, craft, look up, inventory, delegate or done.\n",
    },
)
