"""What holds for every family of puzzles: gold chains, draws by seed, the dial, refusals."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.tasks import PUZZLES, Assignments, Countdown, GraphPath
from sparrow.tasks.base import RIGHT, Puzzle, Row
from sparrow.tasks.words import decode, encode

ROOT = Path(__file__).parents[3]
LENGTHS = (100, 200, 999, 2000, 8000)
# A change of these is a change of the text that shipped models were trained on.
GOLDEN = {
    "assignments": "7bb3015b3b95fb0d",
    "countdown": "90afc2437a6b68e4",
    "graph": "9759e9e313e276c7",
    "assignments, no revisits": "60b97760bf95b55e",
    "graph, no revisits": "d245051f4f36f8d6",
}
FAMILIES: dict[str, Puzzle] = {
    **PUZZLES,
    "assignments, no revisits": Assignments(revisit=False),
    "graph, no revisits": GraphPath(revisit=False),
}
DIGESTS = """
import hashlib, json
from sparrow.tasks import PUZZLES, Assignments, GraphPath

def digest(puzzle):
    drawn = hashlib.sha256()
    for seed, length in ((0, 100), (1, 500), (2, 2000), (3, 8000)):
        row = puzzle.row(seed, length)
        drawn.update(json.dumps([row.prompt, row.data, puzzle.chain(row, 5)]).encode())
    return drawn.hexdigest()[:16]

digests = {name: digest(puzzle) for name, puzzle in PUZZLES.items()}
for once in (Assignments(revisit=False), GraphPath(revisit=False)):
    digests[f"{once.name}, no revisits"] = digest(once)
