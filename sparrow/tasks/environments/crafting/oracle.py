"""Gold plays of the crafting world: what a flat agent does, and what agents that delegate do.

Each goes through its tree depth first, in an order that a seed decides. An agent looks up an item
of whose parts it has not read the recipes; one that read the whole book looks up nothing.
"""

from random import Random
from typing import Any

from sparrow.tasks.environments.crafting.languages import CraftingLanguage
from sparrow.tasks.environments.crafting.world import (
    BookPage,
    CraftingAction,
    CraftingWorld,
    Kind,
    Workshop,
)


class Oracle:
    """One gold play; spawn_from: depth of the items that an agent delegates; None: a flat agent.

    `agents` are its agents, in the order in which they began.
    """

    def __init__(
        self,
        world: CraftingWorld,
        language: CraftingLanguage,
        rng: Random,
        *,
        spawn_from: int | None = None,
    ) -> None:
        if spawn_from is not None and spawn_from < 1:
            raise ValueError(f"spawn_from must be at least 1, got {spawn_from}")
        self.world, self.language, self.rng, self.spawn_from = world, language, rng, spawn_from
        self.workshop = Workshop(world)
        self.agents: list[GoldAgent] = []

    def play(self, page: BookPage) -> None:
        """Make the goal, by an agent with this page."""
        self.begin(self.world.goal, page)

    def begin(self, item: str, page: BookPage) -> str:
        """Let an agent make an item; its final message."""
        self.agents.append(GoldAgent(self, item, page))
        return self.agents[-1].live()


class GoldAgent:
    """One agent of a gold play: its item, its prompt, its actions and what it is told."""

    def __init__(self, oracle: Oracle, item: str, page: BookPage) -> None:
        self.oracle, self.item = oracle, item
        self.prompt = oracle.language.ask(item, page)
        self.known = {recipe[0] for recipe in page.recipes}  # of which it has read the recipes
        self.actions: list[CraftingAction] = []
        self.heard: list[str] = []

    @property
    def row(self) -> dict[str, Any]:
        """The conversation, for `sparrow sft`."""
        messages = [{"role": "user", "content": self.prompt}]
        for number, action in enumerate(self.actions):
            said = self.oracle.language.say(action)
            messages.append({"role": "assistant", "content": said})
            messages += [{"role": "tool", "content": text} for text in self.heard[number:][:1]]
        depth = self.oracle.world.depth(self.item)
        return {"messages": messages, "item": self.item, "depth": depth}

    def live(self) -> str:
        self._make(self.item)
        message = self.oracle.language.ready.format(self.item)
        self.actions.append(CraftingAction("end", text=message))
        return message

    def _make(self, item: str) -> None:
        world, spawn_from = self.oracle.world, self.oracle.spawn_from
        parts = world.tree[item]
        if any(part in world.tree and part not in self.known for part in parts):
            self._act("find", item)
            self.known |= {recipe[0] for recipe in world.page(item).recipes}
        for part in self.oracle.rng.sample(parts, 2):
            if part not in world.tree:
                self._act("take", part)
            elif spawn_from is not None and world.depth(part) >= spawn_from:
                self.actions.append(CraftingAction("spawn", (part,)))
                self.heard.append(self.oracle.begin(part, world.page(part)))
            else:
                self._make(part)
        self._act("make", item, *parts)

    def _act(self, kind: Kind, *items: str) -> None:
        action = CraftingAction(kind, items)
        outcome = self.oracle.workshop.act(action)
        assert outcome.accepted, f"{action}: {outcome}"
        self.actions.append(action)
        self.heard.append(self.oracle.language.answer(outcome, self.oracle.world))
