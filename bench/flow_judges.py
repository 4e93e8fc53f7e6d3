"""Texts to judge flows by beside the standard ones: programming tasks, and chains of puzzles.

python bench/flow_judges.py code OUT --characters 32000      # for SmolLM2: tasks, right programs
python bench/flow_judges.py assignments OUT --length 3000    # for the shipped models
sparrow flow score mine.py --texts OUT -m MODEL ...
"""

import argparse
from pathlib import Path

from sparrow.tasks import PUZZLES
from sparrow.tasks.programming.tasks import ProgrammingTasks

FIRST = 3 << 32  # seeds from here on


def code(number: int, characters: int, length: int) -> str:
    """Tasks with their right programs, one after the other."""
    family, parts, seed = ProgrammingTasks(), list[str](), FIRST + (number << 16)
    while sum(map(len, parts)) < characters:
        row = family.row(seed, length)
        parts.append(f"{row.prompt}\n\n```python\n{family.solution(row).strip()}\n```\n\n")
        seed += 1
    return "".join(parts)


def chain(task: str, number: int, length: int) -> str:
    row = PUZZLES[task].row(FIRST + number, length)
    return f"{row.prompt} {PUZZLES[task].chain(row, 1)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["code", *PUZZLES])
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--characters", type=int, default=32_000, help="of a text of code")
    parser.add_argument("--length", type=int, default=200)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for number in range(args.texts):
        made = (
            code(number, args.characters, args.length)
            if args.task == "code"
            else chain(args.task, number, args.length)
        )
        (args.out / f"{args.task}-{number}.txt").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