print(json.dumps(digests))
"""

every_puzzle = pytest.mark.parametrize("puzzle", FAMILIES.values(), ids=FAMILIES)


def drawn_in_a_fresh_process(hash_seed: str) -> dict[str, str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DIGESTS]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_drawn_text_is_pinned_in_every_process(hash_seed: str) -> None:
    assert drawn_in_a_fresh_process(hash_seed) == GOLDEN


@every_puzzle
@pytest.mark.parametrize("length", LENGTHS)
def test_gold_chains_are_right(puzzle: Puzzle, length: int) -> None:
    for seed in range(3):
        row = puzzle.row(seed, length)
        for chain in range(2):
            assert puzzle.reward(row, puzzle.chain(row, chain)) == RIGHT


@every_puzzle
def test_every_word_is_in_the_vocabulary(puzzle: Puzzle) -> None:
    for length in LENGTHS:
        row = puzzle.row(11, length)
        text = f"{row.prompt} {puzzle.chain(row, 0)}"
        assert decode(encode(text)) == text


@every_puzzle
def test_same_seed_same_draw_other_seed_other_draw(puzzle: Puzzle) -> None:
    rows = [puzzle.row(seed, 500) for seed in range(20)]
    assert rows == [puzzle.row(seed, 500) for seed in range(20)]
    assert len({row.prompt for row in rows}) == 20
    assert len({row.id for row in rows}) == 20
    chains = [puzzle.chain(rows[0], seed) for seed in range(20)]
    assert chains == [puzzle.chain(rows[0], seed) for seed in range(20)]
    assert len(set(chains)) == 20


@pytest.mark.parametrize(
    ("name", "length"),
    [
        (name, length)
        for name in FAMILIES
        for length in (200, 500, 1000, 2000, 4000, 8000)
        if (name, length) != ("graph, no revisits", 200)  # 0.78 of it: such graphs are too small
    ],
)
def test_chains_are_as_long_as_the_dial_says(name: str, length: int) -> None:
    """Chains of one length spread by a quarter of it: 60 of them tell their mean to 4 %."""
    puzzle = FAMILIES[name]
    chains = [puzzle.chain(puzzle.row(seed, length), 0) for seed in range(60)]
    mean = statistics.mean(len(chain.split()) for chain in chains)
    assert 0.75 * length <= mean <= 1.25 * length


@every_puzzle
@pytest.mark.parametrize("length", [500, 2000])
def test_nearly_all_chains_are_within_the_spread(puzzle: Puzzle, length: int) -> None:
    """What comes after the search (a way back, an answer) is not counted in."""
    chains = [puzzle.chain(puzzle.row(seed, length), 1) for seed in range(60)]
    tokens = [len(chain.split(" path ")[0].split(" </think> ")[0].split()) for chain in chains]
    within = [length / 1.5 <= count <= length * 1.5 + 20 for count in tokens]
    assert sum(within) >= 0.9 * len(within)


@every_puzzle
def test_a_verdict_needs_plain_data_alone(puzzle: Puzzle) -> None:
    row = puzzle.row(3, 300)
    data = json.loads(json.dumps(row.data))
    again = Row(family=row.family, seed=3, length=300, prompt=row.prompt, data=data)
    assert puzzle.reward(again, puzzle.chain(row, 1)) == RIGHT
    assert puzzle.chain(again, 1) == puzzle.chain(row, 1)


@every_puzzle
def test_rows_of_another_family_are_refused(puzzle: Puzzle) -> None:
    row = Row(family="riddles", seed=0, length=100, prompt="", data={})
    with pytest.raises(ValueError, match=f"{puzzle.name}: got a row of riddles"):
        puzzle.reward(row, "")
    with pytest.raises(ValueError, match=f"{puzzle.name}: got a row of riddles"):
        puzzle.chain(row, 0)


@every_puzzle
@pytest.mark.parametrize(
    ("seed", "length", "message"),
    [
        (-1, 500, "seed must be at least 0, got -1"),
        (0, 99, "length must be 100 to 8000, got 99"),
        (0, 8001, "length must be 100 to 8000, got 8001"),
        (0, 500.0, "length must be a whole number, got 500.0"),
        (True, 500, "seed must be a whole number, got True"),
        ("7", 500, "seed must be a whole number, got '7'"),
    ],
)
def test_bad_dials_are_refused(puzzle: Puzzle, seed: int, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{puzzle.name}: {message}$"):
        puzzle.row(seed, length)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (Assignments, {"modulus": 128}, "modulus must be 2 to 127, got 128"),
        (Assignments, {"wander": 1.5}, "wander is a share below 1, got 1.5"),
        (Assignments, {"wander": 1.0}, "wander is a share below 1, got 1.0"),
        (Assignments, {"spare": -0.1}, "spare is a share, got -0.1"),
        (Assignments, {"constants": float("nan")}, "constants is a share, got nan"),
        (Assignments, {"spread": 0.5}, "spread is a factor above 1"),
        (Countdown, {"spread": float("inf")}, "spread is a factor above 1"),
        (Countdown, {"largest": 1000}, "largest must be 10 to"),
        (Countdown, {"spread": 1.0}, "spread is a factor above 1"),
        (GraphPath, {"spread": float("nan")}, "spread is a factor above 1"),
        (GraphPath, {"degrees": (5.0, 3.0)}, "degrees must be 2 or more, rising"),
    ],
)
def test_bad_settings_are_refused(family: type, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family(**settings)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Assignments(), Assignments(modulus=10)),
        (Assignments(), Assignments(spare=0.5)),
        (Countdown(), Countdown(largest=20)),
        (GraphPath(), GraphPath(degrees=(2.0, 2.0))),
    ],
)
def test_settings_of_rows_change_rows(one: Puzzle, other: Puzzle) -> None:
    assert one.row(0, 500).prompt != other.row(0, 500).prompt


@pytest.mark.parametrize(
    ("puzzle", "settings"),
    [
        (Assignments(), {"revisit": False}),
        (Assignments(), {"wander": 0.2}),
        (GraphPath(), {"revisit": False}),
    ],
)
def test_settings_of_chains_leave_rows_as_they_are(puzzle: Puzzle, settings: dict) -> None:
    """A model is asked the same whatever chains it learned from."""
    other = dataclasses.replace(puzzle, **settings)
    row = puzzle.row(0, 500)
    assert other.row(0, 500) == row
    assert other.chain(row, 0) != puzzle.chain(row, 0)


@pytest.mark.parametrize("length", [100, 1500])
@pytest.mark.parametrize(
    "puzzle",
    [
        Assignments(modulus=2, wander=0.0, constants=0.0, spare=0.0),
        Assignments(modulus=127, wander=0.9, constants=1.0, spare=1.0, spread=1.01),
        Countdown(largest=10, spread=1.01),
        Countdown(largest=127),
        GraphPath(degrees=(2.0, 2.0), spread=1.01),
        GraphPath(degrees=(2.0, 100.0), revisit=False),
    ],
)
def test_the_ends_of_all_settings(puzzle: Puzzle, length: int) -> None:
    for seed in range(3):
        row = puzzle.row(seed, length)
        chain = puzzle.chain(row, seed)
        assert puzzle.reward(row, chain) == RIGHT
        assert encode(f"{row.prompt} {chain}")
