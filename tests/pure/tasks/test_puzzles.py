"""What holds for every family of puzzles: gold chains, draws by seed, the dial, refusals."""

import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sparrow.tasks import PUZZLES, Assignments, GraphPath
from sparrow.tasks.base import RIGHT, Puzzle, Row, decode, encode

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


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_drawn_text_is_pinned_in_every_process(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DIGESTS]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, check=True)
    assert json.loads(done.stdout) == GOLDEN


@every_puzzle
def test_gold_chains_are_right_words_of_the_language_and_drawn_by_seed(puzzle: Puzzle) -> None:
    for length in LENGTHS:
        for seed in range(2):
            row = puzzle.row(seed, length)
            for chain in range(2):
                text = puzzle.chain(row, chain)
                assert puzzle.reward(row, text) == RIGHT
                assert decode(encode(f"{row.prompt} {text}")) == f"{row.prompt} {text}"
    rows = [puzzle.row(seed, 500) for seed in range(20)]
    assert rows == [puzzle.row(seed, 500) for seed in range(20)]
    assert len({row.prompt for row in rows}) == len({row.id for row in rows}) == 20
    chains = [puzzle.chain(rows[0], seed) for seed in range(20)]
    assert chains == [puzzle.chain(rows[0], seed) for seed in range(20)]
    assert len(set(chains)) == 20
    # Plain data is enough, and a model is asked the same whatever chains it learned from.
    data = json.loads(json.dumps(rows[0].data))
    assert puzzle.chain(replace(rows[0], data=data), 1) == chains[1]
    assert puzzle.reward(replace(rows[0], data=data), chains[1]) == RIGHT
    assert PUZZLES[puzzle.name].row(0, 500) == rows[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_chains_are_as_long_as_the_dial_says(name: str) -> None:
    """Chains of one length spread by a quarter of it: 40 of them tell their mean to 5 %. Nearly all
    are within the spread; what comes after the search (a way back, an answer) is not counted in.
    """
    puzzle = FAMILIES[name]
    for length in (200, 500, 2000, 8000):
        count = 40 if length < 8000 else 12
        chains = [puzzle.chain(puzzle.row(seed, length), 0) for seed in range(count)]
        mean = statistics.mean(len(chain.split()) for chain in chains)
        if (name, length) != ("graph, no revisits", 200):  # 0.78 of it: such graphs are too small
            assert 0.75 * length <= mean <= 1.25 * length
        searched = [len(re.split(" path | </think> ", chain)[0].split()) for chain in chains]
        within = [length / 1.5 <= tokens <= length * 1.5 + 20 for tokens in searched]
        assert length == 200 or sum(within) >= 0.9 * len(within)


@every_puzzle
def test_rows_of_another_family_and_bad_dials_are_refused(puzzle: Puzzle) -> None:
    row = Row(family="riddles", seed=0, length=100, prompt="", data={})
    for ask in (lambda: puzzle.reward(row, ""), lambda: puzzle.chain(row, 0)):
        with pytest.raises(ValueError, match="riddles"):
            ask()
    for field, seed, length in (
        ("seed", -1, 500),
        ("length", 0, 99),
        ("length", 0, 8001),
        ("length", 0, 500.0),
        ("seed", True, 500),
        ("seed", "7", 500),
    ):
        with pytest.raises(ValueError, match=f"{puzzle.name}: {field}"):
            puzzle.row(seed, length)
