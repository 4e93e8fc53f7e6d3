"""The curves of docs/train.md, from the raw files beside this script.

python bench/plot_training.py
"""

from pathlib import Path

from sparrow.reporting.page import Chart, Section
from sparrow.reporting.render import svg_file
from sparrow.reporting.training import kept_section, learning_section, tail_section
from sparrow.schema.run_folder import RunFolder, RunSettings, read_metrics

HERE = Path(__file__).parent
OUT = HERE.parent / "docs/results/training/small.svg"
DAY = "2026-11-15-train-small"
SHOWN = ("reward-by-step", "accuracy-by-step", "answer-length", "tail-worst")


def run(number: int, name: str, kind: str) -> RunFolder:
    metrics, held_out = (HERE / f"{DAY}-{kind}{what}-h200.jsonl" for what in ("", "-validation"))
    settings = RunSettings.model_validate({"gate.target": 0.86})
    steps, validation = read_metrics(metrics), read_metrics(held_out)
    return RunFolder(
        name=name, number=number, steps=steps, validation=validation, settings=settings
    )


def curves() -> Section:
    runs = [run(0, "dense", "dense"), run(1, "sparse, 0.86", "sparse")]
    parts = [learning_section(runs), kept_section(runs), tail_section(runs)]
    items = [item for part in parts if part for item in part.items if item.key in SHOWN]
    return Section(
        key="small",
        title="small learns puzzles with dense and with sparse rollout",
        say="assignments of length 2000, GRPO with token TIS, one H200, one seed each. "
        "Commands: docs/log.md.",
        items=[item for item in items if isinstance(item, Chart)],
    )


if __name__ == "__main__":
    OUT.write_text(svg_file(curves()), encoding="utf-8")
    print(OUT)
