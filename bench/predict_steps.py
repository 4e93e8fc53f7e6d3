"""Compare predicted with measured step times, on cases that were not fitted.

PYTHONPATH=. python bench/predict_steps.py predict > predicted.json      # before measuring
sparrow bench decode --model M --case ... --json > measured-M.json       # on the machine
PYTHONPATH=. python bench/predict_steps.py compare predicted.json measured-*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.benchmarks.timing import schedule_named
from sparrow.calibration.planning.cost import ByteModel
from sparrow.calibration.planning.hardware import Hardware, StepModel
from sparrow.models.spec import SHAPES

CASES = {
    "qwen3-1.7b": [(32, 8192), (24, 24576), (48, 12288)],
    "qwen3-4b": [(32, 8192), (24, 24576), (48, 12288)],
    "qwen3-8b": [(32, 8192), (24, 20480), (40, 10240)],
    "qwen3-14b": [(32, 8192), (16, 24576), (40, 10240)],
}
KEYS = ("model", "batch", "context", "schedule")


def milliseconds(model: str, batch: int, context: int, schedule: str | None) -> float:
    reads = ByteModel(spec=SHAPES[model], schedule=schedule_named(schedule))
    return 1e3 * float(StepModel(Hardware.load("h200"), reads)(np.full((1, batch), context))[0])


def predict() -> list[dict[str, Any]]:
    cases = [
        (model, *case, schedule)
        for model, sizes in CASES.items()
        for case in sizes
        for schedule in (None, f"{model}-0.86")
    ]
    return [dict(zip(KEYS, case, strict=True)) | {"ms": milliseconds(*case)} for case in cases]


def compare(predicted: Path, measured: list[Path]) -> None:
    expected = {
        tuple(row[key] for key in KEYS): row["ms"] for row in json.loads(predicted.read_text())
    }
    errors = []
    for result in (json.loads(file.read_text()) for file in measured):
        for row in result["rows"]:
            case = (result["model"], row["batch"], row["context"], row["schedule"])
            if case in expected:
                errors.append(expected[case] / row["ms_step"] - 1)
                place = f"{case[0]:11} {case[1]:3} x {case[2]:6} {case[3]}"
                figures = f"predicted {expected[case]:.2f}, measured {row['ms_step']:.2f} ms"
                print(f"{place}: {figures}, {errors[-1]:+.1%}")
    size = np.abs(errors)
    print(
        f"{len(errors)} cases, {(size <= 0.1).sum()} within 10 %, median {np.median(size):.1%}, "
        f"worst {max(errors, key=abs):+.1%}"
    )


if __name__ == "__main__":
    if sys.argv[1] == "predict":
        print(json.dumps(predict(), indent=1))
    else:
        compare(Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
