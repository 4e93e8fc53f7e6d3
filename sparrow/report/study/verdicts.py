"""What came out, in sentences: made of the numbers, and of nothing else."""

from collections.abc import Sequence

from sparrow.report.study.outcome import PUBLISHED, ArmOutcome, StudyOutcome
from sparrow.report.study.threshold import ABOVE, BELOW, Threshold


def inconclusive(found: StudyOutcome) -> list[str]:
    """Why the study decides nothing; empty where its controls did what they had to."""
    return [*_baseline(found), *_positive(found), *_negative(found)]


def incomplete(found: StudyOutcome) -> str:
    """Which cells have no result; empty where all have."""
    cells = [cell for arm in found.arms for cell in arm.cells]
    missing = [f"{cell.name} ({cell.status})" for arm in found.arms for cell in arm.missing]
    if not missing:
        return ""
    names = ", ".join(missing)
    return f"**Incomplete:** {len(missing)} of {len(cells)} cells have no result: {names}."


def _baseline(found: StudyOutcome) -> list[str]:
    base = found.baseline
    if base.sample is None:
        return [f"the baseline ({base.arm.name}) has no finished run"]
    if base.collapsed:
        return [f"the baseline ({base.arm.name}) itself collapsed in {_seeds(base.collapsed)}"]
    wanted = found.design.gain
    for cell in base.measured:
        if wanted is not None and cell.final is not None and cell.start is not None:
            gained = cell.final - cell.start
            if gained < wanted:
                return [f"the baseline did not learn: {cell.name} gained {gained:+.3f} of {wanted}"]
    return []


def _positive(found: StudyOutcome) -> list[str]:
    controls = found.role("collapses")
    if not controls:
        return ["no positive control: nothing shows that a collapse would have been seen"]
    measured = [arm for arm in controls if arm.measured]
    names = ", ".join(arm.arm.name for arm in controls)
    if not measured:
        return [f"no positive control ({names}) has a finished run"]
    if any(len(arm.collapsed) == len(arm.measured) for arm in measured):
        return []
    return [f"no positive control ({names}) collapsed, so that no collapse elsewhere says little"]


def _negative(found: StudyOutcome) -> list[str]:
    controls = found.role("flat")
    if not controls:
        return ["no negative control: nothing shows that accuracy stays where nothing is learnt"]
    name = controls[0].arm.name
    if found.flat is None:
        return [f"the negative control ({name}) has no finished run"]
    if found.flat.moved:
        by = f"{found.flat.change:+.3f}, standard error {found.flat.error:.3f}"
        return [f"the negative control ({name}) moved ({by}), although it does not train"]
    return []


def verdicts(found: StudyOutcome) -> list[str]:
    """The sentences of the report's first paragraph."""
    reasons = inconclusive(found)
    said = [f"**Inconclusive:** {'; '.join(reasons)}."] if reasons else []
    said += [
        incomplete(found),
        _learnt(found),
        *_collapses(found),
        *_lags(found),
        *_controls(found),
    ]
    said += [*_threshold(found), *(_fixed(found, at) for at in range(len(found.fixed)))]
    return [sentence for sentence in said if sentence]


def _learnt(found: StudyOutcome) -> str:
    base = found.baseline
    gains = [c.final - c.start for c in base.cells if c.final is not None and c.start is not None]
    if base.sample is None or not gains:
        return ""
    by = ", ".join(f"{gain:+.3f}" for gain in gains)
    runs = f"{len(gains)} {'seed' if len(gains) == 1 else 'seeds'}"
    return (
        f"The baseline ({base.arm.name}, {runs}) ended at {base.sample.mean:.3f} "
        f"(by seed against its start: {by})."
    )


def _collapses(found: StudyOutcome) -> list[str]:
    arms = found.role("arm")
    fallen = [arm for arm in arms if arm.collapsed]
    if not any(arm.measured for arm in arms):
        return []
    if not fallen:
        return ["No arm collapsed."]
    return [
        "Collapsed: "
        + "; ".join(f"{arm.arm.name} in {_of(arm)} ({_why(arm)})" for arm in fallen)
        + "."
    ]


