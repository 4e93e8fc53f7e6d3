"""The page of runs: its sections, the key figures at its top, and the final table."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sparrow.reporting import training
from sparrow.reporting.agents import agents_section
from sparrow.reporting.asynchronous import asynchronous_section
from sparrow.reporting.calibration import format_p05, schedule_section, surface_section
from sparrow.reporting.page import NOT_MEASURED, TEXTS, Number, Page, Section, Table
from sparrow.reporting.training import (
    CUT_OFF,
    DENSITY,
    ENTROPY,
    HARD_MISSES,
    KL,
    LEARNT,
    LENGTH,
    OUTCOME,
    P0_1,
    PENDING,
    REWARD,
    SAMPLED,
    STALENESS,
    STEP_SECONDS,
)
from sparrow.schema.code import UNSAFE
from sparrow.schema.run_folder import VERSION, HeldOut, RunFolder, read_runs, split_policies

FEW = 3  # names that fit into a title
ENDS = 5  # first and last steps that are averaged
HELD_OUT = ("data.task", "data.length", "data.rows", "data.reward", "rollout.max_tokens")
PLACES = ("run.out", "run.name")  # settings of the place of a run


def make_page(folders: Sequence[str | Path], *, title: str | None = None) -> Page:
    """The page of run directories; the same files give the same page."""
    runs = read_runs(folders)
    trained = [run for run in runs if run.steps]
    parts = split_policies(trained)
    final = final_section(trained)
    several = len(runs) > 1
    sections = (
        final if several else None,  # comparisons start with the figures
        surface_section(runs),
        schedule_section(runs),
        training.learning_section(trained),
        training.policies_section(trained),
        agents_section(trained),
        training.tail_section(parts),
        training.policy_section(parts),
        training.kept_section(parts),
        training.drafts_section(parts),
        asynchronous_section(trained),
        training.time_section(runs),
        None if several else final,
    )
    names = [run.name for run in runs]
    default = " · ".join(names) if len(names) <= FEW else f"{len(names)} runs compared"
    return Page(
        title=title or default,
        lead=" ".join([*unsafe_runs(runs), TEXTS["lead"]]),
        numbers=[] if several else key_figures(runs[0]),
        sections=[section for section in sections if section is not None],
        foot=provenance(runs),
    )


def unsafe_runs(runs: Sequence[RunFolder]) -> list[str]:
    """A sentence that names the runs which judged programs without a sandbox."""
    unsafe = [run.name for run in runs if run.settings.given.get("data.code.sandbox") == "unsafe"]
    return [f"{UNSAFE} ({', '.join(unsafe)})."] if unsafe else []


def key_figures(run: RunFolder) -> list[Number]:
    """The key figures of a run, or those of each of its policies."""
    if not run.policies:
        return numbers(run)
    return [
        figure.model_copy(update={"name": f"{part.name}: {figure.name}"})
        for part in split_policies([run])
        for figure in numbers(part)
    ]


def numbers(run: RunFolder) -> list[Number]:
    """The key figures of a run, as far as they were measured."""
    figures = []
    held_out, worst = run.held_out(), training.worst_bins(run)
    if len(held_out) > 1 and held_out[0].step == 0:
        first, last = held_out[0], held_out[-1]
        value, name = f"{first.value:.0%} → {last.value:.0%}", "accuracy on held-out rows"
        interval = f"a 95 % interval of {last.low:.0%} to {last.high:.0%}"
        say = f"before and after {last.step} steps; then with {interval}"
        figures.append(Number(value=value, name=name, say=say))
    if worst:
        p05, low, high, _ = worst[-1]
        interval = "" if low is None else f" (95 % interval {low:.2f} to {high:.2f})"
        target = "" if run.target is None else f"; the target is {run.target:g}"
        lowest = f"lowest of all steps {min(bin.p05 for bin in worst):.3f}{target}"
        name = "p05 of acceptance, worst length"
        say = f"at the last step{interval}, {lowest}"
        figures.append(Number(value=f"{p05:.3f}", name=name, say=say))
    if run.speed is not None:
        *shorter, longest = sorted(run.speed.cases, key=lambda case: case.context)
        others = [
            f"; {case.name.lower()}: {training.format_speed_up(case.speed_up)}" for case in shorter
        ]
        name, say = f"decode, {longest.name.lower()}", longest.what + "".join(others)
        figures.append(Number(value=training.format_speed_up(longest.speed_up), name=name, say=say))
    if run.values(DENSITY):
        say = "mean over all sampled tokens"
        figures.append(Number(value=_kept(run), name="of keys and values read", say=say))
    return figures


def provenance(runs: Sequence[RunFolder]) -> list[str]:
    """The provenance of a page, from the files of its runs."""
    lines = [f"Made by `sparrow report` from the files of {', '.join(run.name for run in runs)}."]
    for run in runs:
        if run.surface is not None:
            versions = ", ".join(run.surface.versions)
            measured = f"{run.surface.created} by `{run.surface.command}`"
            lines.append(f"{run.name}: the surface was measured on {measured} ({versions}).")
        if run.steps:
            model = run.settings.model or "model unknown"
            seed = "unknown" if run.settings.seed is None else run.settings.seed
            lines.append(f"{run.name}: {model}, {len(run.steps)} steps, seed {seed}.")
    return lines


def final_section(runs: Sequence[RunFolder]) -> Section | None:
    """The final table, a column per run or policy; and the settings in which runs differ."""
    if not runs:
        return None
    parts = split_policies(runs, frozen=True)
    policies = any(run.policies for run in runs)
    figures: list[tuple[str, Callable[[RunFolder], str]]] = [
        ("steps", lambda run: str(len(run.steps))),
        ("reward, first and last steps", lambda run: _first_and_last(run, REWARD, ".2f", ENDS)),
        ("accuracy on held-out rows, before", lambda run: _accuracies(run)[0]),
        ("and after", lambda run: _accuracies(run)[1]),
        ("cut off at the token limit, before and after", lambda run: _outcomes(run, "cut_off")),
        ("wrong though ended, before and after", lambda run: _outcomes(run, "wrong")),
        ("p05 of the worst length, lowest", lambda run: _p05_texts(run)[0]),
        ("and at the last step", lambda run: _p05_texts(run)[1]),
        ("hard misses per 1000 of the worst length, highest", _most_misses),
        ("p0.1 of acceptance, first and last step", lambda run: _first_and_last(run, P0_1, ".3f")),
        ("entropy, first and last steps", lambda run: _first_and_last(run, ENTROPY, ".3f", ENDS)),
        ("KL(new || old), first and last steps", lambda run: _first_and_last(run, KL, ".2g", ENDS)),
        ("keys and values read", _kept),
        ("tokens per answer, first and last step", lambda run: _first_and_last(run, LENGTH, ".0f")),
        ("training answers cut off", lambda run: _first_and_last(run, CUT_OFF, ".0%")),
        ("training answers right", lambda run: _first_and_last(run, f"{OUTCOME}right", ".0%")),
        ("training answers wrong", lambda run: _first_and_last(run, f"{OUTCOME}wrong", ".0%")),
        ("seconds per step", _seconds),
        ("gate", _gate),
    ]
    several = len(runs) > 1
    if policies:
        figures[1:1] = [
            ("updates", lambda run: _last(run, VERSION)),
            ("groups that wait at the end", lambda run: _last(run, PENDING)),
            ("tokens sampled", lambda run: _sum(run, SAMPLED)),
            ("tokens learnt", lambda run: _sum(run, LEARNT)),
            ("staleness, first and last", lambda run: _first_and_last(run, STALENESS, ".2f", ENDS)),
        ]
    elif several:
        name = f"after, against {runs[0].name}"
        figures.insert(4, (name, lambda run: _difference_text(run, runs[0])))
    say = TEXTS["final"]["table"].format(ends=ENDS, twice=2 * ENDS)
    rows = [[name, *(figure(part) for part in parts)] for name, figure in figures]
    if policies:
        rows = [row for row in rows if {*row[1:]} != {NOT_MEASURED}]
    table = Table(
        key="final-table",
        columns=["", *(part.name for part in parts)],
        rows=rows,
        say=say + TEXTS["final"]["differences"] * (several and not policies),
    )
    return Section.named("final", [table, _differences(runs)] if several else [table])


def _last(run: RunFolder, metric: str) -> str:
    values = run.values(metric)
    return f"{values[-1][1]:.0f}" if values else NOT_MEASURED


def _sum(run: RunFolder, metric: str) -> str:
    values = run.values(metric)
    return f"{sum(value for _, value in values):.0f}" if values else NOT_MEASURED


def _accuracies(run: RunFolder) -> tuple[str, str]:
    held_out = run.held_out()
    before = [str(held) for held in held_out if held.step == 0]
    after = [str(held) for held in held_out if held.step > 0]
    return (before or [NOT_MEASURED])[0], (after or [NOT_MEASURED])[-1]


def _outcomes(run: RunFolder, outcome: str) -> str:
    """A share of held-out answers at the first and at the last evaluation."""
    shares = [getattr(held.outcomes, outcome) for held in run.held_out() if held.outcomes]
    return f"{shares[0]:.2f} → {shares[-1]:.2f}" if shares else NOT_MEASURED


def _difference_text(run: RunFolder, other: RunFolder) -> str:
    """The difference of accuracies at the last step at which both runs were evaluated."""
    a, b = ({held.step: held for held in r.held_out() if held.step > 0} for r in (run, other))
    common = sorted(a.keys() & b.keys())
    if run is other or not common or not run.settings.given or not other.settings.given:
        return NOT_MEASURED  # without settings it is unknown whether rows are the same
    if _evaluation_settings(run) != _evaluation_settings(other):
        return "other rows or settings"
    low, value, high = difference(a[common[-1]], b[common[-1]])
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}] at {common[-1]}"


def _evaluation_settings(run: RunFolder) -> dict[str, Any]:
    """The settings that accuracy on held-out rows depends on, apart from the weights."""
    settings = run.settings.given
    names = [name for name in settings if name.startswith("validation.")] + list(HELD_OUT)
    return {name: settings.get(name) for name in names if name != "validation.every"}


def difference(a: HeldOut, b: HeldOut) -> tuple[float, float, float]:
    """Low, value and high of a - b, by Newcombe's method."""
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    high = value + math.hypot(a.high - a.value, b.value - b.low)
    return low, value, high


