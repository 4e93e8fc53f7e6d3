"""A study's report: results.json, report.md and figures beside the cells that they tell of."""

from pathlib import Path

from sparrow.files import write_document, write_whole
from sparrow.report.page.markdown import code_block, name
from sparrow.report.study.outcome import StudyOutcome, conclude
from sparrow.report.study.plots import figures
from sparrow.report.study.reading import Study, read_study
from sparrow.report.study.results import results
from sparrow.report.study.tables import (
    arms_table,
    cells_table,
    cost_table,
    drift_table,
    fixed_table,
    paired_table,
)
from sparrow.report.study.threshold import Threshold
from sparrow.report.study.verdicts import interval, place, verdicts
from sparrow.report.style import save

FEW = 40  # draws below which the outer quantiles are the extremes
CAPTIONS = {
    "accuracy": "Held-out accuracy by step",
    "gaps": "Gap to the baseline against realised p05",
    "tails": "Tail, entropy and length by step",
    "budgets": "Kept tokens by length",
}


def write_study(folder: str | Path) -> Path:
    """Read a study, finished or not, and write what it says; returns the path of report.md."""
    folder = Path(folder)
    study = read_study(folder)
    found = conclude(study)
    write_document(folder / "results.json", results(found))
    drawn = figures(study, found)
    for stem, figure in drawn.items():
        save(figure, folder / stem, formats=("svg",))
    report = folder / "report.md"
    write_whole(report, [markdown(study, found, list(drawn))])
    return report


def markdown(study: Study, found: StudyOutcome, drawn: list[str]) -> str:
    """The report as text."""
    blocks = [
        f"# {name(study.design.name)}: control study",
        " ".join(verdicts(found)),
        "## Arms",
        arms_table(found),
        _rules(found),
        "Same seed, baseline less arm:",
        paired_table(found),
        "## Threshold",
        _threshold(found),
        *_fixed(found),
        "## Tail and entropy, start against end",
        _drift_words(),
        drift_table(found),
        "## Rollout",
        "Times as logged. Where cells ran side by side on one device, they slowed each other.",
        cost_table(found),
        "## Figures",
        *(f"![{CAPTIONS[stem]}]({stem}.svg)" for stem in drawn),
        "## Cells",
        cells_table(found),
        *_strangers(found),
        *_commands(study),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _rules(found: StudyOutcome) -> str:
    design = found.design
    pooled = "none" if found.common is None else f"{found.common:.2g}"
    return (
        "Final: mean of the last three evaluations after the start (fewer where there are no "
        f"more) of {design.problems} problems, answered densely; last: the last of them alone. "
        "Gap: the baseline's mean final less the arm's, with Welch's interval where both "
        "have two seeds or more. SE: the variance of one run is that of its arm's seeds, for an "
        f"arm with one seed the pooled one ({pooled}), and at least the binomial one; the interval "
        "has no such floor, so it can be narrower than the SE would say. Lags: gap above "
        f"{design.lag:g} SE; each arm is tested by itself, without a correction for their number. "
        f"Collapsed: final more than {design.drop:g} below the start, or no numbers "
        f"any more, or median length below {design.length:g} of the start's while accuracy is "
        "below the start. Short answers alone are flagged under Cells and are no collapse. "
        "Realised p05: mean over steps by bin of lengths (bins in at least a third of the steps), "
        "then the lowest bin."
    )


def _threshold(found: StudyOutcome) -> str:
    if found.threshold is None:
        return "No arm has both a realised p05 and a final accuracy, so there is none to give."
    threshold, points = found.threshold, found.points
    left = "; ".join(f"{name(cell)}: {name(why)}" for cell, why in found.left_out)
    diverged = [c.name for arm in found.arms for c in arm.cells if "diverged" in c.collapse]
    most, own = found.design.tolerance, sum(point.baseline for point in points)
    words = [
        f"The fitted gap comes within {most:g} at a realised p05 **{place(threshold)}**.",
        f"Interval: **{interval(threshold.low, threshold.high)}**. {_draws(threshold)}",
        f"The fit has {len(points)} cells, of which {own} are the baseline's own (gap 0).",
        f"Not in the fit: {left}." if left else "",
        f"Diverged, counted with accuracy 0 in the fit: {', '.join(diverged)}." if diverged else "",
    ]
    return " ".join(word for word in words if word)


def _draws(threshold: Threshold) -> str:
    empty = f", {threshold.empty} had no arm" if threshold.empty else ""
    few = (
        " With so few seeds these are the least and the largest of all draws, without a promise of "
        "95 % coverage."
    )
    return (
        f"It goes from the 2.5 % quantile of the lower to the 97.5 % quantile of the upper ends in "
        f"{threshold.draws} draws of seeds with replacement, the same for all arms; the estimate "
        "alone (the lowest p05 with a gap within, the upper end) has "
        f"{interval(threshold.value_low, threshold.value_high)}. {threshold.open_below} draws were "
        f"open below, {threshold.open_above} open above{empty}."
        + (few if threshold.draws < FEW else "")
    )


def _fixed(found: StudyOutcome) -> list[str]:
    if not found.fixed:
        return []
    words = (
        "Positive accuracy: the schedule is better. SE as above; with one seed on a side it rests "
        "on the pooled variance."
    )
    return ["## Schedule against a fixed budget of its cost", words, fixed_table(found)]


def _drift_words() -> str:
    return (
        "Recalibrated: the cell's schedule measured with the weights of the start and of the end. "
        "In the steps: mean of the first and of the last quarter of the steps. Answers change in "
        "length while the policy learns, so the worst bin need not be the same one; the change in "
        "the same bins is of bins that both calibrations have."
    )


def _strangers(found: StudyOutcome) -> list[str]:
    names = ", ".join(name(each) for each in found.strangers)
    return [f"Folders among the cells that no arm has, not read: {names}."] if names else []


def _commands(study: Study) -> list[str]:
    commands = study.design.commands
    return ["## Commands", code_block(commands)] if commands else []
