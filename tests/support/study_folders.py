"""Folders of control studies made by hand, as `sparrow study` leaves them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparrow.files import write_document
from sparrow.schema.schedule import Schedule
from support.run_folders import write_lines

Plain = dict[str, Any]
SOURCE = "assignments"
FINALS = {"dense": (0.9, 0.9, 0.9), "0.75": (0.6, 0.62, 0.58), "0.86": (0.89, 0.90, 0.91)}
"""Final accuracies by target and seed."""


def make_arm(name: str, role: str = "arm", kind: str = "target", **changes: Any) -> Plain:
    """One arm of a design; three seeds with the common correction."""
    made = {"name": name, "kind": kind, "role": role, "target": None, "budget": None}
    return made | {"seeds": [0, 1, 2], "rate": 1e-4, "correction": "token-tis, cap 2"} | changes


def evaluation(
    step: int, accuracy: float | None, median: float | None = 1000.0, cut_off: float | None = None
) -> Plain:
    accuracies = {"mean@1": accuracy, "low": 0.0, "high": 1.0}
    core = {f"val-core/{SOURCE}/acc/{name}": value for name, value in accuracies.items()}
    aux = {"length/median": median, "cut_off": cut_off}
    return {"step": step, **core, **{f"val-aux/{SOURCE}/{name}": aux[name] for name in aux}}


def step(number: int, bins: Mapping[int, float], **changes: float | None) -> Plain:
    """A line of metrics whose tail is given by bin of lengths."""
    low = min(bins.values())
    made = {"step": number, "response_length/mean": 900.0, "prompt_length/mean": 100.0}
    made |= {"actor/entropy": 0.3 - 0.001 * number, "faults/skipped_updates": 0.0}
    made |= {"mismatch/k3": 0.02, "mismatch/ess": 0.99, "sparse/accept_p05_min": low}
    made |= {"sparse/step/p05": low + 0.01, "sparse/step/p05_uncertain": low - 0.1}
    made |= {"sparse/step/uncertain": 0.2, "sparse/density": 0.5, "sparse/kv_budget": 400.0}
    made |= {"timing_s/gen": 2.0, "perf/total_num_tokens": 20000.0}
    return made | {f"sparse/step/p05/bin_{start}": p05 for start, p05 in bins.items()} | changes


def tail(p05: float, step: int = 6, entropy: float = 0.3) -> Plain:
    """A calibration of two bins, the second the worse."""
    bins = [
        {"start": start, "stop": start + 512, "p05": value, "p05_uncertain": value - 0.1}
        for start, value in ((0, p05 + 0.02), (512, p05))
    ]
    return {"step": step, "schedule": "s", "bins": bins, "entropy": entropy}


def cell(
    study: Path,
    name: str,
    seed: int,
    accuracies: Sequence[float | None] = (0.5, 0.6, 0.7, 0.8),
    *,
    p05: float | None = 0.9,
    medians: Sequence[float | None] = (1000.0,),
    status: str | None = "done",
    every: int = 2,
    **changes: float | None,
) -> Path:
    """A run of one step a line; the last median stands for later ones; without status unfinished.

    changes: metrics that its steps have instead.
    """
    folder = study / "cells" / f"{name}-{seed}"
    folder.mkdir(parents=True)
    filled = [*medians, *[medians[-1]] * len(accuracies)]
    rows = [evaluation(every * at, value, filled[at]) for at, value in enumerate(accuracies)]
    write_lines(folder / "validation.jsonl", rows)
    count = every * (len(accuracies) - 1)
    low = 0.999 if p05 is None else p05
    lines = [
        step(number, {0: min(1.0, low + 0.02), 512: low}, **changes) for number in range(count)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    write_document(folder / "start.json", tail(low, 0, 0.4))
    if status is not None:
        write_document(folder / "tail.json", tail(low + 0.01, count, 0.3))
        end = {"status": status, "message": "", "steps": count, "seconds": 60.0}
        write_document(folder / "end.json", end)
    return folder


def study(folder: Path, arms: Sequence[Plain], **changes: Any) -> Path:
    """A folder with its design alone; cells are added by `cell`."""
    folder.mkdir(parents=True, exist_ok=True)
    design = {"name": "small", "steps": 6, "every": 2, "problems": 256, "rate": 1e-4}
    design |= {"rates": [1e-4, 3e-5, 1e-5], "tolerance": 0.05, "lag": 2.0, "bin": 512}
    design |= {"collapse": {"drop": 0.10, "length": 0.5}, "arms": list(arms)}
    write_document(folder / "design.json", design | changes)
    return folder


def ran(folder: Path, runs: Mapping[str, Sequence[Sequence[float]]], **changes: Any) -> Path:
    """A study by its runs: of each arm, "NAME ROLE [TARGET]", the accuracies of every seed.

    The realised p05 of a run is its target.
    """
    known = {"arm": {}, "collapses": {"kind": "budget", "budget": 64, "correction": "none"}}
    arms = []
    for name in runs:
        own, role, *target = name.split()
        extra = known.get(role, {"kind": "dense"})
        goal = float(target[0]) if target else None
        arms.append(make_arm(own, role, target=goal, seeds=[*range(len(runs[name]))], **extra))
    study(folder, arms, **changes)
    for made, cells in zip(arms, runs.values(), strict=True):
        p05 = made["target"] or (0.4 if made["role"] == "collapses" else 0.99)
        for seed, accuracies in enumerate(cells):
            if accuracies:
                cell(folder, made["name"], seed, accuracies, p05=p05)
    return folder


def controlled(folder: Path, finals: Mapping[str, Sequence[float]], **changes: Any) -> Path:
    """A whole study whose controls do what they must.

    finals: by target, the final accuracy of each seed; "dense" for the baseline. Every run starts
    at 0.5 and stays at its final value.
    """
    names = {key: f"p{key} arm {key}" for key in finals} | {"dense": "dense baseline"}
    runs = {names[key]: [(0.5, *[final] * 3) for final in own] for key, own in finals.items()}
    controls = {"starved collapses": [(0.5, 0.2, 0.1, 0.0)], "still flat": [(0.5,) * 4]}
    return ran(folder, runs | controls, **changes)


def plan(study: Path, name: str, lengths: Sequence[int], budgets: Sequence[int]) -> None:
    """The schedule of an arm."""
    (study / "plans").mkdir(exist_ok=True)
    Schedule(name=name, lengths=lengths, budgets=budgets).save(study / "plans" / f"{name}.json")
