"""Predicted step times beside measured ones, of cases that were not fitted.

PYTHONPATH=. python bench/predict_steps.py predict > predicted.json      # before measuring
sparrow bench decode --model M --case ... --json > measured-M.json       # on the machine
PYTHONPATH=. python bench/predict_steps.py compare predicted.json measured-*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.bench.timing import schedule_named
from sparrow.calibrate.planning.cost import ByteModel
from sparrow.calibrate.planning.hardware import Hardware, StepModel
from sparrow.models.spec import SHAPES

CASES = {
    "qwen3-1.7b": [(32, 8192), (24, 24576), (48, 12288)],
    "qwen3-4b": [(32, 8192), (24, 24576), (48, 12288)],
    "qwen3-8b": [(32, 8192), (24, 20480), (40, 10240)],
    "qwen3-14b": [(32, 8192), (16, 24576), (40, 10240)],
}


def seconds(model: str, batch: int, context: int, schedule: str | None) -> float:
    reads = ByteModel(spec=SHAPES[model], schedule=schedule_named(schedule))
    return float(StepModel(Hardware.load("h200"), reads)(np.full((1, batch), context))[0])


def predict() -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "batch": batch,
            "context": context,
            "schedule": schedule,
            "ms": 1e3 * seconds(model, batch, context, schedule),
        }
        for model, cases in CASES.items()
        for batch, context in cases
        for schedule in (None, f"{model}-0.86")
    ]


def compare(predicted: Path, measured: list[Path]) -> None:
    rows = json.loads(predicted.read_text())
    errors = []
    for file in measured:
        found = json.loads(file.read_text())
        for row in found["rows"]:
            near = [
                one
                for one in rows
                if one["model"] == found["model"]
                and one["schedule"] == row["schedule"]
                and (one["batch"], one["context"]) == (row["batch"], row["context"])
            ]
            for one in near:
                error = one["ms"] / row["ms_step"] - 1
                errors.append(error)
                place = f"{one['model']:11} {one['batch']:3} x {one['context']:6} {one['schedule']}"
                print(
                    f"{place}: predicted {one['ms']:.2f}, measured {row['ms_step']:.2f} ms, "
                    f"{error:+.1%}"
                )
    worst = max(errors, key=abs)
    within = sum(abs(error) <= 0.1 for error in errors)
    print(
        f"{len(errors)} cases, {within} within 10 %, median {np.median(np.abs(errors)):.1%}, "
        f"worst {worst:+.1%}"
    )


if __name__ == "__main__":
    if sys.argv[1] == "predict":
        print(json.dumps(predict(), indent=1))
    else:
        compare(Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
