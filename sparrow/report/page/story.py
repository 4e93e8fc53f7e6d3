"""From runs to a page: which parts it has, what stands at its top, and how it was made."""

from collections.abc import Sequence
from pathlib import Path

from sparrow.report.page.calibration import schedule_section, surface_section
from sparrow.report.page.comparison import final_section
from sparrow.report.page.parts import Number, Page
from sparrow.report.page.runs import Run, read_runs
from sparrow.report.page.speed import speed_section, speed_up, times
from sparrow.report.page.tail import looks, tail_section
from sparrow.report.page.training import DENSITY, kept_section, learning_section

FEW = 3  # names that a title has room for
MOST_RUNS = 6  # colours that are told apart
LEAD = (
    "Sparse attention makes long rollouts faster, but the sparse actor that draws tokens is then "
    "not the dense policy that learns from them. Sparrow measures how far apart the two are, token "
    "by token: acceptance is 1 where their distributions are the same, and p05 is the value that "
    "95 % of the tokens reach. It keeps p05 above a target and guards it while training."
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
        sections=tuple(section for section in sections if section is not None),
        foot=tuple(provenance(runs)),
    )


def _title(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    return " · ".join(names) if len(names) <= FEW else f"{len(names)} runs compared"


def numbers(run: Run) -> tuple[Number, ...]:
    """The few figures that a run comes down to; what was not measured is not there."""
    found = (_accuracy(run), _tail(run), _speed(run), _kept(run))
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
    seen = looks(run)
    if not seen:
        return None
    last, worst = seen[-1], min(seen, key=lambda look: look.p05)
    between = "" if last.low is None else f" (95 % interval {last.low:.2f} to {last.high:.2f})"
    target = "" if run.target is None else f"; the target is {run.target:g}"
    return Number(
        value=f"{last.p05:.3f}",
        name="p05 of acceptance, worst length",
        say=f"at the last step{between}, lowest on the way {worst.p05:.3f}{target}",
    )


def _kept(run: Run) -> Number | None:
    values = [value for _, value in run.values(DENSITY)]
    if not values:
        return None
    share = min(1.0, sum(values) / len(values))
    return Number(
        value=f"{share:.0%}", name="of keys and values read", say="mean over all sampled tokens"
    )


def _speed(run: Run) -> Number | None:
    """The longest context that was timed, and the others beside it."""
    if run.speed is None:
        return None
    *shorter, longest = sorted(run.speed["cases"], key=lambda case: case["context"])
    others = "".join(f"; {case['name'].lower()}: {times(speed_up(case))}" for case in shorter)
    return Number(
        value=times(speed_up(longest)),
        name=f"decode, {longest['name'].lower()}",
        say=f"time alone, {longest['what']}{others}",
    )


def provenance(runs: Sequence[Run]) -> list[str]:
    """How the page was made, from what the files say."""
    lines = [f"Made by `sparrow report` from the files of {', '.join(run.name for run in runs)}."]
    for run in runs:
        if run.surface is not None:
            versions = ", ".join(run.surface["versions"])
            made = f"{run.surface['created']} by `{run.surface['command']}`"
            lines.append(f"{run.name}: the surface was measured on {made} ({versions}).")
        if run.steps:
            model = run.settings.get("model", {}).get("name", "model unknown")
            seed = run.settings.get("run", {}).get("seed", "unknown")
            lines.append(f"{run.name}: {model}, {len(run.steps)} steps, seed {seed}.")
    return lines
