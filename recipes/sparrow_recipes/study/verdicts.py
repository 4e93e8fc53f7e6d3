"""The verdicts of a study, as sentences made from its numbers alone."""

from sparrow_recipes.study.analysis import Analysis, Comparison
from sparrow_recipes.study.outcome import ArmOutcome, FixedComparison, StudyResults


def with_verdicts(results: StudyResults) -> StudyResults:
    """Add the verdicts to the results."""
    return results.replace(verdicts=verdicts(results), inconclusive=inconclusive(results))


def verdicts(results: StudyResults) -> list[str]:
    """The sentences of a study: of its analysis; without one, of lags and controls."""
    if results.analysis is not None:
        return [s for s in (incomplete(results), *_analysed(results.analysis)) if s]
    reasons = inconclusive(results)
    sentences = [
        f"Inconclusive: {'; '.join(reasons)}." if reasons else "",
        incomplete(results),
        _learnt(results),
        _collapses(results),
        *_lags(results),
        *_controls(results),
        *map(_fixed_verdict, results.schedule_against_fixed),
    ]
    return [sentence for sentence in sentences if sentence]


def inconclusive(results: StudyResults) -> list[str]:
    """Why the study is inconclusive; empty if its controls behaved as required.

    A study with an analysis has its conditions there.
    """
    if results.analysis is not None:
        return []
    reasons = (_baseline_fault(results), _positive_fault(results), _negative_fault(results))
    return [reason for reason in reasons if reason]


def _analysed(analysis: Analysis) -> list[str]:
    holding = [
        name
        for name, parts in analysis.hypotheses.items()
        if all(holds is True for holds in parts.values())
    ]
    leading = [part.name for part in analysis.indicators if part.leading]
    return [
        *map(_compared, analysis.comparisons),
        f"Predictions that hold: {', '.join(holding) or 'of no hypothesis'}."
        if analysis.hypotheses
        else "",
        f"Leading indicators: {', '.join(leading) or 'none shown'}.",
    ]


def _compared(pair: Comparison) -> str:
    if pair.right is None or pair.right.interval is None:
        return f"{pair.arm} less {pair.reference}: {pair.verdict}."
    low, high = pair.right.interval
    by = f"right {pair.right.value:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"{pair.arm} less {pair.reference}: {pair.verdict} ({by})."


def incomplete(results: StudyResults) -> str:
    """The cells without a result; empty if all have one."""
    cells = [cell for arm in results.arms for cell in arm.cells]
    missing = [f"{cell.name} ({cell.status})" for cell in cells if not cell.measured]
    without = f"{len(missing)} of {len(cells)} cells have no result"
    return f"Incomplete: {without}: {', '.join(missing)}." if missing else ""


def _baseline_fault(results: StudyResults) -> str:
    base, expected = results.baseline, results.design.gain
    if base.finals is None:
        return f"the baseline ({base.name}) has no finished run"
    if base.collapsed:
        seeds = ", ".join(map(str, base.collapsed))
        return f"the baseline ({base.name}) itself collapsed (seeds: {seeds})"
    for cell in base.cells:
        if expected is not None and cell.gain is not None and cell.gain < expected:
            return f"the baseline did not learn: {cell.name} gained {cell.gain:+.3f} of {expected}"
    return ""


def _positive_fault(results: StudyResults) -> str:
    controls = results.role("collapses")
    names = ", ".join(arm.name for arm in controls)
    if not controls:
        return "no positive control: nothing shows that a collapse would have been seen"
    if not any(arm.runs for arm in controls):
        return f"no positive control ({names}) has a finished run"
    if any(arm.runs and len(arm.collapsed) == arm.runs for arm in controls):
        return ""
    return f"no positive control ({names}) collapsed, so that no collapse elsewhere says little"


def _negative_fault(results: StudyResults) -> str:
    controls, control = results.role("flat"), results.negative_control
    if not controls:
        return "no negative control: nothing shows that accuracy stays where nothing is learnt"
    if control is None:
        return f"the negative control ({controls[0].name}) has no finished run"
    by = f"{control.change:+.3f}, standard error {control.error:.3f}"
    sentence = f"the negative control ({controls[0].name}) moved ({by}), although it does not train"
    return sentence if control.moved else ""


def _learnt(results: StudyResults) -> str:
    base = results.baseline
    gains = [f"{cell.gain:+.3f}" for cell in base.cells if cell.gain is not None]
    if base.finals is None or not gains:
        return ""
    return (
        f"The baseline ({base.name}, seeds: {len(gains)}) ended at "
        f"{base.finals.mean:.3f} (by seed against its start: {', '.join(gains)})."
    )


def _collapses(results: StudyResults) -> str:
    arms = results.role("arm")
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


def _lags(results: StudyResults) -> list[str]:
    gaps = [(arm.name, arm.lags, arm.gap.value) for arm in results.role("arm") if arm.gap]
    behind = [f"{name} (by {gap:.3f})" for name, lags, gap in gaps if lags]
    level = [f"{name} ({-gap:+.3f})" for name, lags, gap in gaps if not lags]
    rule = f"more than {results.design.lag:g} standard errors"
    sentences = [f"Below the baseline by {rule}: {', '.join(behind)}."] if behind else []
    sentences += [f"Not below it by {rule}: {', '.join(level)}."] if level else []
    if results.common_variance is None and sentences:
        sentences.append(
            "No healthy arm has two seeds, so these errors are of the evaluations alone and know "
            "nothing of how runs differ."
        )
    return sentences


def _controls(results: StudyResults) -> list[str]:
    sentences = []
    for arm in results.role("collapses"):
        held, runs = arm.runs - len(arm.collapsed), arm.runs
        fate = f"did not collapse in {held} of {runs} runs" if held else f"collapsed ({_why(arm)})"
        sentences += [f"The positive control {arm.name} {fate}."] if runs else []
    flat, control = results.role("flat"), results.negative_control
    if control is not None and not control.moved:
        by = f"{control.change:+.3f}, standard error {control.error:.3f}"
        sentences.append(f"The negative control ({flat[0].name}) stayed where it was ({by}).")
    return sentences


def _fixed_verdict(pair: FixedComparison) -> str:
    if pair.accuracy is None:
        return f"{pair.schedule} and {pair.fixed} cannot be compared yet: a run is missing."
    by = f"{pair.accuracy.value:+.3f}, standard error {pair.accuracy.error:.3f}"
    comparison = "No difference seen"
    if pair.better or pair.worse:
        comparison = f"Scheduling was {'better' if pair.better else 'worse'}"
    return (
        f"{comparison}: the schedule {pair.schedule} against the fixed budget {pair.fixed} ({by})."
    )
