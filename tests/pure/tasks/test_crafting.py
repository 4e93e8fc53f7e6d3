"""The crafting world: one by hand, then what holds for every seed, depth and language."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.schema.train import RowsConfig
from sparrow.tasks.base import RIGHT, Example, Row, decode, encode
from sparrow.tasks.choosing import find_task, open_judge, open_rows
from sparrow.tasks.environments.crafting import Crafting, CraftingAction, CraftingEnvironment
from sparrow.tasks.environments.crafting.languages import ENGLISH, PUZZLE
from sparrow.tasks.environments.crafting.task import MOST_DISTRACTORS
from sparrow.tasks.environments.crafting.world import BookPage, CraftingWorld, Workshop
from sparrow.tasks.judging import InProcess

ROOT = Path(__file__).parents[3]
DEPTHS = range(1, 7)
KINDS = ("crafting", "crafting-text", "crafting-book", "crafting-text-book")
NAMES = [f"{kind}-{depth}" for kind in KINDS for depth in DEPTHS]
# A change of these is a change of all rows of this world.
GOLDEN = {
    "crafting-3": "4089cc39beb80523",
    "crafting-text-3": "99d5fea834ac6f3c",
    "crafting-book-6-40": "ed66c4092b7638a2",
}
DIGESTS = f"""
import hashlib, json
from sparrow.tasks.environments.crafting import Crafting

def digest(name):
    task, drawn = Crafting.named(name), hashlib.sha256()
    for seed in range(5):
        row = task.row(seed, 100)
        gold = task.gold(row, seed, spawn_from=2)
        drawn.update(json.dumps([row.prompt, row.data, task.chain(row, 5), gold]).encode())
    return drawn.hexdigest()[:16]

