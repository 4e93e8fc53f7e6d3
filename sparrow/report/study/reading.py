"""The folder of a control study, read and checked: what is wrong is said with file and place.

A cell, one arm with one seed, is the directory of a training run. One without `end.json` is
unfinished; it is read as far as it goes, and never left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow.files import verify
from sparrow.report.page.reading import (
    MAYBE,
    NUMBER,
    WHOLE,
    OrNull,
    Plain,
    check,
    document,
    lines,
)
from sparrow.schema.types import folder_name

KINDS = ("dense", "target", "fixed", "budget")
ROLES = ("baseline", "arm", "collapses", "flat")
STATUSES = ("done", "diverged", "failed")
EVERYTHING = 2**31 - 1  # the budget of a schedule that keeps every token
ACCURACY, LENGTH = "val-core/", "val-aux/"
DESIGN = {
    "name": str,
    "steps": int,
    "every": int,
    "problems": int,
    "rate": NUMBER,
    "rates": [NUMBER],
    "tolerance": NUMBER,
    "collapse": {"drop": NUMBER, "length": NUMBER},
    "lag": NUMBER,
    "bin": int,
    "arms": [{}, {}],
}
ARM = {
    "name": str,
    "kind": str,
    "role": str,
    "target": MAYBE,
    "budget": WHOLE,
    "seeds": [int, int],
    "rate": NUMBER,
    "correction": str,
}
BIN = {"start": int, "stop": WHOLE, "p05": MAYBE, "p05_uncertain": MAYBE}
TAIL = {"step": int, "schedule": str, "bins": [BIN], "entropy": MAYBE}
END = {"status": str, "message": OrNull(str), "steps": int, "seconds": MAYBE}
PLAN = {"lengths": [int, int], "budgets": [int, int]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One treatment. `like` names the arm whose cost a fixed budget copies."""

    name: str
    kind: str
    role: str
    target: float | None
    budget: int | None
    seeds: tuple[int, ...]
    rate: float
    correction: str
    like: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What was fixed before anything ran."""

    name: str
    steps: int
    every: int
    problems: int
    rate: float
    rates: tuple[float, ...]
    tolerance: float
    drop: float
    length: float
    lag: float
    bin: int
    arms: tuple[Arm, ...]
    gain: float | None = None  # that every seed of the baseline must reach
    commands: tuple[str, ...] = ()

    @property
    def baseline(self) -> Arm:
        return next(arm for arm in self.arms if arm.role == "baseline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out problems answered densely after so many steps; None: not a number, not written."""

    step: int
    accuracy: float | None
    median: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """The tail of acceptance in one bin of lengths; of uncertain tokens alone beside it."""

    start: int
    p05: float | None
    p05_uncertain: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A calibration of one schedule, at the start or at the end of a cell."""

    step: int
    bins: tuple[Bin, ...]
    entropy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a cell ended."""

    status: str
    message: str
    steps: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One arm with one seed, as far as it has come."""

    arm: Arm
    seed: int
    began: bool
    steps: tuple[Plain, ...]
    evaluations: tuple[Evaluation, ...]
    start: Tail | None
    tail: Tail | None
    end: End | None

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.seed}"

    @property
    def status(self) -> str:
        """done, diverged, failed, unfinished or not begun."""
        if self.end is not None:
            return self.end.status
        return "unfinished" if self.began else "not begun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Budgets by length; None keeps everything."""

    starts: tuple[int, ...]
    budgets: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study's folder. `strangers`: folders among the cells that no arm of the design has."""

    design: Design
    cells: tuple[Cell, ...]
    plans: Mapping[str, Plan]
    strangers: tuple[str, ...]

    def of(self, arm: Arm) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.arm == arm)


def read_study(folder: str | Path) -> Study:
    """Everything that a study has left so far."""
    folder = Path(folder)
    design = read_design(folder / "design.json")
    cells = tuple(_cell(folder / "cells", arm, seed) for arm in design.arms for seed in arm.seeds)
    plans = {arm.name: _plan(folder / "plans" / f"{arm.name}.json") for arm in design.arms}
    there = sorted(path.name for path in (folder / "cells").glob("*") if path.is_dir())
    return Study(
        design=design,
        cells=cells,
        plans={name: plan for name, plan in plans.items() if plan is not None},
        strangers=tuple(sorted(set(there) - {cell.name for cell in cells})),
    )


