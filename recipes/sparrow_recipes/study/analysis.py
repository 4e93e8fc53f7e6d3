"""The analysis of a study as its design fixed it: arms against arms, predictions, indicators.

Differences are of final shares (mean of a run's last evaluations), the first arm less the second,
with Welch's interval over runs. Where dense answers of either arm are cut off more often than the
design allows, a comparison measures the token limit and gives no other verdict.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from sparrow.schema.base import Record
from sparrow_recipes.study.comparing import FinalAccuracies, Interval, interval_around, sample
from sparrow_recipes.study.config import AnalysisConfig, PredictionConfig
from sparrow_recipes.study.files import StudyDesign, StudyFolder
from sparrow_recipes.study.judging import CellOutcome
from sparrow_recipes.study.leading import Indicator, RunAlarms, indicators, run_alarms
from sparrow_recipes.study.power import Power, power

Verdict = Literal[
    "no result", "cut off not measured", "the limit again", "non-inferior", "inferior",
    "undecided", "higher", "lower", "open",
]  # fmt: skip
NOT_COUNTED = ("no result", "cut off not measured", "the limit again")
SHARES = {"right": "final", "cut_off": "cut_off", "wrong": "wrong"}  # fields of a cell's outcome


class Share(Record):
    """The difference of a share, with its interval where both arms have two runs."""

    value: float
    interval: Interval | None


class Comparison(Record):
    """One arm less another. cut_off_share: the larger of the two."""

    arm: str
    reference: str
    runs: tuple[int, int]
    right: Share | None
    cut_off: Share | None
    wrong: Share | None
    cut_off_share: float | None
    verdict: Verdict


class Analysis(Record):
    """The results of the analysis.

    hypotheses: by name, whether each prediction holds; None: not decided.
    """

    power: tuple[Power, ...]
    comparisons: tuple[Comparison, ...]
    hypotheses: Mapping[str, Mapping[str, bool | None]]
    alarms: tuple[RunAlarms, ...]
    indicators: tuple[Indicator, ...]


def planned_power(
    config: AnalysisConfig, margin: float, seeds: Mapping[str, int]
) -> tuple[Power, ...]:
    """The power of comparisons at every assumed standard deviation; seeds: by arm."""
    options = {"margin": margin, "confidence": config.confidence}
    alike: dict[tuple[int, int], list[str]] = defaultdict(list)
    for arm, other in config.pairs:
        alike[seeds[arm], seeds[other]].append(f"{arm} less {other}")
    return tuple(
        power(tuple(pairs), counts, sd, **options)
        for counts, pairs in alike.items()
        for sd in config.sd
    )


def analyse(study: StudyFolder, cells: Mapping[str, Sequence[CellOutcome]]) -> Analysis | None:
    """Analyse the runs so far, by arm; None if the design has no analysis."""
    design, config = study.design, study.design.analysis
    if config is None:
        return None
    compared = {pair: compare(pair, cells, design) for pair in config.pairs}
    alarms = {
        name: [run_alarms(cell) for cell in runs if cell.end is not None]
        for name, runs in study.cells.items()
    }
    fell = {name: [run.fell is not None for run in runs] for name, runs in alarms.items()}
    hypotheses: dict[str, dict[str, bool | None]] = defaultdict(dict)
    for prediction in config.predictions:
        hypotheses[prediction.hypothesis] |= check(prediction, compared, fell, design.tolerance)
    runs = [run for arm in alarms.values() for run in arm]
    seeds = {arm.name: len(arm.seeds) for arm in design.arms}
    return Analysis(
        power=planned_power(config, design.tolerance, seeds),
        comparisons=tuple(compared.values()),
        hypotheses=hypotheses,
        alarms=tuple(runs),
        indicators=tuple(indicators(runs)),
    )


def compare(
    pair: tuple[str, str], cells: Mapping[str, Sequence[CellOutcome]], design: StudyDesign
) -> Comparison:
    """Compare the first arm with the second; the primary pair is tested for non-inferiority."""
    arms = [cells[name] for name in pair]
    assert design.analysis is not None
    confidence = design.analysis.confidence
    shares = {
        name: _difference([_sample(arm, field) for arm in arms], confidence)
        for name, field in SHARES.items()
    }
    finals, cut_off = ([_sample(arm, field) for arm in arms] for field in ("final", "cut_off"))
    known = [part.mean for part in cut_off if part is not None]
    most = max(known) if len(known) == len(arms) else None
    return Comparison(
        arm=pair[0],
        reference=pair[1],
        runs=(_runs(finals[0]), _runs(finals[1])),
        **shares,
        cut_off_share=most,
        verdict=_verdict(shares["right"], most, design, primary=pair == design.analysis.primary),
    )


def _sample(cells: Sequence[CellOutcome], field: str) -> FinalAccuracies | None:
    values = {cell.seed: getattr(cell, field) for cell in cells}
    known = {seed: value for seed, value in values.items() if value is not None}
    return sample(known, 1) if known else None


def _runs(finals: FinalAccuracies | None) -> int:
    return 0 if finals is None else len(finals.finals)


def _difference(samples: Sequence[FinalAccuracies | None], confidence: float) -> Share | None:
    first, second = samples
    if first is None or second is None:
        return None
    value = first.mean - second.mean
    interval = interval_around(value, first, second, confidence=confidence)
    return Share(value=value, interval=interval)


def _verdict(
    right: Share | None, cut_off: float | None, design: StudyDesign, *, primary: bool
) -> Verdict:
    if right is None or right.interval is None:
        return "no result"
    if design.cut_off is not None and (primary or not design.allow_cut_off):
        if cut_off is None:
            return "cut off not measured"
        if cut_off >= design.cut_off:
            return "the limit again"
    (low, high), margin = right.interval, design.tolerance
    if primary:
        return "non-inferior" if low > -margin else "inferior" if high < -margin else "undecided"
    return "higher" if low > 0 else "lower" if high < 0 else "open"


def check(
    prediction: PredictionConfig,
    compared: Mapping[tuple[str, str], Comparison],
    fell: Mapping[str, Sequence[bool]],
    margin: float,
) -> dict[str, bool | None]:
    """Whether each part of a prediction holds; None: not decided."""
    parts: dict[str, bool | None] = {}
    if prediction.compare is not None:
        pair = compared[prediction.compare]
        said = f"{pair.arm} less {pair.reference}: {prediction.right}"
        counts = pair.verdict not in NOT_COUNTED
        parts[said] = _holds(pair.right, prediction.right, margin) if counts else None
    for arm, (least, most) in prediction.fell.items():
        runs = fell[arm]
        share = sum(runs) / len(runs) if runs else None
        said = f"{arm}: {least:.0%} to {most:.0%} of the runs fall"
        parts[said] = None if share is None else least <= share <= most
    return parts


def _holds(right: Share | None, expected: str | None, margin: float) -> bool | None:
    """Whether an interval is where it was predicted; None: it lies on both sides."""
    if right is None or right.interval is None:
        return None
    low, high = right.interval
    if expected == "open":
        return low <= 0 <= high
    sign, bound = (-1, 0.0) if expected == "lower" else (1, 0.0)
    if expected == "non-inferior":
        bound = -margin
    ends = sorted((sign * low, sign * high))
    return True if ends[0] > bound else False if ends[1] < bound else None
