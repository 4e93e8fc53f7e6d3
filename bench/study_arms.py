"""Tables of docs/results/control-study-2.md that the study's own report does not have.

python bench/study_arms.py bench/2026-11-17-control-2b-h200.tar.gz --pairs fine-means:dense

Of a packed study: final outcomes by arm and by run, differences of pairs of arms with Welch's 90 %
interval (final, and at every evaluation), the sparse actor's own answers, metrics by tens of steps.
Final: the mean of the last three evaluations. Ended: not cut off. Nothing is corrected for the
number of comparisons.
"""

import argparse
import json
import math
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from statistics import fmean, stdev, variance
from typing import Any, NamedTuple

from scipy.stats import t as student

LAST, FALL, ONE_SIDED = 3, 0.10, 0.95
SHARES = ("right", "cut_off", "wrong")
METRICS = (
    "critic/acc/mean",
    "critic/advantages/zero_frac",
    "response_length/mean",
    "actor/entropy",
    "actor/kl_new_old",
    "actor/grad_norm",
    "actor/no_signal_updates",
    "actor/skipped",
    "mismatch/weight_mean",
    "mismatch/ess",
    "mismatch/ratio_p99",
    "mismatch/k3",
    "sparse/step/p05",
    "sparse/step/hard_misses",
)
Values = dict[str, float]


class Run(NamedTuple):
    """A run: dense evaluations, steps, sparse answers before and after, warnings of the gate."""

    evaluations: list[Values]
    steps: list[dict[str, Any]]
    sparse: list[list[float] | None]
    warned: list[int]

    def final(self) -> Values:
        last = self.evaluations[-LAST:]
        shares = {name: fmean(line[name] for line in last) for name in SHARES}
        ended = shares["right"] / (shares["right"] + shares["wrong"])
        return shares | {"ended": ended, "gain": shares["right"] - self.evaluations[0]["right"]}

    def fell(self) -> int | None:
        """The first evaluation more than FALL below the best before."""
        best = 0.0
        for line in self.evaluations:
            if line["right"] < best - FALL - 1e-9:
                return int(line["step"])
            best = max(best, line["right"])
        return None


Arms = dict[str, dict[int, Run]]


def read(packed: str, seeds: Sequence[int] | None) -> Arms:
    """Read the runs of a packed study, of all or of some seeds."""
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tarfile.open(packed) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if path.parent.parent.name == "cells" and path.suffix in (".json", ".jsonl"):
                text = archive.extractfile(member).read().decode()  # type: ignore[union-attr]
                lines = text.splitlines() if path.suffix == ".jsonl" else [text]
                cells.setdefault(path.parent.name, {})[path.name] = [*map(json.loads, lines)]
    arms: Arms = {}
    for cell, own in sorted(cells.items()):
        arm, _, seed = cell.rpartition("-")
        if seeds is None or int(seed) in seeds:
            arms.setdefault(arm, {})[int(seed)] = Run(
                evaluations=[*map(evaluation, own["validation.jsonl"])],
                steps=own["metrics.jsonl"],
                sparse=[own[name][0]["outcomes"] for name in ("start.json", "tail.json")],
                warned=[line["step"] for line in own["actions.jsonl"] if line["kind"] == "warn"],
            )
    return arms


def evaluation(line: dict[str, Any]) -> Values:
    """A line of validation.jsonl, by the last word of its keys; tokens: mean of an answer."""
    core = {key.rpartition("/")[2]: v for key, v in line.items() if key.startswith("val-core/")}
    (tokens,) = (value for key, value in line.items() if key.endswith("/length/mean"))
    return {name: core[name] for name in SHARES} | {"step": line["step"], "tokens": tokens}


def welch(first: Sequence[float], second: Sequence[float]) -> str:
    """The difference of two means with Welch's interval."""
    parts = [(variance(values) / len(values), len(values) - 1) for values in (first, second)]
    whole = sum(part for part, _ in parts)
    value = fmean(first) - fmean(second)
    if whole == 0:
        return f"{value:+.3f}"
    freedom = whole**2 / sum(part**2 / free for part, free in parts)
    half = float(student.ppf(ONE_SIDED, freedom)) * math.sqrt(whole)
    return f"{value:+.3f} [{value - half:+.3f}, {value + half:+.3f}]"


def table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    head = [*head]
    print(f"\n{title}\n")
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


