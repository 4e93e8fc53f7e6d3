"""The curves and the table of docs/policies.md, from the raw files beside this script.

python bench/plot_policies.py
"""

import json
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import t as student

from sparrow.reporting.page import Axis, Chart, Line, Role, Section
from sparrow.reporting.render import svg_file

HERE = Path(__file__).parent
OUT = HERE.parent / "docs/results/policies"
RAW = HERE / "2026-11-19-policies-h200.tar.gz"
TOKENS = Axis(name="million tokens sampled in training", low=0, form=".0f")
STEP = Axis(name="step", low=0, form=".0f")
ACCURACY = Axis(name="accuracy, held out", form=".0%")
CHOICES = ("first", "retried", "verified", "either")


def rows(name: str) -> list[dict[str, Any]]:
    with tarfile.open(RAW) as archive:
        file = archive.extractfile(f"policies/{name}.jsonl")
        assert file is not None
        return [json.loads(line) for line in file]


def lines(curves: Mapping[str, tuple[Role, Sequence[Sequence[float]]]]) -> list[Line]:
    """Curves by name: x, mean, low and high of their points; seeds of an arm have one colour."""
    return [
        Line(
            name=name,
            points=[(x, mean) for x, mean, *_ in points],
            role=role,
            shape="dots",
            spans=[(x, low, high) for x, _, low, high in points],
        )
        for name, (role, points) in curves.items()
    ]


def by_tokens(run: dict[str, Any], metric: str) -> list[list[float]]:
    return [[p["tokens"] / 1e6, *p[metric]] for p in run["points"] if metric in p]


def verifier_charts() -> Iterator[Chart]:
    runs = {row["run"]: row for row in rows("verifier")}
    curves: dict[str, Any] = {}
    most = max(row["tokens"] for name, row in runs.items() if name.startswith("team")) / 1e6
    for name, row in runs.items():
        kind, seed = name.split("-")
        if kind == "team":
            points = by_tokens(row, "val-episode/graph/team_reward")
            curves[f"team {seed}"] = ("run-1", points)
        else:
            points = by_tokens(row, "val-core/graph/acc")
            curves[f"alone {seed}"] = ("run-0", [p for p in points if p[0] < most])
    yield Chart(
        key="verifier",
        title="A solver whose answers a verifier checks, and a solver alone",
        x=TOKENS,
        y=ACCURACY,
        lines=lines(curves),
        say="Team: the answer that is kept, after at most one more try. Alone: one answer. "
        "256 rows, three seeds.",
    )


def proposer_chart() -> Chart:
    curves: dict[str, Any] = {}
    for number, row in enumerate(rows("proposer")):
        name = {"learns-0": "proposer learns", "frozen-0": "proposer frozen"}[row["run"]]
        points = by_tokens(row, "policy/solver/val-core/countdown/acc")
        curves[name] = (f"run-{number}", points)
    return Chart(
        key="proposer",
        title="A solver of problems that another policy proposes",
        x=TOKENS,
        y=ACCURACY,
        lines=lines(curves),
        say="Problems of the task, 256 rows, one seed each.",
    )


def lora_chart(name: str, title: str, say: str) -> Chart:
    curves: dict[str, Any] = {}
    for row in rows(name):
        lora = row["arm"].startswith("lora")
        points = [[float(step), *values] for step, values in row["accuracy"].items()]
        what = f"{'LoRA' if lora else 'full'} {row['seed']}"
        curves[what] = ("run-1" if lora else "run-0", points)
    return Chart(key=name, title=title, x=STEP, y=ACCURACY, lines=lines(curves), say=say)


def sections() -> Iterator[Section]:
    say = "From `small-rl`, GRPO, one H200. Commands: docs/log.md."
    items = [*verifier_charts(), proposer_chart()]
    yield Section(key="recipes", title="Two recipes of several policies", say=say, items=items)
    charts = [
        lora_chart("lora-small", "small-rl, countdown of length 1000", "512 rows, three seeds."),
        lora_chart("lora-smollm2", "SmolLM2-135M, sums", "512 rows, two seeds."),
    ]
    say = "LoRA of rank 16 at ten times the rate of full training. Commands: docs/log.md."
    yield Section(key="lora", title="LoRA and full training", say=say, items=charts)


def table() -> None:
    """Means over seeds of what answers to new rows come to, and paired differences."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows("evaluate"):
        for choice in CHOICES:
            if choice in row:
                found[f"{row['solver']} {choice}"].append(row[choice][0])
                found[f"{row['solver']} {choice} tokens"].append(row[choice][3])
    for name, values in found.items():
        print(f"{name:24} {fmean(values):10.3f}  {values}")
    for other in ("alone first", "alone retried", "alone verified"):
        pairs = zip(found["team verified"], found[other], strict=True)
        print("team verified -", other, interval([a - b for a, b in pairs]))
    for name in ("lora-small", "lora-smollm2"):
        last = {(row["arm"][:4], row["seed"]): row["accuracy"]["40"][0] for row in rows(name)}
        seeds = sorted({seed for _, seed in last})
        print(name, "LoRA - full", interval([last["lora", s] - last["full", s] for s in seeds]))


def interval(differences: Sequence[float]) -> str:
    """Mean and 95 % interval over seeds."""
    mean, count = fmean(differences), len(differences)
    spread = (sum((x - mean) ** 2 for x in differences) / (count - 1) / count) ** 0.5
    half = spread * float(student.ppf(0.975, count - 1))
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    for section in sections():
        place = OUT / f"{section.key}.svg"
        place.write_text(svg_file(section), encoding="utf-8")
        print(place)
    table()
