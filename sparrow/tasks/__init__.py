"""Tasks: prompts and rewards. Puzzles made on the spot, and reasoning-gym where it is installed."""

from sparrow.tasks.assignments import Assignments
from sparrow.tasks.base import Puzzle, Row, Source, Verdict
from sparrow.tasks.countdown import Countdown
from sparrow.tasks.graph_path import GraphPath
from sparrow.tasks.gym import Gym

PUZZLES: dict[str, Puzzle] = {
    puzzle.name: puzzle for puzzle in (Assignments(), Countdown(), GraphPath())
}