def finals(arms: Arms) -> None:
    names = (*SHARES, "ended")
    found = {arm: [run.final() for run in runs.values()] for arm, runs in arms.items()}
    table(
        "Final, mean (sd over runs); right of ended answers; runs that fell",
        ["arm", "runs", *names, "fell"],
        (
            [
                *(arm, str(len(own))),
                *(
                    f"{fmean(f[n] for f in own):.3f} ({stdev(f[n] for f in own):.3f})"
                    for n in names
                ),
                str(sum(run.fell() is not None for run in arms[arm].values())),
            ]
            for arm, own in found.items()
        ),
    )
    table(
        "Final by run; fell at; first warning of the gate",
        ["run", *names, "fell", "warned"],
        (
            [
                f"{arm}-{seed}",
                *(f"{run.final()[name]:.3f}" for name in names),
                *(str(run.fell()), str(min(run.warned, default=None))),
            ]
            for arm, runs in arms.items()
            for seed, run in runs.items()
        ),
    )


def differences(arms: Arms, pairs: Sequence[Sequence[str]]) -> None:
    names = (*SHARES, "ended", "gain")
    table(
        "Final, differences; gain: right less that of the run's own start",
        ["pair", *names],
        (
            [
                " less ".join(pair),
                *(welch(*([r.final()[n] for r in arms[a].values()] for a in pair)) for n in names),
            ]
            for pair in pairs
        ),
    )
    for name in SHARES:
        table(
            f"{name} at every evaluation, differences",
            ["pair", *by_step(arms)],
            (
                [
                    " less ".join(pair),
                    *(
                        welch(*([r.evaluations[at][name] for r in arms[a].values()] for a in pair))
                        for at in range(len(by_step(arms)))
                    ),
                ]
                for pair in pairs
            ),
        )


def by_step(arms: Arms) -> list[str]:
    first = next(run for runs in arms.values() for run in runs.values())
    return [f"step {line['step']}" for line in first.evaluations]


def evaluations(arms: Arms) -> None:
    for name, digits in (*((name, 3) for name in SHARES), ("tokens", 0)):
        table(
            f"{name} at every evaluation, mean over runs",
            ["arm", *by_step(arms)],
            (
                [
                    arm,
                    *(
                        f"{fmean(run.evaluations[at][name] for run in runs.values()):.{digits}f}"
                        for at in range(len(by_step(arms)))
                    ),
                ]
                for arm, runs in arms.items()
            ),
        )


def sparse_answers(arms: Arms) -> None:
    rows = []
    for arm, runs in arms.items():
        pairs = [[s for s in run.sparse if s is not None] for run in runs.values()]
        if all(pairs):
            means = [
                [fmean(part) for part in zip(*when, strict=True)]
                for when in zip(*pairs, strict=True)
            ]
            rights = [
                f"{stdev(shares[0] for shares in when):.3f}" for when in zip(*pairs, strict=True)
            ]
            shown = [" / ".join(f"{share:.3f}" for share in when) for when in means]
            rows.append([arm, *(cell for both in zip(shown, rights, strict=True) for cell in both)])
    head = ("before: right / cut off / wrong", "sd of right", "after", "sd of right")
    table("Answers of the sparse actor, mean over runs", ["arm", *head], rows)


def metrics(arms: Arms) -> None:
    count = max(len(run.steps) for runs in arms.values() for run in runs.values())
    spans = [(at, at + 10) for at in range(0, count, 10)] + [(0, count)]
    for name in METRICS:
        rows = []
        for arm, runs in arms.items():
            parts = [[x[name] for run in runs.values() for x in run.steps[a:b]] for a, b in spans]
            rows.append([arm, *(f"{fmean(p):.4g}" for p in parts), f"{max(parts[-1]):.4g}"])
        head = ["arm", *(f"{a} to {b - 1}" for a, b in spans), "largest"]
        table(f"{name}, mean over runs, and the largest of a step", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packed")
    parser.add_argument("--pairs", nargs="*", default=[], metavar="FIRST:SECOND")
    parser.add_argument("--seeds", nargs="*", type=int, help="these alone")
    given = parser.parse_args()
    arms = read(given.packed, given.seeds)
    finals(arms)
    differences(arms, [pair.split(":") for pair in given.pairs])
    evaluations(arms)
    sparse_answers(arms)
    metrics(arms)


if __name__ == "__main__":
    main()