def read_design(file: Path) -> Design:
    """design.json: one baseline, names once, every `like` an arm."""
    data = _object(file, DESIGN)
    if data is None:
        raise ValueError(f"{file} is not there: this is no folder of a study")
    for key in ("steps", "every", "problems", "bin"):
        if data[key] < 1:
            raise ValueError(f"{file}: got {key} {data[key]}, allowed: at least 1")
    arms = tuple(_arm(arm, f"{file}, arms {at}") for at, arm in enumerate(data["arms"]))
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ValueError(f"{file}: got arms {', '.join(names)}, allowed: each name once")
    roles = [arm.role for arm in arms].count("baseline")
    if roles != 1:
        raise ValueError(f"{file}: got {roles} arms with role baseline, allowed: one")
    for arm in arms:
        if arm.like is not None and arm.like not in set(names) - {arm.name}:
            raise ValueError(f"{file}: {arm.name} is like {arm.like!r}, allowed: another arm")
    plain = ("name", "steps", "every", "problems", "rate", "tolerance", "lag", "bin")
    return Design(
        **{key: data[key] for key in plain},
        **{key: data["collapse"][key] for key in ("drop", "length")},
        rates=tuple(data["rates"]),
        gain=_gain(data, file),
        arms=arms,
        commands=_commands(data.get("command"), f"{file}, command"),
    )


def _gain(data: Plain, file: Path) -> float | None:
    check(data.get("gain"), MAYBE, f"{file}, gain")
    return data.get("gain")


def _arm(data: Plain, where: str) -> Arm:
    check(data, ARM, where)
    try:
        folder_name(data["name"])
    except ValueError as error:
        raise ValueError(f"{where}: got name {data['name'][:80]!r}, allowed: {error}") from error
    for key, allowed in (("kind", KINDS), ("role", ROLES)):
        if data[key] not in allowed:
            raise ValueError(f"{where}: got {key} {data[key]!r}, allowed: {', '.join(allowed)}")
    if len(set(data["seeds"])) < len(data["seeds"]):
        raise ValueError(f"{where}: got seeds {data['seeds']}, allowed: each once")
    check(data.get("like"), OrNull(str), f"{where}, like")
    fields = {key: data[key] for key in ARM if key != "seeds"}
    return Arm(**fields, seeds=tuple(data["seeds"]), like=data.get("like"))


def _commands(value: object, where: str) -> tuple[str, ...]:
    """One command, several, or none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    check(value, [str], where)
    assert isinstance(value, list), "checked above"
    return tuple(value)


def _cell(folder: Path, arm: Arm, seed: int) -> Cell:
    place = folder / f"{arm.name}-{seed}"
    verify(place, ("metrics.jsonl", "validation.jsonl"))
    steps, end = tuple(_lines(place / "metrics.jsonl")), _end(place / "end.json")
    if end is not None and end.status == "done" and len(steps) != end.steps:
        raise ValueError(
            f"{place / 'metrics.jsonl'}: got {len(steps)} steps, but end.json says {end.steps}"
        )
    return Cell(
        arm=arm,
        seed=seed,
        began=place.is_dir(),
        steps=steps,
        evaluations=_evaluations(place / "validation.jsonl"),
        start=_tail(place / "start.json"),
        tail=_tail(place / "tail.json"),
        end=end,
    )


def _evaluations(file: Path) -> tuple[Evaluation, ...]:
    """Evaluations by step; a study asks one kind of problem."""
    found = []
    for line in _lines(file):
        sources = [
            key.removeprefix(ACCURACY).rpartition("/acc/mean@")[0]
            for key in line
            if key.startswith(ACCURACY) and "/acc/mean@" in key
        ]
        if len(sources) != 1:
            given = ", ".join(sources) or "no accuracy"
            raise ValueError(f"{file}, step {line['step']}: got {given}, allowed: one source")
        mean = next(key for key in line if key.startswith(f"{ACCURACY}{sources[0]}/acc/mean@"))
        median = line.get(f"{LENGTH}{sources[0]}/length/median")
        found.append(Evaluation(step=line["step"], accuracy=line[mean], median=median))
    return tuple(found)


def _tail(file: Path) -> Tail | None:
    data = _object(file, TAIL)
    if data is None:
        return None
    bins = [{key: each[key] for key in ("start", "p05", "p05_uncertain")} for each in data["bins"]]
    return Tail(
        step=data["step"], bins=tuple(Bin(**each) for each in bins), entropy=data["entropy"]
    )


def _end(file: Path) -> End | None:
    data = _object(file, END)
    if data is None:
        return None
    if data["status"] not in STATUSES:
        given = data["status"]
        raise ValueError(f"{file}: got status {given!r}, allowed: {', '.join(STATUSES)}")
    kept = {key: data[key] for key in ("status", "steps", "seconds")}
    return End(**kept, message=data["message"] or "")


def _plan(file: Path) -> Plan | None:
    data = _object(file, PLAN)
    if data is None:
        return None
    starts, budgets = data["lengths"], data["budgets"]
    if len(starts) != len(budgets):
        raise ValueError(
            f"{file}: got {len(budgets)} budgets for {len(starts)} lengths, allowed: one each"
        )
    kept = tuple(None if budget >= EVERYTHING else budget for budget in budgets)
    return Plan(starts=tuple(starts), budgets=kept)


def _lines(file: Path) -> list[Plain]:
    return lines(file, numbers=True) if file.exists() else []


def _object(file: Path, shape: dict[str, Any]) -> Plain | None:
    """A JSON object of that shape, NaN as null; None where there is no file."""
    if not file.exists():
        return None
    data = document(file)
    check(data, shape, str(file))
    return data
