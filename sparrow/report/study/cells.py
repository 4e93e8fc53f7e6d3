"""What became of one cell: where it began and ended, whether it collapsed, which tail it had.

Collapse: the final accuracy is more than `drop` below the start, or the run gave no numbers any
more, or answers became shorter than `length` times the start while accuracy fell below the start.
Short answers alone are no collapse, as dense training shortens answers while accuracy rises; they
are flagged for every cell.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from sparrow.report.page.reading import Plain
from sparrow.report.study.reading import Cell, Design, Evaluation
from sparrow.schema.study import LAST

OFTEN = 1 / 3  # a bin counts where so many of the steps have it
STEP_BIN, WINDOW_MIN = "sparse/step/p05/bin_", "sparse/accept_p05_min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The realised tail: p05 of the steps, averaged by bin of lengths, in the worst bin."""

    p05: float
    bin: int
    rare: tuple[int, ...]  # bins that too few steps have


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What rollouts cost, over the steps of a cell or of an arm."""

    seconds: float | None
    median_seconds: float | None
    tokens_a_second: float | None
    density: float | None
    kept: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One cell, judged. A value that was not measured is None."""

    arm: str
    seed: int
    status: str
    message: str
    steps: int
    start: float | None
    final: float | None
    last: float | None  # accuracy at the last evaluation: a final mean hides a late fall
    evaluations: int
    start_length: float | None
    final_length: float | None
    short: bool | None
    collapse: tuple[str, ...]
    worst: Worst | None
    lowest_window: float | None
    p05: float | None
    p05_uncertain: float | None
    uncertain: float | None
    k3: float | None
    least_ess: float | None
    skipped: int
    spent: Spent

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def measured(self) -> bool:
        """Whether it has a final accuracy: only a cell that came to its own end has one."""
        return self.final is not None


def judge(cell: Cell, design: Design) -> Outcome:
    """The outcome of a cell, finished or not."""
    start = next((each for each in cell.evaluations if each.step == 0), None)
    last = last_evaluations(cell)
    accuracy = mean(each.accuracy for each in last)
    begin, end = (None if start is None else start.median), mean(each.median for each in last)
    short = None if begin is None or end is None else end < design.length * begin
    before = None if start is None else start.accuracy
    ess = values(cell.steps, "mismatch/ess")
    windows = values(cell.steps, WINDOW_MIN)
    return Outcome(
        arm=cell.arm.name,
        seed=cell.seed,
        status=cell.status,
        message="" if cell.end is None else cell.end.message,
        steps=len(cell.steps),
        start=before,
        final=accuracy,
        last=last[-1].accuracy if last else None,
        evaluations=sum(each.accuracy is not None for each in last),
        start_length=begin,
        final_length=end,
        short=short,
        collapse=_collapse(cell, last, (before, accuracy), bool(short), design.drop),
        worst=worst_bin(cell.steps),
        lowest_window=min(windows, default=None),
        p05=mean(values(cell.steps, "sparse/step/p05")),
        p05_uncertain=mean(values(cell.steps, "sparse/step/p05_uncertain")),
        uncertain=mean(values(cell.steps, "sparse/step/uncertain")),
        k3=mean(values(cell.steps, "mismatch/k3")),
        least_ess=min(ess, default=None),
        skipped=int(max(values(cell.steps, "faults/skipped_updates"), default=0)),  # so far
        spent=spent(cell.steps),
    )


def last_evaluations(cell: Cell) -> Sequence[Evaluation]:
    """The last three after the start, fewer where there are no more; none before a cell's end."""
    if cell.status not in ("done", "diverged"):
        return ()
    return [each for each in cell.evaluations if each.step > 0][-LAST:]


def _collapse(
    cell: Cell,
    last: Sequence[Evaluation],
    accuracy: tuple[float | None, float | None],
    short: bool,
    drop: float,
) -> tuple[str, ...]:
    """Why a cell counts as collapsed; empty where it does not."""
    start, final = accuracy
    lower = start is not None and final is not None and final < start
    found = []
    if start is not None and final is not None and below(final, start - drop):
        found.append("accuracy")
    if cell.status == "diverged" or any(each.accuracy is None for each in last):
        found.append("diverged")
    if short and lower:
        found.append("length")
    return tuple(found)


def below(value: float, bound: float) -> bool:
    """Lower by more than rounding: 0.4 is not below 0.5 - 0.1."""
    return value < bound - 1e-9


def worst_bin(steps: Sequence[Plain]) -> Worst | None:
    """Which bin of lengths had the lowest p05 on average over the steps."""
    keys = {key for line in steps for key in line if key.startswith(STEP_BIN)}
    means, rare = {}, []
    for start, key in sorted((int(key.removeprefix(STEP_BIN)), key) for key in keys):
        found = values(steps, key)
        if len(found) >= OFTEN * len(steps):
            means[start] = fmean(found)
        else:
            rare.append(start)
    if not means:
        return None
    lowest = min(means, key=lambda start: means[start])
    return Worst(p05=means[lowest], bin=lowest, rare=tuple(rare))


def spent(steps: Sequence[Plain]) -> Spent:
    """Seconds of rollouts, answered tokens a second, share of keys and values read, kept tokens."""
    seconds = values(steps, "timing_s/gen")
    timed = [
        (tokens, line["timing_s/gen"])
        for line in steps
        if line.get("timing_s/gen") and (tokens := _answered(line)) is not None
    ]
    rate = sum(tokens for tokens, _ in timed) / sum(time for _, time in timed) if timed else None
    return Spent(
        seconds=mean(seconds),
        median_seconds=median(seconds) if seconds else None,
        tokens_a_second=rate,
        density=mean(values(steps, "sparse/density")),
        kept=mean(values(steps, "sparse/kv_budget")),
    )


def _answered(line: Plain) -> float | None:
    """Tokens of a step's answers; the logged total has the prompts in it as well."""
    total, answer = line.get("perf/total_num_tokens"), line.get("response_length/mean")
    prompt = line.get("prompt_length/mean") or 0.0
    if total is None or not answer:
        return None
    return float(total * answer / (answer + prompt))


def values(steps: Iterable[Plain], key: str) -> list[float]:
    """What the steps that have a metric say of it."""
    return [float(line[key]) for line in steps if line.get(key) is not None]


def mean(found: Iterable[float | None]) -> float | None:
    """The mean of what was measured; None where nothing was."""
    known = [value for value in found if value is not None]
    return fmean(known) if known else None
