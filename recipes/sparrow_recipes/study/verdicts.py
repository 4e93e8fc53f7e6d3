"""What a study says, in sentences made of its numbers, and of nothing else."""

from sparrow_recipes.study.comparing import PUBLISHED, interval_text
from sparrow_recipes.study.outcome import ArmOutcome, FixedComparison, StudyResults


def with_verdicts(found: StudyResults) -> StudyResults:
    """The results with what they say."""
    return found.replace(verdicts=verdicts(found), inconclusive=inconclusive(found))


def verdicts(found: StudyResults) -> list[str]:
    """What came out."""
    reasons = inconclusive(found)
    said = [
        f"Inconclusive: {'; '.join(reasons)}." if reasons else "",
        incomplete(found),
        _learnt(found),
        _collapses(found),
        *_lags(found),
        *_controls(found),
        _threshold_verdict(found),
        *map(_fixed_verdict, found.schedule_against_fixed),
    ]
    return [sentence for sentence in said if sentence]


def inconclusive(found: StudyResults) -> list[str]:
    """Why the study decides nothing; empty where its controls did what they had to."""
    reasons = (_baseline_fault(found), _positive_fault(found), _negative_fault(found))
    return [reason for reason in reasons if reason]


def incomplete(found: StudyResults) -> str:
    """Which cells have no result; empty where all have."""
    cells = [cell for arm in found.arms for cell in arm.cells]
    missing = [f"{cell.name} ({cell.status})" for cell in cells if not cell.measured]
    without = f"{len(missing)} of {len(cells)} cells have no result"
    return f"Incomplete: {without}: {', '.join(missing)}." if missing else ""


def _baseline_fault(found: StudyResults) -> str:
    base, wanted = found.baseline, found.design.gain
    if base.finals is None:
        return f"the baseline ({base.name}) has no finished run"
    if base.collapsed:
        seeds = ", ".join(map(str, base.collapsed))
        return f"the baseline ({base.name}) itself collapsed (seeds: {seeds})"
    for cell in base.cells:
        if wanted is not None and cell.gain is not None and cell.gain < wanted:
            return f"the baseline did not learn: {cell.name} gained {cell.gain:+.3f} of {wanted}"
    return ""


def _positive_fault(found: StudyResults) -> str:
    controls = found.role("collapses")
    names = ", ".join(arm.name for arm in controls)
    if not controls:
        return "no positive control: nothing shows that a collapse would have been seen"
    if not any(arm.runs for arm in controls):
        return f"no positive control ({names}) has a finished run"
    if any(arm.runs and len(arm.collapsed) == arm.runs for arm in controls):
        return ""
    return f"no positive control ({names}) collapsed, so that no collapse elsewhere says little"


def _negative_fault(found: StudyResults) -> str:
    controls, control = found.role("flat"), found.negative_control
    if not controls:
        return "no negative control: nothing shows that accuracy stays where nothing is learnt"
    if control is None:
        return f"the negative control ({controls[0].name}) has no finished run"
    by = f"{control.change:+.3f}, standard error {control.error:.3f}"
    said = f"the negative control ({controls[0].name}) moved ({by}), although it does not train"
    return said if control.moved else ""


def _learnt(found: StudyResults) -> str:
    base = found.baseline
    gains = [f"{cell.gain:+.3f}" for cell in base.cells if cell.gain is not None]
    if base.finals is None or not gains:
        return ""
    return (
        f"The baseline ({base.name}, seeds: {len(gains)}) ended at "
        f"{base.finals.mean:.3f} (by seed against its start: {', '.join(gains)})."
    )


def _collapses(found: StudyResults) -> str:
    arms = found.role("arm")
    if not any(arm.runs for arm in arms):
        return ""
    fallen = [
        f"{arm.name} in {len(arm.collapsed)} of {arm.runs} runs ({_why(arm)})"
        for arm in arms
        if arm.collapsed
    ]
    return f"Collapsed: {'; '.join(fallen)}." if fallen else "No arm collapsed."


def _why(arm: ArmOutcome) -> str:
    return ", ".join(sorted({reason for cell in arm.cells for reason in cell.collapse}))


def _lags(found: StudyResults) -> list[str]:
    gaps = [(arm.name, arm.lags, arm.gap.value) for arm in found.role("arm") if arm.gap]
    behind = [f"{name} (by {gap:.3f})" for name, lags, gap in gaps if lags]
    level = [f"{name} ({-gap:+.3f})" for name, lags, gap in gaps if not lags]
    rule = f"more than {found.design.lag:g} standard errors"
    said = [f"Below the baseline by {rule}: {', '.join(behind)}."] if behind else []
    said += [f"Not below it by {rule}: {', '.join(level)}."] if level else []
    if found.common_variance is None and said:
        said.append(
            "No healthy arm has two seeds, so these errors are of the evaluations alone and know "
            "nothing of how runs differ."
        )
    return said


def _controls(found: StudyResults) -> list[str]:
    said = []
    for arm in found.role("collapses"):
        held, runs = arm.runs - len(arm.collapsed), arm.runs
        fate = f"did not collapse in {held} of {runs} runs" if held else f"collapsed ({_why(arm)})"
        said += [f"The positive control {arm.name} {fate}."] if runs else []
    flat, control = found.role("flat"), found.negative_control
    if control is not None and not control.moved:
        by = f"{control.change:+.3f}, standard error {control.error:.3f}"
        said.append(f"The negative control ({flat[0].name}) stayed where it was ({by}).")
    return said


def _threshold_verdict(found: StudyResults) -> str:
    if found.threshold is None:
        return "No threshold can be given: no arm has a realised p05 and a final accuracy."
    at = found.threshold
    if at.value == "open below":
        place = f"below {at.upper:.3f}, the lowest studied"
    elif at.value == "open above":
        place = f"above {at.lower:.3f}, the highest studied"
    else:
        place = f"between {at.lower:.3f} (gap still larger) and {at.upper:.3f} (gap within)"
    return (
        f"The gap comes within {found.design.tolerance:g} at a realised p05 (worst bin) {place}; "
        f"interval over seeds {interval_text(at.low, at.high)}; the published {PUBLISHED:g} lies "
        f"{'inside' if at.holds_published else 'outside'} it."
    )


def _fixed_verdict(pair: FixedComparison) -> str:
    if pair.accuracy is None:
        return f"{pair.schedule} and {pair.fixed} cannot be compared yet: a run is missing."
    by = f"{pair.accuracy.value:+.3f}, standard error {pair.accuracy.error:.3f}"
    said = "No difference seen"
    if pair.better or pair.worse:
        said = f"Scheduling was {'better' if pair.better else 'worse'}"
    return f"{said}: the schedule {pair.schedule} against the fixed budget {pair.fixed} ({by})."
