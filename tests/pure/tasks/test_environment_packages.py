"""Environments of public packages: reasoning-gym and textarena."""

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparrow.schema.train import RowsConfig
from sparrow.tasks.base import Example
from sparrow.tasks.choosing import find_task, open_judge, open_rows
from sparrow.tasks.environments import Limited, Observation, open_environment
from sparrow.tasks.judging import Judges

ROOT = Path(__file__).parents[3]
GUESS, TILES = "textarena/GuessTheNumber-v0", "textarena/2048-v0-ultra-easy"
HANOI = "textarena/TowerOfHanoi-v0"
SOLUTION = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")
MOVES = ("[up]", "[left]", "[down]", "[right]") * 3
PLAYS = f"""
import json
from sparrow.tasks.environments.textarena import Game
games = [Game(name, 7) for name in {[GUESS[10:], TILES[10:], HANOI[10:]]}]
print(json.dumps([[game.text, *(game.move(move).text for move in {MOVES})] for game in games[:2]]))
"""


def row_of(task: str, seed: int = 0) -> Example:
    return open_rows(RowsConfig(task=task, first=seed, length=10), seed=0).at(0)


def play(name: str, moves: Any, seed: int = 0) -> list[Observation]:
    async def run() -> list[Observation]:
        environment = Limited(open_environment(name))
        seen = [await environment.reset(row_of(name, seed))]
        seen += [await environment.step(move) for move in moves]
        await environment.close()
        return seen

    return asyncio.run(run())


# reasoning-gym.


def test_a_problem_of_the_gym_is_one_step() -> None:
    pytest.importorskip("reasoning_gym")
    name = "gym/leg_counting"
    row = find_task(name).row(3, 10)
    for answer, reward in ((row.data["answer"], 1.0), ("nothing", 0.0)):
        first, last, later = play(name, [f"</think><answer>{answer}</answer>", "x"], 3)
        assert first == Observation(row.prompt)
        assert last.done
        assert last.reward == last.info["acc"] == reward or not reward
        assert (later.done, later.reward) == (True, 0)
    wrong = asyncio.run(Limited(open_environment(name)).reset(row_of("gym/countdown")))
    assert "expected a row of gym/leg_counting" in wrong.info["reason"]


# textarena.


@pytest.fixture(autouse=True)
def _needs_textarena(request: pytest.FixtureRequest) -> None:
    if "gym" not in request.node.name:
        pytest.importorskip("textarena")


def test_a_game_is_played_to_its_reward() -> None:
    seen = play(HANOI, SOLUTION)
    assert seen[0].text == row_of(HANOI).prompt
    assert "You moved disk 1 from A to C." in seen[1].text
    assert SOLUTION[0] not in seen[1].text, "its own move is not repeated"
    assert [(one.reward, one.done) for one in seen] == [(0, False)] * 7 + [(1, True)]
    assert seen[-1].info["reason"]


def test_a_wrong_move_is_an_observation() -> None:
    seen = play(HANOI, ["hm, </think> [A C]", "what?", "[A C]"])
    assert "You moved" in seen[1].text
    assert "invalid move" in seen[2].text
    assert not seen[2].done
    assert seen[3].done  # the second in a row
    assert seen[3].reward <= 0


def test_games_are_functions_of_their_rows() -> None:
    """However they are interleaved, as their random numbers are their own."""
    prompts = [row_of(TILES, seed).prompt for seed in range(8)]
    assert len(set(prompts)) > 4
    alone = [play(TILES, MOVES, seed) for seed in (1, 2)]

    async def both() -> list[list[Observation]]:
        games = [Limited(open_environment(TILES)) for _ in alone]
        seen = [[await game.reset(row_of(TILES, seed))] for game, seed in zip(games, (1, 2))]  # noqa: B905
        for move in MOVES:
            for game, said in zip(games, seen, strict=True):
                said.append(await game.step(move))
        return seen

    random.seed(5)
    before = random.getstate()
    assert asyncio.run(both()) == alone
    assert random.getstate() == before


def test_games_are_the_same_in_every_process() -> None:
    done = {
        subprocess.run(
            [sys.executable, "-c", PLAYS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "77")
    }
    assert len(done) == 1
    guess, tiles = json.loads(done.pop())
    assert guess[0] == row_of(GUESS, 7).prompt
    assert tiles == [one.text for one in play(TILES, MOVES, 7)]


def test_a_text_is_judged_as_the_only_move() -> None:
    task: Any = find_task(GUESS)
    row = task.row(0, 10)
    verdicts = [task.reward(row, f"[{number}]") for number in range(1, 21)]
    assert sum(verdict.score == verdict.acc == 1 for verdict in verdicts) == 1
    assert {verdict.reason for verdict in verdicts if not verdict.acc} == {
        "the game goes on: it is to be played in an episode"
    }
    config = RowsConfig(task=GUESS, first=0, workers=1, deadline=60.0)
    rows = open_rows(config, seed=0)
    with open_judge(config, rows) as judge:
        assert isinstance(judge, Judges)
        right = next(n for n, verdict in enumerate(verdicts, 1) if verdict.acc)
        assert asyncio.run(judge(rows.at(0), f"[{right}]")).score == 1


def test_games_that_cannot_be_played() -> None:
    for name, message in (
        ("TowerOfHanoi", "it has TowerOfHanoi-v0"),
        ("?", "no game"),
        ("TicTacToe-v0", "cannot be played.* players"),
        ("MarketEntryGame-v0", "one player"),
    ):
        with pytest.raises(ValueError, match=message):
            open_environment(f"textarena/{name}")
    wrong = asyncio.run(Limited(open_environment(HANOI)).reset(row_of(GUESS)))
    assert f"expected a row of {HANOI}, got one of {GUESS}" in wrong.info["reason"]
