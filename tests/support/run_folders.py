"""Run directories made by hand, as `sparrow train`, `calibrate`, `plan` and `demo` leave them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparrow.files import add_digest_line, add_line_digest, write_document
from sparrow.schema.base import to_dict
from sparrow.schema.schedule import Schedule
from support import surfaces

Plain = dict[str, Any]
SETTINGS = """
[model]
name = "tiny"

[rollout.attention]
{attention}

[gate]
mode = "act"
target = 0.86
window = 8
hard_misses = 5.0
max_kl = 0.1

[run]
seed = {seed}
"""


def write_lines(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    file.write_text(
        "".join(add_line_digest(json.dumps(line)) + "\n" for line in lines), encoding="utf-8"
    )


def step(number: int, **changes: float | None) -> Plain:
    made = {"step": number, "critic/score/mean": 0.5 + 0.02 * number}
    made |= {"response_length/mean": 170.0 - number, "sparse/density": 0.8}
    made |= {"response_length/clip_ratio": 0.4 / (number + 1), "sparse/accept_p05": 0.93}
    worst = 0.9 - 0.01 * (number == 2)
    made |= {"sparse/accept_p05_min": worst, "sparse/accept_p05/bin_96": worst}
    made |= {"sparse/accept_p05_low/bin_96": 0.85, "sparse/accept_p05_high/bin_96": 0.94}
    made |= {"sparse/accept_p05_low/bin_0": 0.93, "sparse/accept_p05_high/bin_0": 0.97}
    made |= {"sparse/accept_p05/bin_0": 0.95, "timing_s/gen": 3.0, "timing_s/step": 6.0}
    made |= {"sparse/accept_p0_1": 0.3, "sparse/accept_p0_1/bin_96": 0.2, "sparse/hard_misses": 1.0}
    made |= {"sparse/hard_misses_max": 3.0 + number, "sparse/hard_misses/bin_96": 3.0 + number}
    made |= {"sparse/hard_misses_low/bin_96": 2.0, "sparse/hard_misses_high/bin_96": 20.0}
    made |= {"actor/entropy": 0.3 - 0.01 * number, "actor/kl_new_old": 0.002}
    shares = {"right": 0.5, "cut_off": 0.4 / (number + 1), "wrong": 0.5 - 0.4 / (number + 1)}
    made |= {f"critic/outcome/{name}": share for name, share in shares.items()}
    return made | {"timing_s/old_log_prob": 1.0, "timing_s/update_actor": 2.0} | changes


def validation(step: int, value: float, half: float = 0.1, **shares: float) -> Plain:
    """Accuracy with its interval; `shares`: of answers right, cut_off and wrong."""
    source = "val-core/assignments"
    return {
        "step": step,
        f"{source}/acc/mean@2": value,
        f"{source}/acc/low": value - half,
        f"{source}/acc/high": value + half,
        **{f"{source}/{name}": share for name, share in shares.items()},
    }


def training(folder: Path, *, steps: int = 12, after: float = 0.9, seed: int = 0) -> Path:
    """A sparse training run that learnt."""
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", [step(number) for number in range(steps)])
    first = validation(0, 0.55, right=0.55, cut_off=0.4, wrong=0.05)
    last = validation(steps, after, right=after, cut_off=0.0, wrong=1 - after)
    write_lines(folder / "validation.jsonl", [first, last])
    action = {"step": 3, "kind": "raise", "reason": "p05 0.80 [0.75, 0.84] at 96 to 192"}
    changed = {"step": 4, "kind": "changed", "reason": "run.steps 6 -> 12"}
    write_lines(folder / "actions.jsonl", [action, changed])
    settings = SETTINGS.format(attention='schedule = "s.json"', seed=seed)
    (folder / "config.resolved.toml").write_text(add_digest_line(settings), encoding="utf-8")
    write_document(folder / "schedule.json", schedule())
    return folder


def team_step(number: int) -> Plain:
    """A round: the solver learns in each, the checker in every other one, the opponent never."""
    update = {"steps": 1.0, "staleness_mean": 0.25, "tokens_learnt": 64.0}
    solver = {key: value for key, value in step(number).items() if key != "step"}
    solver |= {**update, "version": number + 1.0, "pending": 0.0}
    checker = {"critic/score/mean": 0.1 * number, **update} if number % 2 else {"steps": 0.0}
    checker |= {"version": float((number + 1) // 2), "pending": float((number + 1) % 2)}
    own: dict[str, Plain] = {"solver": solver, "checker": checker, "opponent": {}}
    return {
        "step": number,
        "critic/score/mean": 0.5,
        "timing_s/step": 60.0,
        **policies({name: {**values, "tokens_sampled": 100.0} for name, values in own.items()}),
    }


def policies(values: Mapping[str, Plain]) -> Plain:
    """Metrics by policy under their names in the files."""
    return {f"policy/{name}/{key}": x for name, own in values.items() for key, x in own.items()}


def team_training(folder: Path, *, steps: int = 6) -> Path:
    """A run of several policies, one of them with a gate of its own."""
    training(folder, steps=steps)
    settings = SETTINGS.format(attention="budget = 64", seed=0)
    settings += "[policies.checker]\nfrozen = false\n[policies.checker.gate]\ntarget = 0.5\n"
    (folder / "config.resolved.toml").write_text(add_digest_line(settings), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", [team_step(number) for number in range(steps)])
    held = [validation(0, 0.25), validation(steps, 0.75)]
    cells = [{key: value for key, value in line.items() if key != "step"} for line in held]
    lines = [
        {"step": line["step"], **policies({"solver": cell, "checker": cell})}
        for line, cell in zip(held, cells, strict=True)
    ]
    write_lines(folder / "validation.jsonl", lines)
    reason = "policy solver: budgets are raised"
    write_lines(folder / "actions.jsonl", [{"step": 3, "kind": "raise", "reason": reason}])
    return folder


def asynchronous_step(number: int) -> Plain:
    """What an asynchronous run adds to the metrics of a step."""
    made = {"async/staleness_mean": 0.5, "async/staleness_max": 1.0 + number % 2}
    made |= {"async/rollout_idle": 0.1, "async/learner_idle": 0.4, "async/wasted_tokens": 100.0}
    made |= {"async/buffer": 3.0, "async/under_way": 20.0 + number, "async/again": 1.0}
    return made | {"async/dropped/uninformative": 2.0, "async/dropped/failed_too_often": 1.0}


def asynchronous_training(folder: Path, *, steps: int = 12) -> Path:
    training(folder, steps=steps)
    lines = [step(number, **asynchronous_step(number)) for number in range(steps)]
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def dense_training(folder: Path, *, steps: int = 12) -> Path:
    folder.mkdir(parents=True)
    names = ("accept_p05_min", "accept_p05/bin_0", "accept_p05/bin_96", "density")
    hidden: dict[str, float | None] = {f"sparse/{name}": None for name in names}
    write_lines(folder / "metrics.jsonl", [step(number, **hidden) for number in range(steps)])
    settings = SETTINGS.format(attention="dense = true", seed=0)
    (folder / "config.resolved.toml").write_text(add_digest_line(settings), encoding="utf-8")
    return folder


def schedule() -> Plain:
    bins = {"lengths": [0, 96, 192], "budgets": [64, 96, 2**31 - 1]}
    return to_dict(Schedule(name="tiny-0.86", dense_layers=(3,), **bins))


def cell(budget: int | None, start: int, p05: float) -> Plain:
    variant = "block-mean" if budget else "dense"
    ends = {"p05": p05, "low": p05 - 0.02, "high": min(1.0, p05 + 0.02)}
    return surfaces.cell(variant, budget, start, start + 96, prompts=48, mean=0.99, **ends)


def calibration(folder: Path, *, planned: bool = True) -> Path:
    folder.mkdir(parents=True)
    about = {"model": "tiny", "dtype": "float32", "device": "cpu", "versions": ["torch 2.13.0"]}
    about |= {"prompts": "assignments, length 150", "command": "sparrow calibrate tiny"}
    about |= {"created": "2026-11-15T00:00:00+00:00", "bins": (0, 96, 192), "budgets": (64, 96)}
    cells = [cell(64, 0, 0.95), cell(64, 96, 0.6), cell(96, 0, 0.97), cell(96, 96, 0.9)]
    floor = [cell(None, 0, 0.999), cell(None, 96, 0.998)]
    surface = surfaces.surface(names=("block-mean",), layers=0, cells=cells, floor=floor, **about)
    write_document(folder / "surface.json", surface)
    if planned:
        write_document(folder / "plan.json", plan())
    return folder


def plan() -> Plain:
    bins = [
        {"start": 0, "stop": 96, "budget": 64, "kept_share": 1.02, **_tail(0.95)},
        {"start": 96, "stop": 192, "budget": 96, "kept_share": 0.7, **_tail(0.9)},
        {"start": 192, "stop": None, "budget": None, "kept_share": 1.0, **_tail(None)},
    ]
    notes = ["fewer than 48 prompts at 96 to 192 (18)"]
    made = surfaces.plan(variant="block-mean", notes=notes, schedule=schedule())
    return made | {"bins": [old | new for old, new in zip(made["bins"], bins, strict=True)]}


def _tail(p05: float | None) -> Plain:
    around = {"low": None, "high": None} if p05 is None else {"low": p05 - 0.02, "high": p05 + 0.02}
    return {"p05": p05, **around}


def speed() -> Plain:
    names = ("name", "context", "what", "dense_ms", "sparse_ms", "why")
    few, many = ([10.0, 12.0, 11.0], [12.0, 13.0, 12.1]), ([40.0, 44.0, 42.0], [21.0, 20.0, 22.0])
    cases = [
        ("Up to 230 tokens", 230, "32 answers", *few, "little to skip"),
        ("At 8192 tokens", 8192, "16 rows", *many, "much to skip"),
    ]
    return {
        "format": 1,
        "machine": {"device": "arm", "cpus": 2, "torch": "2.13.0"},
        "note": "2.5 M weights in float32.",
        "cases": [dict(zip(names, case, strict=True)) for case in cases],
    }


def demo(folder: Path) -> Path:
    calibration(folder / "calibration")
    training(folder / "train")
    write_document(folder / "speed.json", speed())
    return folder
