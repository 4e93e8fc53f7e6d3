"""What 8-bit weights of drafts cost in acceptance: the same rounds with the model's weights.

    python bench/draft_weights.py --texts TEXTS --tokens 2048 --budget 256 --json OUT

Teacher-forced, over dense keys and values, as `sparrow calibrate --draft-tokens` measures drafts.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from sparrow.calibration.drafts import DraftRounds, accepted_tokens
from sparrow.calibration.flows.score import interval, samples
from sparrow.calibration.flows.texts import from_folder
from sparrow.models import load, load_tokenizer
from sparrow.models.int8 import Int8Decoder
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.loading import load_flow
from sparrow.sparse.rule import Rule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--start", type=int, default=512, help="first token of the first round")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--flow", default="fine_means(4)")
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load(args.model, dtype=args.dtype, device=args.device)
    flow = load_flow(args.flow)
    schedule, rule = Schedule.fixed(args.budget, flow=flow.name), Rule(flow=flow)
    found: dict[str, list[list[float]]] = {"model": [], "int8": []}
    drafters = {"model": model, "int8": Int8Decoder.of(model).decoder}
    for text in samples(load_tokenizer(args.model), from_folder(args.texts), args.tokens):
        for weights, rows in found.items():
            sizes = {"start": args.start, "draft_tokens": args.draft_tokens}
            rounds = DraftRounds(model, text.ids, rule, drafter=drafters[weights], **sizes)
            alpha_BJ = rounds.acceptance(schedule)
            rows.append([float(accepted_tokens(alpha_BJ).mean()), *alpha_BJ.mean(0).tolist()])
            print(text.name, weights, *(f"{value:.4f}" for value in rows[-1]), flush=True)
    means = {name: np.array(rows) for name, rows in found.items()}
    for name, by_text in (*means.items(), ("int8 - model", means["int8"] - means["model"])):
        accepted, alpha = by_text[:, 0] / args.draft_tokens, by_text[:, 1:].mean(1)
        print(name, "accepted", interval("mean", accepted), "alpha", interval("mean", alpha))
    if args.json:
        settings = {"settings": vars(args), "rows": found}
        args.json.write_text(json.dumps(settings, default=str, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
