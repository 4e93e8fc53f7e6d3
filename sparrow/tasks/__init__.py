"""Tasks: prompts and rewards. Generated puzzles, and reasoning-gym if it is installed."""

from sparrow.tasks.assignments import Assignments
from sparrow.tasks.base import Puzzle, Row, Task, Verdict
from sparrow.tasks.countdown import Countdown
from sparrow.tasks.graph_path import GraphPath
from sparrow.tasks.gym import Gym

PUZZLES: dict[str, Puzzle] = {
    puzzle.name: puzzle for puzzle in (Assignments(), Countdown(), GraphPath())
}
