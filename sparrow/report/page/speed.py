"""What a page shows of time: dense beside sparse where it was measured, and where a step goes."""

from collections.abc import Sequence
from statistics import median

from sparrow.report.page.parts import Bar, BarGroup, Bars, Item, Section
from sparrow.report.page.runs import Plain, Run

PARTS = (
    ("rollout", "timing_s/gen"),
    ("dense log-probs", "timing_s/old_log_prob"),
    ("update", "timing_s/update_actor"),
)
EQUAL = 0.02  # ratios nearer to 1 than this are called equal


def speed_section(runs: Sequence[Run]) -> Section | None:
    """Bars of what was timed, and medians of the parts of a step."""
    items: list[Item] = [_timed(run) for run in runs if run.speed is not None]
    trained = [run for run in runs if run.values("timing_s/step")]
    if trained:
        items.append(_step_parts(trained))
    if not items:
        return None
    say = (
        "Choosing what to read costs a little at every step, and reading less saves in proportion "
        "to the text: on short texts the choice can cost more than it saves, on long ones it pays."
    )
    return Section(
        key="time", title="What does it cost, what does it save?", say=say, items=tuple(items)
    )


def _timed(run: Run) -> Bars:
    assert run.speed is not None
    cases = run.speed["cases"]
    return Bars(
        key=f"speed-{run.number}",
        title="Dense against sparse on this machine",
        unit="ms a step",
        form=".1f",
        groups=tuple(map(_group, cases)),
        say=" ".join([*map(told, cases), _how(run.speed)]),
    )


def told(case: Plain) -> str:
    """What was timed and why it came out so, in a sentence."""
    return f"{case['name']} ({case['what']}): {case['why']}."


def _group(case: Plain) -> BarGroup:
    dense, sparse = case["dense_ms"], case["sparse_ms"]
    return BarGroup(
        name=case["name"],
        bars=(_bar("dense", dense), _bar("sparse", sparse)),
        say=verdict(speed_up(case)),
    )


def _bar(role: str, rounds: Sequence[float]) -> Bar:
    return Bar(name=role, value=median(rounds), role=role, low=min(rounds), high=max(rounds))


def speed_up(case: Plain) -> float:
    return float(median(case["dense_ms"]) / median(case["sparse_ms"]))


def times(ratio: float) -> str:
    """A speed-up in few words."""
    return f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def verdict(ratio: float) -> str:
    """A speed-up in words."""
    if abs(ratio - 1) < EQUAL:
        return "Sparse and dense take the same time"
    return f"Sparse is {ratio:.2f}x faster" if ratio > 1 else f"Sparse is {1 / ratio:.2f}x slower"


def _how(speed: Plain) -> str:
    machine, rounds = speed["machine"], len(speed["cases"][0]["dense_ms"])
    place = f"{machine['device']}, {machine['cpus']} CPUs, torch {machine['torch']}"
    return (
        f"{speed['note']} {place}. Medians of {rounds} rounds that took turns; whiskers: fastest "
        "and slowest."
    )


def _step_parts(runs: Sequence[Run]) -> Bars:
    groups = []
    for run in runs:
        bars = []
        for number, (name, metric) in enumerate(PARTS):
            values = [value for _, value in run.values(metric)]
            if values:
                bars.append(Bar(name=name, value=median(values), role=f"ramp-{2 * number + 1}"))
        whole = median(value for _, value in run.values("timing_s/step"))
        groups.append(BarGroup(name=run.name, bars=tuple(bars), say=f"{whole:.1f} s a step in all"))
    return Bars(
        key="step-parts",
        title="Where a step of training goes",
        unit="s",
        form=".2f",
        groups=tuple(groups),
        say="Medians over the steps. On large models with long answers the rollout is most of it.",
    )
