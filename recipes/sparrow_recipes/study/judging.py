"""The outcome of a cell: its final shares, whether it collapsed, the realised p05.

A cell collapsed where the final accuracy is more than `drop` below the start, or the run gave no
numbers any more, or answers became shorter than `length` times the start while accuracy fell below
the start. Short answers alone are no collapse, as dense training shortens answers while accuracy
rises; they are flagged for every cell.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median

from sparrow.schema.base import Record
from sparrow.schema.run_folder import Metrics
from sparrow_recipes.study.config import LAST
from sparrow_recipes.study.files import StudyCell, StudyDesign

OFTEN = 1 / 3  # a bin counts where so many of the watched answers, or of the steps, reach it
STEP_BIN, WINDOW_MIN = re.compile(r"sparse/step/p05/bin_(\d+)$"), "sparse/accept_p05_min"
SURVIVORS = "sparse/step/survivors/bin_"
MEASURES: dict[str, tuple[Callable[[Sequence[float]], float], str]] = {
    "lowest_window": (min, WINDOW_MIN),
    "p05": (fmean, "sparse/step/p05"),
    "p0_1": (fmean, "sparse/step/p0_1"),
    "hard_misses": (fmean, "sparse/step/hard_misses"),
    "p05_uncertain": (fmean, "sparse/step/p05_uncertain"),
    "uncertain": (fmean, "sparse/step/uncertain"),
    "k3": (fmean, "mismatch/k3"),
    "least_ess": (min, "mismatch/ess"),
    "skipped": (max, "faults/skipped_updates"),  # logged as how many so far
    "seconds": (fmean, "timing_s/gen"),
    "median_seconds": (median, "timing_s/gen"),
    "density": (fmean, "sparse/density"),
    "kept": (fmean, "sparse/kv_budget"),
}


class BinTail(Record):
    """p05 in a bin of lengths, mean over steps; survivors: share of watched answers that reach it.

    Older runs did not count survivors.
    """

    p05: float
    survivors: float | None


class Worst(Record):
    """The realised tail: p05 of the steps, averaged by bin of lengths, in the worst bin.

    A bin that fewer than a third of the watched answers reach (of older runs: that fewer than a
    third of the steps have) is rare and not the worst: its p05 is of few survivors.
    """

    p05: float
    bin: int
    rare: tuple[int, ...]
    bins: Mapping[int, BinTail]


class CellOutcome(Record):
    """The outcome of a cell. Only a cell that ended has a final accuracy."""

    arm: str
    seed: int
    status: str
    message: str
    steps: int
    start: float | None
    final: float | None
    last: float | None  # accuracy at the last evaluation: a final mean hides a late fall
    evaluations: int
    cut_off: float | None  # share of answers in the last evaluations, as final
    wrong: float | None
    start_length: float | None
    final_length: float | None
    short: bool | None
    collapse: tuple[str, ...]
    worst: Worst | None
    measures: Mapping[str, float | None]

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def gain(self) -> float | None:
        return None if self.final is None or self.start is None else self.final - self.start

    @property
    def measured(self) -> bool:
        return self.final is not None or bool(self.collapse)


def judge(cell: StudyCell, design: StudyDesign) -> CellOutcome:
    """The outcome of a cell, finished or not; final is the mean of the last evaluations."""
    start = next((e for e in cell.evaluations if e.step == 0), None)
    ended = cell.status in ("done", "diverged")
    last = [e for e in cell.evaluations if e.step > 0][-LAST:] if ended else []
    final, before = mean(e.accuracy for e in last), start.accuracy if start else None
    begin, end = start.median if start else None, mean(e.median for e in last)
    short = None if begin is None or end is None else end < design.collapse.length * begin
    diverged = cell.status == "diverged" or any(e.accuracy is None for e in last)
    gain = less(final, before)
    collapse = {
        "accuracy": gain is not None and gain < -design.collapse.drop - 1e-9,  # but for rounding
        "diverged": diverged,
        "length": bool(short) and gain is not None and gain < 0,
    }
    return CellOutcome(
        arm=cell.arm.name,
        seed=cell.seed,
        status=cell.status,
        message=cell.end.message or "" if cell.end else "",
        steps=len(cell.steps),
        start=before,
        final=final,
        last=last[-1].accuracy if last else None,
        evaluations=sum(e.accuracy is not None for e in last),
        cut_off=mean(e.outcomes.cut_off if e.outcomes else None for e in last),
        wrong=mean(e.outcomes.wrong if e.outcomes else None for e in last),
        start_length=begin,
        final_length=end,
        short=short,
        collapse=tuple(reason for reason, holds in collapse.items() if holds),
        worst=worst_bin(cell.steps),
        measures=measures(cell.steps),
    )


def worst_bin(steps: Sequence[Metrics]) -> Worst | None:
    """The bin of lengths with the lowest mean p05 over the steps."""
    keys = {key for line in steps for key in line.values}
    bins = {int(match[1]): values(steps, key) for key in keys if (match := STEP_BIN.match(key))}
    counted = [line for line in steps if any(key.startswith(SURVIVORS) for key in line.values)]
    tails: dict[int, BinTail] = {}
    often: list[int] = []
    for start, p05 in sorted(bins.items()):
        reached = sum(values(counted, f"{SURVIVORS}{start}")) / len(counted) if counted else None
        tails[start] = BinTail(p05=fmean(p05), survivors=reached)
        share = len(p05) / len(steps) if reached is None else reached
        often += [start] if share >= OFTEN else []
    if not often:
        return None
    lowest = min(often, key=lambda start: tails[start].p05)
    rare = tuple(start for start in tails if start not in often)
    return Worst(p05=tails[lowest].p05, bin=lowest, rare=rare, bins=tails)


def measures(steps: Sequence[Metrics]) -> dict[str, float | None]:
    """The metrics of MEASURES over steps of a cell or of an arm; and sampled tokens a second."""
    measures: dict[str, float | None] = {}
    for name, (join, metric) in MEASURES.items():
        measured = values(steps, metric)
        measures[name] = join(measured) if measured else None
    timed = [
        (tokens, taken)
        for line in steps
        if (taken := line.values.get("timing_s/gen")) and (tokens := _answered(line)) is not None
    ]
    rate = sum(tokens for tokens, _ in timed) / sum(taken for _, taken in timed) if timed else None
    return {**measures, "tokens_a_second": rate}


def _answered(line: Metrics) -> float | None:
    """Tokens of a step's answers; the logged total includes the prompts."""
    total, answer = map(line.values.get, ("perf/total_num_tokens", "response_length/mean"))
    prompt = line.values.get("prompt_length/mean") or 0.0
    return None if total is None or not answer else total * answer / (answer + prompt)


def values(steps: Iterable[Metrics], key: str) -> list[float]:
    """The values of a metric in the steps that have it."""
    return [value for line in steps if (value := line.values.get(key)) is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the measured values; None without any."""
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


def less(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second
