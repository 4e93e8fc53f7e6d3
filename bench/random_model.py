"""A folder to train with a model's shape and random weights, to time what its size costs.

    python bench/random_model.py qwen3-1.7b /tmp/q17
    sparrow train --model=/tmp/q17/model --data.rows=/tmp/q17/rows.jsonl \\
        --data.reward=bench/random_model.py:coin ...

The tokenizer is that of `tiny`: most drawn tokens have no text. The reward is a coin's throw, the
same for the same text, so that every step has an update.
"""

import argparse
import json
from pathlib import Path
from zlib import crc32

import torch

from sparrow import models

ROWS = 400


def coin(text: str, answer: str) -> float:
    return float(crc32(f"{answer} {text}".encode()) & 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=models.SHAPES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = models.random(args.shape, device=device).to(torch.bfloat16)
    models.save(model, args.folder / "model", tokenizer=models.locate("tiny"))
    rows = (
        {"prompt": f"{number % 20} + {number // 20}", "answer": str(number)}
        for number in range(ROWS)
    )
    (args.folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
