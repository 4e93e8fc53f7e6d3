"""Measure whether a shipped model is fit for the study: the four conditions, with figures.

    python bench/fitness.py tiny --json fitness.json
    python bench/fitness.py small --part tails --json fitness.json

A JSON file is written after every part and budget; what it holds already is not measured again.
The conditions are stated in sparrow/dataflow/fitness.py, what is measured in PLANS below.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from sparrow.calibrate.cells import Tail
from sparrow.dataflow.evaluate import Accuracy, accuracies, as_plain
from sparrow.dataflow.fitness import WINDOW, Plan, conditions, sampled_tail
from sparrow.models import load
from sparrow.tasks import PUZZLES

PLANS = {
    "tiny": Plan(
        family="assignments",
        studied=1000,
        lengths=(200, 500, 1000),
        budgets=(192, 256, 384, 512, 640, 768, 896),
        bin=(750, 1000),
        sequences=16,
    ),
    "small": Plan(
        family="assignments",
        studied=2000,
        lengths=(1000, 2000, 4000),
        budgets=(512, 768, 1024, 1536, 2048, 2560),
        bin=(3000, 4000),
        sequences=16,
    ),
    "small-8k": Plan(
        family="assignments",
        studied=2000,
        lengths=(1000, 2000, 4000, 8000),
        budgets=(768, 1024, 1536, 2048, 3072, 4096, 6144),
        bin=(6000, 8000),
        sequences=32,
    ),
}


def main() -> None:
    options = _options()
    plan = PLANS[options.name]
    shipped = options.name.removesuffix("-8k")
    model = load(options.model or shipped)
    result = _begun(options.json, shipped, str(model.device))
    if options.part in ("accuracy", "all"):
        for kind, window in (("dense", None), ("window", WINDOW)):
            if kind not in result:
                found = accuracies(
                    model, list(PUZZLES), plan.lengths, rows=options.rows, window=window
                )
                result[kind] = as_plain(found)
                _save(options.json, result)
    if options.part in ("tails", "all"):
        _tails(options, plan, model, result)
    _show(plan, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=PLANS)
    parser.add_argument("--model", help="a folder, where it is not the shipped one")
    parser.add_argument("--json", type=Path, required=True, help="figures; taken up where it is")
    parser.add_argument("--part", choices=("accuracy", "tails", "all"), default="all")
    parser.add_argument("--rows", type=int, default=48, help="puzzles for each accuracy")
    return parser.parse_args()


def _begun(file: Path, name: str, device: str) -> dict[str, Any]:
    if file.exists():
        return dict(json.loads(file.read_text()))
    machine = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {"model": name, "machine": machine, "torch": torch.__version__}


def _save(file: Path, result: dict[str, Any]) -> None:
    file.write_text(json.dumps(result, indent=1) + "\n")


def _tails(options: argparse.Namespace, plan: Plan, model: Any, result: dict[str, Any]) -> None:
    policy = load(options.model or result["model"], dtype="float32")
    tails = result.setdefault("tails", {})
    for budget in plan.budgets:
        if str(budget) in tails:
            continue
        begun = time.monotonic()
        found = sampled_tail(model, policy, plan, budget)
        tails[str(budget)] = None if found is None else as_plain({"": found})[""]
        _save(options.json, result)
        print(f"budget {budget}: {found} ({time.monotonic() - begun:.0f} s)", flush=True)


def _show(plan: Plan, result: dict[str, Any]) -> None:
    accuracy = {
        kind: {
            family: {int(length): Accuracy(**cell) for length, cell in by_length.items()}
            for family, by_length in result.get(kind, {}).items()
        }
        for kind in ("dense", "window")
    }
    for kind, by_family in accuracy.items():
        for family, by_length in by_family.items():
            cells = (f"{n}: {a.accuracy:.3f} ± {a.error:.3f}" for n, a in by_length.items())
            print(f"{kind:6} {family:12} {'   '.join(cells)}")
    tails = {int(b): Tail(**t) for b, t in result.get("tails", {}).items() if t is not None}
    for budget, t in tails.items():
        print(
            f"budget {budget:5}: p05 {t.p05:.3f} [{t.low:.3f}, {t.high:.3f}], mean {t.mean:.3f}, "
            f"between {t.between:.3f}, lost {t.lost:.3f}, {t.sequences} sequences"
        )
    if tails and all(accuracy.values()):
        own = (accuracy["dense"][plan.family], accuracy["window"][plan.family])
        for number, condition in enumerate(conditions(plan, *own, tails), start=1):
            holds = "holds" if condition.holds else "DOES NOT HOLD"
            print(f"{number}. {condition.text}: {holds}: {condition.figures}")


if __name__ == "__main__":
    main()
