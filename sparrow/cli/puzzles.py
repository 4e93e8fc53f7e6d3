"""`sparrow puzzle`: a puzzle, a chain that solves it, or the verdict on an answer."""

from sparrow import api
from sparrow.files import printable
from sparrow.schema.common import PuzzleConfig


def puzzle(config: PuzzleConfig) -> int | None:
    made = api.puzzle(config)
    if made.verdict is not None:
        score, right, reason = made.verdict.score, made.verdict.acc, made.verdict.reason
        print(printable(f"score {score:g}, accuracy {right:g}: {reason}"))
        return int(right < 1)
    print(made.prompt)
    if made.chain is not None:
        print(made.chain)
    return None
