"""From runs to a page: which parts it has, what stands at its top, and how it was made."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sparrow.report.page.calibration import schedule_section, surface_section
from sparrow.report.page.comparison import final_section
from sparrow.report.page.parts import Chart, Number, Page, Section
from sparrow.report.page.runs import Run, read_runs
from sparrow.report.page.speed import speed_section, speed_up
from sparrow.report.page.thinning import thinned
from sparrow.report.page.training import (
    DENSITY,
    WORST,
    kept_section,
    learning_section,
    tail_section,
)

FEW = 3  # names that a title has room for
MOST_RUNS = 6  # colours that are told apart
LEAD = (
    "Sparse attention makes long rollouts faster, but the sparse actor that draws tokens is then "
    "not the dense policy that learns from them. Sparrow measures how far apart the two are, token "
    "by token (acceptance: 1 means the same distribution), keeps the lower tail above a target, "
    "and guards it while training."
)


def page_of(folders: Sequence[str | Path], *, title: str | None = None) -> Page:
    """The page of some run directories: the same files give the same page."""
    runs = read_runs(folders)
    if len(runs) > MOST_RUNS:
        raise ValueError(f"report: got {len(runs)} runs, allowed: {MOST_RUNS} at most on one page")
    return tell(runs, title=title)


def tell(runs: Sequence[Run], *, title: str | None = None) -> Page:
    """The page of some runs."""
    trained = [run for run in runs if run.steps]
    final = final_section(trained)
    sections = (
        final if len(runs) > 1 else None,  # who compares wants the figures first
        surface_section(runs),
        schedule_section(runs),
        learning_section(trained),
        tail_section(trained),
        kept_section(trained),
        speed_section(runs),
        final if len(runs) == 1 else None,
    )
    return Page(
        title=title or _title(runs),
        lead=LEAD,
        numbers=numbers(runs[0]) if len(runs) == 1 else (),
        sections=tuple(_light(section) for section in sections if section is not None),
        foot=tuple(provenance(runs)),
    )


def _light(section: Section) -> Section:
    """The section with charts that are not heavier than a screen can show."""
    items = (thinned(item) if isinstance(item, Chart) else item for item in section.items)
    return replace(section, items=tuple(items))


def _title(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    return " · ".join(names) if len(names) <= FEW else f"{len(names)} runs compared"


def numbers(run: Run) -> tuple[Number, ...]:
    """The few figures that a run comes down to; what was not measured is not there."""
    found = (_accuracy(run), _tail(run), _fastest(run), _kept(run))
    return tuple(number for number in found if number is not None)


def _accuracy(run: Run) -> Number | None:
    known = run.held_out()
    if len(known) < 2 or known[0].step != 0:
        return None
    last = known[-1]
    return Number(
        value=f"{known[0].value:.0%} → {last.value:.0%}",
        name="accuracy on held-out rows",
        say=f"before and after {last.step} steps; then with a 95 % interval of {last.low:.0%} to "
        f"{last.high:.0%}",
    )


def _tail(run: Run) -> Number | None:
    values = [value for _, value in run.values(WORST)]
    if not values:
        return None
    target = "" if run.target is None else f"; the target is {run.target:g}"
    return Number(
        value=f"{values[-1]:.3f}",
        name="p05 of acceptance, worst length",
        say=f"at the last step, lowest on the way {min(values):.3f}{target}",
    )


def _kept(run: Run) -> Number | None:
    values = [value for _, value in run.values(DENSITY)]
    if not values:
        return None
    share = min(1.0, sum(values) / len(values))
    return Number(
        value=f"{share:.0%}", name="of keys and values read", say="mean over all sampled tokens"
    )


def _fastest(run: Run) -> Number | None:
    if run.speed is None:
        return None
    best = max(run.speed["cases"], key=speed_up)
    return Number(
        value=f"{speed_up(best):.1f}x",
        name="decode speed-up",
        say=f"{best['name'].lower()} of context, on this machine",
    )


def provenance(runs: Sequence[Run]) -> list[str]:
    """How the page was made, from what the files say."""
    lines = [
        f"Made by `sparrow report {' '.join(str(run.folder) for run in runs)}`, from files alone."
    ]
    for run in runs:
        if run.surface is not None:
            versions = ", ".join(run.surface["versions"])
            made = f"{run.surface['created']} by `{run.surface['command']}`"
            lines.append(f"{run.name}: the surface was measured on {made} ({versions}).")
        if run.steps:
            model = run.settings.get("model", {}).get("name", "a model")
            seed = run.settings.get("run", {}).get("seed", 0)
            lines.append(f"{run.name}: {model}, {len(run.steps)} steps, seed {seed}.")
    return lines