print(json.dumps({{name: digest(name) for name in {list(GOLDEN)}}}))
"""
every_name = pytest.mark.parametrize("name", NAMES)

# x9 is made of x7 and x3, x7 of x1 and x2; nobody can get x50.
HAND = CraftingWorld(
    goal="x9",
    tree={"x9": ("x7", "x3"), "x7": ("x1", "x2")},
    recipes=[
        ("x9", "x7", "x3"),
        ("x40", "x3", "x5"),
        ("x7", "x1", "x2"),
        ("x9", "x3", "x50"),
        ("x8", "x40", "x1"),
    ],
    raw=["x1", "x2", "x3", "x5"],
)
TASK = Crafting(depth=2)
ROW = Row(family="crafting-2", seed=0, length=1, prompt="", data=asdict(HAND))


def example_of(row: Row) -> Example:
    truth = {"family": row.family, "seed": row.seed, "length": row.length}
    return Example(id=row.id, source=row.family, prompt=row.prompt, ground_truth=truth)


def opened(name: str, seed: int = 0) -> CraftingEnvironment:
    environment = CraftingEnvironment()
    asyncio.run(environment.reset(example_of(Crafting.named(name).row(seed, 100))))
    return environment


def step(environment: CraftingEnvironment, action: str) -> Any:
    return asyncio.run(environment.step(action))


# By hand.


@pytest.mark.parametrize(
    "text",
    [
        "take x1 ; take x2 ; x7 = x1 + x2 ; take x3 ; x9 = x7 + x3 ; end yes",
        "take x3 take x2 take x1 x7 = x2 + x1 x9 = x3 + x7",  # as replies stand next to each other
        "now take x5 take x3 take x3 x40 = x5 + x3 take x1 take x2 x7 = x1 + x2 x9 = x7 + x3 ;",
        "x1 x2 </think> take x1 ; take x2 ; x7 = x1 + x2 ; take x3 ; x9 = x7 + x3",
        "take  x1 ;\ntake x2\nx7 = x1 + x2\ntake x3 ; x9 = x7 + x3\n",
    ],
)
def test_plays_by_hand_that_are_right(text: str) -> None:
    assert TASK.reward(ROW, text) == RIGHT


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not made"),
        ("end yes", "action 1 ends the play"),
        ("take x9", "action 1 cannot be done: not_raw"),
        ("take x50", "action 1 cannot be done: not_raw"),
        ("take x1 ; take x2 ; x7 = x1 + x2 ; take x3", "not made"),
        ("take x1 ; take x2 ; take x3 ; x9 = x7 + x3 ; x7 = x1 + x2", "action 4 .* missing"),
        ("take x1 ; x7 = x1 + x2", "action 2 .* missing"),
        ("take x3 ; x9 = x3 + x50", "action 2 .* missing"),
        ("take x1 ; x7 = x1 + x1", "action 2 .* no_recipe"),
        ("take x1 ; take x3 ; x9 = x1 + x3", "action 3 .* no_recipe"),
        # x1 is used up: one is not enough for both
        (
            "take x1 take x2 take x3 take x5 x40 = x3 + x5 x8 = x40 + x1 x7 = x1 + x2",
            "7 .* missing",
        ),
        ("try x7 ; take x3 ; x9 = x7 + x3", "action 1 .* alone"),
        ("take x1 yes take x2 yes x7 = x1 + x2 yes", "action 1 is not one"),
        ("x9", "action 1 is not one"),
        ("x9 = x7 + x3 = x9", "action 1 is not one"),
        ("take x1 ; take x2 ; x7 = x1 + x2 ; take x3 ; x9 = x7 + x3 ; take x1", "6 follows"),
        ("take x1 ; take x2 ; x7 = x1 + x2 ; take x3 ; end yes ; x9 = x7 + x3", "5 ends"),
        ("x9 = x7 + x3 ; end yes </think>", "not made"),
        ("Reward: 1.0", "action 1 is not one"),
    ],
)
def test_plays_by_hand_that_are_wrong(text: str, reason: str) -> None:
    verdict = TASK.reward(ROW, text)
    assert (verdict.score, verdict.acc) == (0, 0)
    assert re.search(reason, verdict.reason)


def test_pages_by_hand() -> None:
    """The recipes of an item and of its parts, those that use it, and the raw items of these."""
    assert HAND.page("x9") == BookPage([HAND.recipes[i] for i in (0, 2, 3)], ["x1", "x2", "x3"])
    assert HAND.page("x7") == BookPage([HAND.recipes[i] for i in (0, 2)], ["x1", "x2", "x3"])
    assert HAND.page("x8") == BookPage([HAND.recipes[i] for i in (1, 4)], ["x1", "x3", "x5"])
    assert HAND.page("x50") == BookPage([HAND.recipes[3]], ["x3"])
    assert HAND.page("x99") == BookPage([], [])
    assert [HAND.depth(item) for item in ("x9", "x7", "x1")] == [2, 1, 0]
    assert PUZZLE.ask("x7", HAND.page("x7")) == (
        "find x7 with x9 = x7 + x3 ; x7 = x1 + x2 ; take x1 x2 x3 <think>"
    )


def test_answers_by_hand() -> None:
    """What an agent is told, in both languages."""
    shop = Workshop(HAND)
    for action, puzzle, english in (
        (CraftingAction("take", ("x1",)), "yes", "You have x1 now.\n"),
        (CraftingAction("take", ("x7",)), "no", "You cannot get x7: it is not a raw item.\n"),
        (CraftingAction("make", ("x7", "x1", "x2")), "no x2", "You lack x2.\n"),
        (CraftingAction("make", ("x9", "x7", "x3")), "no x7 x3", "You lack x7, x3.\n"),
        (CraftingAction("make", ("x7", "x1", "x3")), "no", "No recipe makes x7 of these two.\n"),
        (CraftingAction("show"), "yes x1", "You have: x1\n"),
        (CraftingAction("find", ("x99",)), "no", "No recipe is about x99.\n"),
        (
            CraftingAction("find", ("x50",)),
            "x9 = x3 + x50 ; take x3",
            "craft x9 using x3 and x50\nRaw items: x3\n",
        ),
        (CraftingAction("spawn", ("x7",)), "no", "There is no helper to craft x7.\n"),
        (CraftingAction("end", text="yes"), "no", "x9 was not made.\n"),
        (CraftingAction("take", ("x2",)), "yes", "You have x2 now.\n"),
        (CraftingAction("make", ("x7", "x2", "x1")), "yes", "You made x7.\n"),
        (CraftingAction("show"), "yes x7", "You have: x7\n"),
        (CraftingAction("take", ("x3",)), "yes", "You have x3 now.\n"),
        (CraftingAction("make", ("x9", "x3", "x7")), "yes", "You made x9.\n"),
        (CraftingAction("end", text="yes"), "yes", "x9 was made.\n"),
    ):
        outcome = shop.act(action)
        assert (PUZZLE.answer(outcome, HAND), ENGLISH.answer(outcome, HAND)) == (puzzle, english)
        assert PUZZLE.parse(PUZZLE.say(action)) == ENGLISH.parse(ENGLISH.say(action)) == action
    assert Workshop(HAND).act(CraftingAction("show")).name == "empty"
    assert shop.act(None).name == "unreadable"


def test_english_as_people_write_it() -> None:
    assert ENGLISH.parse("Get  Oak Bark.") == CraftingAction("take", ("oak bark",))
    made = CraftingAction("make", ("oak rope", "a b", "c d"))
    assert ENGLISH.parse("hm </think>\n\ncraft oak rope using a b and c d\n") == made
    assert ENGLISH.parse("done: I made it.\nReally") == CraftingAction(
        "end", text="I made it.\nReally"
    )
    assert ENGLISH.parse("DONE") == CraftingAction("end")
    for text in ("get a\nget b", "get", "take oak bark", "", "craft a using b", "I get oak bark"):
        assert ENGLISH.parse(text) is None
    plays = ENGLISH.parse_play("get a\n\n  inventory\nhm")
    assert plays == [CraftingAction("take", ("a",)), CraftingAction("show"), None]


# Every seed and depth.


@every_name
def test_gold_texts_are_right_and_in_the_language(name: str) -> None:
    task = Crafting.named(name)
    for seed in range(8):
        row = task.row(seed, 100)
        chains = [task.chain(row, chain) for chain in range(3)]
        for text in chains:
            assert task.reward(row, text) == RIGHT
            lost = text.rsplit("\n" if task.text else " ; ", 2)[0]  # without goal and end
            assert task.reward(row, lost).score == 0
            if not task.text:
                assert decode(encode(f"{row.prompt} {text}")) == f"{row.prompt} {text}"
        assert chains[0] == task.chain(row, 0)
        assert task.depth == 1 or len(set(chains)) > 1
        data = json.loads(json.dumps(row.data))
        assert task.reward(replace(row, data=data), chains[0]) == RIGHT


@every_name
def test_worlds_are_trees_of_the_asked_depth_with_distractors(name: str) -> None:
    task = Crafting.named(name)
    for seed in range(8):
        world = CraftingWorld.of(task.row(seed, 100).data)
        used = Counter(part for parts in world.tree.values() for part in parts)
        assert world.depth(world.goal) == task.depth
        assert set(used.values()) == {1}, "every item is needed once"
        assert {*used} - {*world.tree} <= {*world.raw}
        assert {*world.tree} - {*used} == {world.goal}
        assert len(world.recipes) == len(world.tree) + task.distractors
        assert len({(made, *sorted(parts)) for made, *parts in world.recipes}) == len(world.recipes)
        assert not {*world.raw} & {recipe[0] for recipe in world.recipes}


@every_name
def test_no_distractor_is_needed_and_none_makes_an_item_of_the_tree(name: str) -> None:
    task, dead, shared = Crafting.named(name), 0, 0
    for seed in range(20):
        row = task.row(seed, 100)
        world = CraftingWorld.of(row.data)
        needed = [(item, *parts) for item, parts in world.tree.items()]
        others = [recipe for recipe in world.recipes if recipe not in needed]
        raw = {part for parts in world.tree.values() for part in parts} - {*world.tree}
        had = {*world.raw}
        for _ in world.recipes:  # whatever can be had at all
            had |= {made for made, *parts in world.recipes if had >= {*parts}}
        assert {*world.tree} <= had
        for made, *parts in others:
            assert made not in world.tree or not had >= {*parts}
            dead += made in world.tree
            shared += made not in world.tree and bool({*parts} & ({*world.tree} | raw))
        bare = asdict(replace(world, recipes=needed, raw=sorted(raw)))
        assert task.reward(replace(row, data=bare), task.chain(row, 0)) == RIGHT
    assert dead > 10
    assert shared > 10


def test_names_suffice_for_the_largest_worlds() -> None:
    for kind in ("crafting", "crafting-text"):
        task = Crafting.named(f"{kind}-6-{MOST_DISTRACTORS}")
        for seed in range(60):
            row = task.row(seed, 100)
            assert task.reward(row, task.chain(row, 0)) == RIGHT


def test_both_languages_have_the_same_worlds() -> None:
    for seed in range(5):
        puzzle, english = (
            CraftingWorld.of(Crafting(depth=4, text=text).row(seed, 1).data)
            for text in (False, True)
        )
        same = dict(zip(puzzle.raw, english.raw, strict=True))
        same |= {a[0]: b[0] for a, b in zip(puzzle.recipes, english.recipes, strict=True)}
        assert [same.get(item) for item in puzzle.tree] == [*english.tree]


# Agents that delegate.


class Replay:
    """Plays gold conversations in one environment, each agent as its own sees it."""

    def __init__(self, name: str, seed: int, spawn_from: int | None) -> None:
        task = Crafting.named(name)
        row = task.row(seed, 100)
        self.environment = opened(name, seed)
        self.agents = iter(task.gold(row, 1, spawn_from=spawn_from))
        self.count, self.reward = 0, 0.0
        self.root = example_of(row)

    def live(self, example: Example) -> str:
        agent = next(self.agents)
        self.count += 1
        prompt, *turns = agent["messages"]
        assert prompt == {"role": "user", "content": example.prompt}
        for said, heard in zip(turns[::2], turns[1::2], strict=False):
            assert (said["role"], heard["role"]) == ("assistant", "tool")
            assert heard["content"] == self.answer(said["content"])
        assert self.environment.reached(example)
        final = self.environment.parse(turns[-1]["content"])
        assert final.kind == "end"
        return final.text

    def answer(self, said: str) -> str:
        action = self.environment.parse(said)
        if action.kind == "spawn":
            task = self.environment.subtask(*action.items)
            assert not self.environment.reached(task)
            return self.live(task)
        seen = step(self.environment, said)
        assert seen.info["accepted"]
        self.reward += seen.reward
        assert seen.done == (self.reward == 1)
        return seen.text


@every_name
@pytest.mark.parametrize("spawn_from", [None, 1, 2, 3])
def test_gold_agents_make_the_goal_together(name: str, spawn_from: int | None) -> None:
    depth = Crafting.named(name).depth
    for seed in range(4):
        replay = Replay(name, seed, spawn_from)
        assert not replay.environment.reached(replay.root)
        replay.live(replay.root)
        assert replay.reward == 1
        assert next(replay.agents, None) is None
        assert (replay.count > 1) == (spawn_from is not None and spawn_from < depth)


def test_the_context_of_an_agent_does_not_grow_with_depth() -> None:
    """Turns of a node are at most those of two levels; those of a flat agent are of the tree."""

    def turns(row: Any) -> int:
        return sum(len(message["content"].split()) for message in row["messages"][1:])

    flat, nodes = {}, {}
    for depth in DEPTHS:
        task = Crafting(depth=depth, book=True)
        rows = [task.row(seed, 100) for seed in range(20)]
        flat[depth] = sum(turns(task.gold(row)[0]) for row in rows) / 20
        agents = [agent for row in rows for agent in task.gold(row, spawn_from=2)]
        nodes[depth] = max(map(turns, agents))
    assert flat[6] > 10 * flat[2]
    assert max(nodes.values()) == nodes[2] < 40


def test_subtasks_are_rows_of_their_own() -> None:
    environment = opened("crafting-text-3", 4)
    world = CraftingWorld.of(Crafting.named("crafting-text-3").row(4, 100).data)
    item = next(item for item in world.tree if item != world.goal)
    example = environment.subtask(item)
    task: Any = find_task(f"crafting-text-3/{item}")
    row = task.row(4, 100)
    assert (example.id, example.prompt) == (row.id, row.prompt)
    assert task.reward(row, task.chain(row, 0)) == RIGHT
    own = CraftingEnvironment()
    assert asyncio.run(own.reset(example)).text == example.prompt
    for none in (world.raw[0], "", "unicorn", "x/y"):
        assert environment.subtask(none) is None
    with pytest.raises(ValueError, match="no recipe of seed 5"):
        task.row(5, 100)


# Whatever an agent does.

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["take", "take", "make", "known", "known", "find", "show", "spawn", "text"]
        ),
        st.integers(0, 10**6),
        st.text(max_size=20),
    ),
    max_size=60,
)


def said(language: Any, world: CraftingWorld, kind: str, number: int, text: str) -> str:
    """An action that is right, wrong or none."""
    items = sorted({item for recipe in world.recipes for item in recipe})
    pick = [items[number // (len(items) ** i) % len(items)] for i in range(3)]
    if kind == "text":
        return text
    if kind == "known":
        return language.say(CraftingAction("make", world.recipes[number % len(world.recipes)]))
    if kind == "take":
        pick[0] = [*world.raw, *items[:2]][number % (len(world.raw) + 2)]
    return language.say(CraftingAction(kind, tuple(pick[: 3 if kind == "make" else 1])))


@given(st.sampled_from(KINDS), st.integers(1, 2), st.integers(0, 50), ACTIONS)
def test_random_actions_keep_the_rules(kind: str, depth: int, seed: int, actions: Any) -> None:
    """Against a second count of what there is, by the answers alone."""
    environment = opened(f"{kind}-{depth}", seed)
    task = Crafting.named(f"{kind}-{depth}")
    world, language = CraftingWorld.of(task.row(seed, 100).data), task.language
    items, rewards = Counter[str](), 0.0
    for wanted in actions:
        text = said(language, world, *wanted)
        action, seen = environment.parse(text), step(environment, text)
        ended = action is not None and action.kind == "end"
        if action is None or ended:
            assert seen.info["accepted"] == ended
        elif action.kind == "make" and seen.info["accepted"]:
            items.subtract(action.items[1:])
            items[action.items[0]] += 1
        elif action.kind == "take" and seen.info["accepted"]:
            items[action.items[0]] += 1
        assert min(items.values(), default=0) >= 0
        assert +items == environment._workshop.items
        made = action is not None and action.kind == "make" and seen.info["accepted"]
        assert seen.reward in (0, 1)
        assert not seen.reward or (made and action.items[0] == world.goal)
        rewards += seen.reward
        if not task.text:
            encode(seen.text)
        assert rewards <= 1
        assert not rewards or seen.done


def test_an_end_is_the_end() -> None:
    environment = opened("crafting-1")
    task = Crafting.named("crafting-1")
    seen = step(environment, "end no")
    assert (seen.text, seen.done, seen.reward) == ("no", True, 0)
    later = [step(environment, action) for action in task.chain(task.row(0, 100), 0).split(" ; ")]
    assert all(seen.done and not seen.reward for seen in later)


# Names, processes, choosing.


def test_rows_are_the_same_in_every_process() -> None:
    done = {
        subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "77")
    }
    assert len(done) == 1
    assert json.loads(done.pop()) == GOLDEN


def test_names_of_tasks() -> None:
    for name in (*NAMES, "crafting-1-0", "crafting-text-book-6-90/oak rope", "crafting-2/x7"):
        assert Crafting.named(name).name == name
    assert Crafting.named("crafting-2-6").name == "crafting-2"
    for name, message in (
        ("crafting", "got 'crafting'"),
        ("crafting-0", "depth, got 0"),
        ("crafting-7", "depth, got 7"),
        ("crafting-3-91", "distractors, got 91"),
        ("crafting-book-text-3", "got 'crafting-book-text-3'"),
    ):
        with pytest.raises(ValueError, match=message):
            Crafting.named(name)
    with pytest.raises(ValueError, match="spawn_from"):
        TASK.gold(TASK.row(0, 1), spawn_from=0)
    with pytest.raises(ValueError, match="a row of crafting-3"):
        TASK.reward(Crafting(depth=3).row(0, 1), "")


def test_tasks_are_judged_here() -> None:
    for name in ("crafting-2", "crafting-text-book-3"):
        rows = open_rows(RowsConfig(task=name, first=5), seed=0)
        judge = open_judge(RowsConfig(task=name, first=5), rows)
        assert isinstance(judge, InProcess)
        task = Crafting.named(name)
        text = task.chain(task.row(5, 500), 0)
        assert asyncio.run(judge(rows.at(0), text)).score == 1
        assert asyncio.run(judge(rows.at(1), text)).score == 0


def test_rows_of_other_tasks_are_refused() -> None:
    environment = CraftingEnvironment()
    for truth, message in (
        (5, "family, seed and length"),
        ({"family": "graph", "seed": 1, "length": 100}, "got 'graph'"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(
                environment.reset(Example(id="a", source="", prompt="", ground_truth=truth))
            )
