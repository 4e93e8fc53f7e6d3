"""Supervised warm-up of a chat model on the programming tasks, for coding RL to start from.

    python bench/code_warmup.py --model smollm2-135m --out /tmp/warm --steps 40 --length 50

Prompts with their right programs as answers, from seeds that neither training nor evaluation use.
SmolLM2-135M as it is passes 1 % of the easiest problems at temperature 1: too few for RL to learn
from. Choose the steps so that 5 to 60 % of first answers pass (`sparrow eval OUT --task code`).
Saves a model folder; prints a JSON line every tenth step.
"""

import argparse
import json
from pathlib import Path
from random import Random

import torch

from sparrow.engine.language import Language
from sparrow.models import load, save
from sparrow.schema.episode import Document
from sparrow.schema.train import OptimiserConfig
from sparrow.tasks.programming.tasks import ProgrammingTasks
from sparrow.training.packing import pack
from sparrow_recipes.warmup.supervised import Supervised

FIRST = 1 << 32  # seeds from here on


def document(language: Language, seed: int, length: int) -> Document:
    """A prompt and its right program, as the model would write them."""
    row = ProgrammingTasks().row(seed, length)
    prompt = language.encode(row.prompt)
    answer = language.encode_text(f"```python\n{ProgrammingTasks().solution(row).strip()}\n```")
    ids = torch.tensor([*prompt, *answer, language.tokenizer.eos_token_id], dtype=torch.int32)
    return Document(ids=ids.numpy(), prompt=len(prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=16, help="of a step")
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = load(args.model, dtype="float32", device=args.device)
    language, rng = Language.load(model), Random(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    optimiser = OptimiserConfig(rate=args.rate, warm_up=5, decay=args.steps // 2, weight_decay=0.0)
    trainer = Supervised(model, optimiser, steps=args.steps, dtype=dtype)
    for step in range(args.steps):
        seeds = range(FIRST + step * args.rows, FIRST + (step + 1) * args.rows)
        rows = [document(language, seed, rng.choice(args.length or [50])) for seed in seeds]
        stats = trainer.step(pack(rows))
        if step % 10 == 0 or step == args.steps - 1:
            print(json.dumps(stats.plain()), flush=True)
    save(model.to(torch.bfloat16), args.out)


if __name__ == "__main__":
    main()
