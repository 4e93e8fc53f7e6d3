"""A study's numbers as Markdown tables. What was not measured is a dash."""

from collections.abc import Iterable, Sequence

from sparrow.report.page.markdown import name
from sparrow.report.study.cells import Outcome, mean
from sparrow.report.study.comparing import Interval
from sparrow.report.study.outcome import ArmOutcome, Drift, StudyOutcome

DASH = "\N{EN DASH}"


def arms_table(found: StudyOutcome) -> str:
    """One row an arm: tail, accuracy by seed, gap, verdict, cost."""
    head = (
        "arm|seeds|target|realised p05, worst bin [range]|start|final by seed|mean|last by seed|"
        f"gap to {name(found.design.baseline.name)} [95 %]|gap / SE|verdict|KV read|rollout s/step"
    )
    return table(head.split("|"), (_arm(arm, found) for arm in found.arms))


def _arm(arm: ArmOutcome, found: StudyOutcome) -> Sequence[str]:
    gap = None if arm.arm.role == "flat" else arm.gap
    return (
        name(arm.arm.name),
        _count(arm),
        number(arm.arm.target, 2),
        _ranged(arm.p05),
        number(mean(cell.start for cell in arm.cells)),
        " ".join(number(cell.final) for cell in arm.cells),
        DASH if arm.sample is None else number(arm.sample.mean),
        " ".join(number(cell.last) for cell in arm.cells),
        DASH if gap is None else f"{gap.value:+.3f}{_ends(gap.welch)}",
        DASH if gap is None else number(gap.errors, 1),
        verdict(arm, found),
        number(arm.spent.density, 2),
        number(arm.spent.seconds, 2),
    )


def _count(arm: ArmOutcome) -> str:
    ended, asked = len(arm.measured), len(arm.cells)
    return str(asked) if ended == asked else f"{ended} of {asked}"


def _ranged(values: Sequence[float]) -> str:
    if not values:
        return DASH
    spread = f" [{min(values):.3f}, {max(values):.3f}]" if len(values) > 1 else ""
    return f"{number(mean(values))}{spread}"


def verdict(arm: ArmOutcome, found: StudyOutcome) -> str:
    """Collapsed, lagging, level; for controls whether they did what they had to."""
    if not arm.measured:
        return "no finished run"
    words = [f"collapsed {len(arm.collapsed)} of {len(arm.measured)}"] if arm.collapsed else []
    if arm.arm.role == "flat":
        moved = found.flat is not None and found.flat.moved
        return ", ".join([*words, "moved" if moved else "flat"])
    if arm.arm.role == "baseline":
        return ", ".join([*words, "baseline"])
    words += ["lags"] if arm.lags else []
    return ", ".join(words) or "level"


def paired_table(found: StudyOutcome) -> str:
    """Gaps between runs of the same seed."""
    rows = []
    for arm in found.arms:
        if arm.gap is None or arm.gap.paired is None or arm.arm.role == "flat":
            continue
        paired, gap = arm.gap.paired, arm.gap
        by_seed = ", ".join(f"{seed}: {value:+.3f}" for seed, value in paired.by_seed.items())
        means = f"{paired.mean:+.3f}{_ends(paired.interval)}"
        rows.append((name(arm.arm.name), by_seed, means, f"{gap.value:+.3f}", f"{gap.error:.3f}"))
    return table(["arm", "gap by seed", "mean [95 %, paired t]", "gap of means", "its SE"], rows)


def fixed_table(found: StudyOutcome) -> str:
    """Schedules less the fixed budgets of their cost."""
    head = (
        "schedule less fixed|final accuracy|SE|same seeds|p05, worst bin|KV read|kept tokens|"
        "rollout s/step"
    )
    rows = []
    for pair in found.fixed:
        gap = pair.accuracy
        paired = None if gap is None or gap.paired is None else gap.paired.mean
        rows.append(
            (
                name(f"{pair.schedule} less {pair.fixed}"),
                DASH if gap is None else signed(gap.value),
                DASH if gap is None else number(gap.error),
                signed(paired),
                signed(pair.p05),
                signed(pair.density),
                signed(pair.kept, 0),
                signed(pair.seconds, 2),
            )
        )
    return table(head.split("|"), rows)


def drift_table(found: StudyOutcome) -> str:
    """Tail and entropy, start against end."""
    head = (
        "arm|recalibrated p05, worst bin|of tokens with entropy > 0.1|p05, change in the same bins|"
        "recalibrated entropy|p05 in the steps|of tokens with entropy > 0.1|their share|"
        "entropy in the steps"
    )
    rows = []
    for arm in found.arms:
        drifts = arm.drifts
        change = signed(drifts.same_bins)
        tails = (drifts.step_p05, drifts.step_p05_uncertain, drifts.step_uncertain)
        ends = (drifts.entropy, *tails, drifts.step_entropy)
        recalibrated = (_moved(drifts.worst), _moved(drifts.worst_uncertain), change)
        rows.append((name(arm.arm.name), *recalibrated, *map(_moved, ends)))
    return table(head.split("|"), rows)


def cost_table(found: StudyOutcome) -> str:
    """What rollouts took."""
    head = "arm|rollout s/step, mean|median|answered tokens/s|share of KV read|kept tokens, mean"
    rows = [
        (
            name(arm.arm.name),
            number(arm.spent.seconds, 2),
            number(arm.spent.median_seconds, 2),
            number(arm.spent.tokens_a_second, 0),
            number(arm.spent.density, 3),
            number(arm.spent.kept, 0),
        )
        for arm in found.arms
    ]
    return table(head.split("|"), rows)


def cells_table(found: StudyOutcome) -> str:
    """One row a cell, whatever became of it."""
    head = (
        "cell|status|steps|start|final|last|median length, start|final|short|collapse|"
        "p05, worst bin|at|rare bins|lowest window|p05, all|p05, entropy > 0.1|k3|least ESS|skipped"
    )
    return table(head.split("|"), (_cell(cell) for arm in found.arms for cell in arm.cells))


def _cell(cell: Outcome) -> Sequence[str]:
    worst = cell.worst
    return (
        name(cell.name),
        name(cell.status + (f": {cell.message}" if cell.message else "")),
        str(cell.steps),
        number(cell.start),
        number(cell.final),
        number(cell.last),
        number(cell.start_length, 0),
        number(cell.final_length, 0),
        DASH if cell.short is None else ("yes" if cell.short else "no"),
        ", ".join(cell.collapse) or "no",
        DASH if worst is None else number(worst.p05),
        DASH if worst is None else str(worst.bin),
        DASH if worst is None else ", ".join(map(str, worst.rare)) or "none",
        number(cell.lowest_window),
        number(cell.p05),
        number(cell.p05_uncertain),
        DASH if cell.k3 is None else f"{cell.k3:.2g}",
        number(cell.least_ess),
        str(cell.skipped),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    return DASH if value is None else f"{value:+.{digits}f}"


def _ends(ends: Interval | None) -> str:
    return "" if ends is None else f" [{ends.low:+.3f}, {ends.high:+.3f}]"


def _moved(drift: Drift) -> str:
    if drift.start is None and drift.end is None:
        return DASH
    return f"{number(drift.start)} → {number(drift.end)}"