def _why(arm: ArmOutcome) -> str:
    reasons = sorted({reason for cell in arm.cells for reason in cell.collapse})
    return ", ".join(reasons)


def _lags(found: StudyOutcome) -> list[str]:
    behind = [arm for arm in found.role("arm") if arm.lags]
    level = [arm for arm in found.role("arm") if arm.lags is False]
    rule = f"more than {found.design.lag:g} standard errors"
    said = []
    if behind:
        gaps = [f"{arm.arm.name} (by {arm.gap.value:.3f})" for arm in behind if arm.gap]
        said.append(f"Below the baseline by {rule}: {', '.join(gaps)}.")
    if level:
        gaps = [f"{arm.arm.name} ({-arm.gap.value:+.3f})" for arm in level if arm.gap]
        said.append(f"Not below it by {rule}: {', '.join(gaps)}.")
    if found.common is None and said:
        said.append(
            "No healthy arm has two seeds, so these errors are of the evaluations alone and know "
            "nothing of how runs differ."
        )
    return said


def _controls(found: StudyOutcome) -> list[str]:
    said = []
    for arm in found.role("collapses"):
        if arm.measured and len(arm.collapsed) == len(arm.measured):
            said.append(f"The positive control {arm.arm.name} collapsed ({_why(arm)}).")
        elif arm.measured:
            said.append(
                f"The positive control {arm.arm.name} did not collapse in "
                f"{len(arm.measured) - len(arm.collapsed)} of {len(arm.measured)} runs."
            )
    flat = found.role("flat")
    if flat and found.flat is not None and not found.flat.moved:
        by = f"{found.flat.change:+.3f}, standard error {found.flat.error:.3f}"
        said.append(f"The negative control ({flat[0].arm.name}) stayed where it was ({by}).")
    return said


def _threshold(found: StudyOutcome) -> list[str]:
    if found.threshold is None:
        return ["No threshold can be given: no arm has a realised p05 and a final accuracy."]
    threshold, tolerance = found.threshold, found.design.tolerance
    inside = "inside" if threshold.holds(PUBLISHED) else "outside"
    said = (
        f"The gap comes within {tolerance:g} at a realised p05 (worst bin) {place(threshold)}; "
        f"interval over seeds {interval(threshold.low, threshold.high)}; the published "
        f"{PUBLISHED:g} lies {inside} it."
    )
    return [said]


def place(threshold: Threshold) -> str:
    """The threshold in words."""
    at = threshold.at
    if at.value == BELOW:
        return f"below {at.upper:.3f}, the lowest studied"
    if at.value == ABOVE:
        return f"above {at.lower:.3f}, the highest studied"
    return f"between {at.lower:.3f} (gap still larger) and {at.upper:.3f} (gap within)"


def interval(low: float, high: float) -> str:
    """Both ends; a round bracket is an open one."""
    words = {BELOW: "open below", ABOVE: "open above"}
    ends = [words.get(end, f"{end:.3f}") for end in (low, high)]
    left, right = ("[" if low > BELOW else "("), ("]" if high < ABOVE else ")")
    return f"{left}{ends[0]}, {ends[1]}{right}"


def _fixed(found: StudyOutcome, at: int) -> str:
    pair = found.fixed[at]
    if pair.accuracy is None:
        return f"{pair.schedule} and {pair.fixed} cannot be compared yet: a run is missing."
    by = f"{pair.accuracy.value:+.3f}, standard error {pair.accuracy.error:.3f}"
    what = f"the schedule {pair.schedule} against the fixed budget {pair.fixed} ({by})"
    if pair.better:
        return f"Scheduling was better: {what}."
    return f"Scheduling was worse: {what}." if pair.worse else f"No difference seen: {what}."


def _of(arm: ArmOutcome) -> str:
    return f"{len(arm.collapsed)} of {len(arm.measured)} runs"


def _seeds(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
