"""The curves of docs/train.md, from the raw files beside this script.

python bench/plot_training.py
"""

from pathlib import Path

from sparrow.report.run_plots import Curve, plot_runs

HERE = Path(__file__).parent
DAY = "2026-11-15-train-small"


def curve(name: str, kind: str) -> Curve:
    metrics = HERE / f"{DAY}-{kind}-h200.jsonl"
    return Curve.read(name, metrics, HERE / f"{DAY}-{kind}-validation-h200.jsonl")


if __name__ == "__main__":
    written = plot_runs(
        [curve("dense", "dense"), curve("sparse, 0.86", "sparse")],
        HERE.parent / "docs/results/training/small",
        title="small learns puzzles with dense and with sparse rollout",
        note="assignments of length 2000, GRPO with token TIS, one H200, one seed each. "
        "Commands: docs/log.md.",
    )
    print(*written)
