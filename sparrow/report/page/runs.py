"""Run directories as their files hold them: of a training, of a calibration, or of both.

    metrics.jsonl, validation.jsonl, actions.jsonl, config.resolved.toml   sparrow train
    schedule.json                                 sparrow train: what the rollout began with
    surface.json, plan.json, check.json           sparrow calibrate, sparrow plan
    speed.json                                    sparrow demo: dense beside sparse

A folder with the parts `calibration` and `train`, such as that of the demo, is one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparrow.files import printable, verify
from sparrow.report.page import reading
from sparrow.report.page.reading import Plain

PARTS = ("calibration", "train")
LINES = {"steps": "metrics.jsonl", "validation": "validation.jsonl", "actions": "actions.jsonl"}
RECORDS = {
    "surface": "surface.json",
    "plan": "plan.json",
    "check": "check.json",
    "speed": "speed.json",
}
SCHEDULE, SETTINGS = "schedule.json", "config.resolved.toml"
KNOWN = ("metrics.jsonl", *RECORDS.values())
VALIDATION = "val-core/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Accuracy on held-out rows after so many steps, with its interval."""

    step: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is known of a run; what its folder does not have is empty."""

    name: str
    folder: Path
    number: int = 0  # of the runs of a page: which colour it has in all of its charts
    steps: Sequence[Plain] = ()
    validation: Sequence[Plain] = ()
    actions: Sequence[Plain] = ()
    settings: Plain = field(default_factory=dict)
    schedule: Plain | None = None
    surface: Plain | None = None
    plan: Plain | None = None
    check: Plain | None = None
    speed: Plain | None = None

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Steps that have a metric, with its values."""
        known = ((line["step"], line.get(metric)) for line in self.steps)
        return [(step, value) for step, value in known if value is not None]

    def minutes(self) -> dict[int, float]:
        """Minutes of training behind each step, its own included; 0 steps took 0."""
        found, so_far = {0: 0.0}, 0.0
        for line in self.steps:
            so_far += max(0.0, line.get("timing_s/step") or 0.0) / 60
            found[line["step"] + 1] = so_far
        return found

    def held_out(self) -> list[Point]:
        """Of the first source of rows that was validated."""
        found = []
        for line in self.validation:
            means = [key for key in line if key.startswith(VALIDATION) and "/mean@" in key]
            value = line[means[0]] if means else None
            if value is None:
                continue
            stem = means[0].rpartition("/mean@")[0]
            low, high = (line.get(f"{stem}/{end}") for end in ("low", "high"))
            ends = (value if end is None else end for end in (low, high))
            found.append(Point(step=line["step"], value=value, low=next(ends), high=next(ends)))
        return found

    @property
    def role(self) -> str:
        """Its colour."""
        return f"run-{self.number}"

    @property
    def dense(self) -> bool:
        """Whether its settings say that the rollout was dense; without settings nobody knows."""
        if not self.settings:
            return False
        chosen = self.settings.get("rollout", {}).get("attention", {})
        return bool(chosen.get("dense")) or not (chosen.get("schedule") or chosen.get("budget"))

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that its settings allow."""
        rollout = self.settings.get("rollout", {})
        sizes = [rollout.get(name) for name in ("max_prompt", "max_tokens")]
        known = [size for size in sizes if isinstance(size, int)]
        return sum(known) if len(known) == len(sizes) else None

    @property
    def target(self) -> float | None:
        """p05 that was to be kept: the gate's, or the plan's."""
        gate = self.settings.get("gate", {})
        if self.steps and gate.get("mode") != "off" and "target" in gate:
            return float(gate["target"])
        known = self.plan or self.surface
        if known is None:
            return None
        targets = [known["target"]] if "target" in known else known["targets"]
        return float(targets[0]) if targets else None


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Every folder as a run, with names that tell them apart."""
    if not folders:
        raise ValueError("report: got no run directory, allowed: one or more")
    places = [Path(folder) for folder in folders]
    twice = [
        str(place) for place in places if [p.resolve() for p in places].count(place.resolve()) > 1
    ]
    if twice:
        raise ValueError(f"report: {twice[0]} was given twice")
    return [
        read_run(place, name, i)
        for i, (place, name) in enumerate(zip(places, _names(places), strict=True))
    ]


def read_run(folder: Path, name: str | None = None, number: int = 0) -> Run:
    """A folder; one that is none, or that holds nothing of ours, is refused."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the run directory of a sparrow verb")
    places = [folder, *(folder / part for part in PARTS)]
    if not any((place / known).is_file() for place in places for known in KNOWN):
        raise ValueError(
            f"{folder} is no run directory: it has none of {', '.join(KNOWN)} "
            f"(nor have its folders {' and '.join(PARTS)})"
        )
    for place in places:
        verify(place, (*LINES.values(), SCHEDULE, SETTINGS))
    found: dict[str, Any] = {
        key: reading.lines(_first(places, file), numbers=key != "actions")
        for key, file in LINES.items()
    }
    found |= {key: reading.record(_first(places, file)) for key, file in RECORDS.items()}
    found["schedule"] = _schedule(places, found["plan"])
    found["settings"] = reading.settings(_first(places, SETTINGS))
    shown = printable(name or folder.resolve().name)
    return Run(name=shown, folder=folder, number=number, **found)


def _names(places: Sequence[Path]) -> list[str]:
    """The last parts of paths, as many as it takes to tell them apart."""
    whole = [place.resolve().parts for place in places]
    for count in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-count:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [str(place) for place in places]


def _first(places: Sequence[Path], file: str) -> Path | None:
    return next((place / file for place in places if (place / file).is_file()), None)


def _schedule(places: Sequence[Path], plan: Plain | None) -> Plain | None:
    """That of the training, else that of the plan."""
    trained = [place for place in places if (place / "metrics.jsonl").is_file()]
    own = reading.record(_first(trained, SCHEDULE))
    return own or (None if plan is None else plan["schedule"])
