"""Write the cards of the shipped models from the figures in this folder.

python bench/model_cards.py
"""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

from sparrow.models import load
from sparrow.models.checkpoint import SHIPPED

BENCH = Path(__file__).parent
CONFIGS = BENCH.parent / "configs" / "warmup"
DATE = "2026-11-15"
# The fitness figures of each model: accuracies, and tails where they were measured apart.
FIGURES = {
    "tiny": (f"{DATE}-fitness-tiny-arm.json", f"{DATE}-fitness-tiny-arm.json"),
    "small": (f"{DATE}-fitness-small-h200.json", f"{DATE}-fitness-small-arm.json"),
}
ARM = "On an ARM CPU (Neoverse-N1), in float32"
MEASURED = {"tiny": (ARM, ARM), "small": ("On an H200, in bfloat16", ARM)}
MADE_FOR = {
    "tiny": "for a CPU, chains of about 200 to 1000 tokens",
    "small": "for one GPU, chains of about 1000 to 8000 tokens",
}
CARD = """\
---
license: apache-2.0
---
# {name}: a thinking model that is part of Sparrow

{parameters:.2f} M parameters, {made_for}. Qwen3 architecture: {layers} layers of
{hidden} channels, {heads} query and {kv_heads} KV heads of {head_size}, MLPs of {intermediate};
{vocabulary} words, context {context}. It reads and writes the puzzle language of
`sparrow/tasks/words.py` and nothing else.

    sparrow eval {name}

- **Weights**: `model.safetensors`, bf16, sha256
  `{sha256}`
- **Data**: the three puzzle families of `sparrow/tasks`, made on the spot; gold chains with drawn
  order and phrasing; loss on the chain alone. Training took seeds from 2^20 on; the figures below
  are of seeds below that.
- **Recipe**: `configs/warmup/base.toml` ({base_steps} steps, {base_tokens:.0f} M tokens, from
  random weights), then `configs/warmup/{name}.toml` ({steps} steps, {tokens:.0f} M tokens){cut}.
  AdamW, seed 0, one H200.
- **Loss**: `bench/{date}-warmup-base.jsonl`, then `bench/{date}-warmup-{name}.jsonl`.

## Accuracy, by puzzle and length of the chain asked for

{measured[0]}. Temperature 1, {answers} puzzles each,
± one standard error. Window: only the last 256 tokens are
seen. An answer may be 2.5 times as long as asked for; "cut off" is the share that ran into that.
Tokens and entropy (nats a token) are of dense answers.

| puzzle | length | dense | window | tokens | entropy | cut off |
|---|---|---|---|---|---|---|
{rows}

## Acceptance under sparse decoding (assignments)

{measured[1]}. Block-mean rule, page 16,
no dense layer; sampled by the sparse actor, replayed in float32; tokens
drawn at total lengths {bin}. Intervals (95 %) are over sequences.

| budget | p05 | alpha between 0.05 and 0.95 | sequences |
|---|---|---|---|
{tails}

What this model is not: it was made to study rollout, has read no text, and knows nothing.
"""
BINS = {"tiny": "750 to 1000", "small": "3000 to 4000"}


def main() -> None:
    for name in FIGURES:
        card = _card(name)
        (SHIPPED / name / "README.md").write_text(card, encoding="utf-8")
        print(card)


def _card(name: str) -> str:
    accuracy, tails = (json.loads((BENCH / file).read_text()) for file in FIGURES[name])
    spec = load(name, device="cpu").spec
    weights = (SHIPPED / name / "model.safetensors").read_bytes()
    base, own = _curve("base"), _curve(name)
    cells = [cell for cells in accuracy["dense"].values() for cell in cells.values()]
    wider = tomllib.loads((CONFIGS / "base.toml").read_text())["model"]["intermediate"]
    cut = f";\n  its MLPs began as the heaviest {spec.intermediate} of the base's {wider} channels"
    return CARD.format(
        name=name,
        parameters=spec.parameters() / 1e6,
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_size=spec.head_size,
        intermediate=spec.intermediate,
        vocabulary=spec.vocabulary,
        context=spec.max_positions,
        made_for=MADE_FOR[name],
        sha256=hashlib.sha256(weights).hexdigest(),
        base_steps=base[0],
        base_tokens=base[1],
        steps=own[0],
        tokens=own[1],
        cut=cut if spec.intermediate < wider else "",
        date=DATE,
        measured=MEASURED[name],
        answers=cells[0]["answers"],
        rows="\n".join(_rows(accuracy)),
        bin=BINS[name],
        tails="\n".join(_tails(tails["tails"])),
    )


def _curve(name: str) -> tuple[int, float]:
    """Steps, and millions of tokens."""
    lines = (BENCH / f"{DATE}-warmup-{name}.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return steps[-1]["step"] + 1, sum(step["tokens"] for step in steps) / 1e6


def _rows(figures: dict[str, Any]) -> list[str]:
    return [
        f"| {family} | {length} | {cell['accuracy']:.2f} ± {cell['error']:.2f} "
        f"| {figures['window'][family][length]['accuracy']:.2f} | {cell['tokens']:.0f} "
        f"| {cell['entropy']:.3f} | {cell['unfinished']:.0%} |"
        for family, by_length in figures["dense"].items()
        for length, cell in by_length.items()
    ]


def _tails(tails: dict[str, Any]) -> list[str]:
    return [
        f"| {budget} | {tail['p05']:.3f} [{tail['low']:.3f}, {tail['high']:.3f}] "
        f"| {tail['between']:.3f} | {tail['sequences']} |"
        for budget, tail in tails.items()
        if tail is not None
    ]


if __name__ == "__main__":
    main()