def _p05_texts(run: RunFolder) -> tuple[str, str]:
    worst = training.worst_bins(run)
    if not worst:
        return NOT_MEASURED, NOT_MEASURED
    lowest = min(worst, key=lambda bin: bin.p05)
    return format_p05(*lowest[:3]), format_p05(*worst[-1][:3])


def _most_misses(run: RunFolder) -> str:
    rates = [rate for _, rate in run.values(f"{HARD_MISSES}_max")]
    return f"{max(rates):.1f}" if rates else NOT_MEASURED


def _kept(run: RunFolder) -> str:
    values = [value for _, value in run.values(DENSITY)]
    if values:
        return f"{min(1.0, fmean(values)):.0%}"
    return "100%" if run.dense and run.steps else NOT_MEASURED


def _first_and_last(run: RunFolder, metric: str, form: str, most: int = 1) -> str:
    """Means of the first and of the last steps (`most` of them, fewer in a short run)."""
    values = [value for _, value in run.values(metric)]
    count = max(1, min(most, len(values) // 2))
    if not values:
        return NOT_MEASURED
    return f"{fmean(values[:count]):{form}} → {fmean(values[-count:]):{form}}"


def _seconds(run: RunFolder) -> str:
    values = [value for _, value in run.values(STEP_SECONDS)]
    return f"{median(values):.1f}" if values else NOT_MEASURED


def _gate(run: RunFolder) -> str:
    if not run.settings.given:
        return NOT_MEASURED
    if run.settings.gate == "off":
        return "off"
    if not training.worst_bins(run):
        return "nothing measured"
    count = len(training.gate_actions(run))
    return "no action" if not count else f"{count} action{'s' if count > 1 else ''}"


def _differences(runs: Sequence[RunFolder]) -> Table:
    """Settings in which the runs differ, one per row."""
    settings = [run.settings.given for run in runs]
    names = sorted(set(chain.from_iterable(settings)) - set(PLACES))
    differing = [name for name in names if len({repr(s.get(name)) for s in settings}) > 1]
    rows = [[name, *(str(s.get(name, NOT_MEASURED)) for s in settings)] for name in differing]
    return Table(
        key="settings",
        title="Settings that differ",
        columns=["setting", *(run.name for run in runs)],
        rows=rows or [["none", *("" for _ in runs)]],
    )
