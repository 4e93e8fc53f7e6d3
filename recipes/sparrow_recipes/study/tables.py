"""Tables of a study's page, with the texts of page.toml: how they are made, and the analysis."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sparrow.reporting.page import Item, Table
from sparrow_recipes.study.analysis import Analysis, Comparison, Share
from sparrow_recipes.study.comparing import Interval
from sparrow_recipes.study.files import StartAnswers
from sparrow_recipes.study.judging import BinTail
from sparrow_recipes.study.leading import RunAlarms
from sparrow_recipes.study.outcome import StudyResults

DASH = "\N{EN DASH}"  # for values that were not measured
TEXTS = tomllib.loads(Path(__file__).with_name("page.toml").read_text(encoding="utf-8"))


def text_table(key: str, rows: Iterable[Sequence[str]], title: str = "", **values: object) -> Table:
    columns = TEXTS[key]["head"].format(**values).split("|")
    return Table(key=f"{key}-table", title=title, columns=columns, rows=list(rows))


def number(value: float | None, form: str = ".3f") -> str:
    return DASH if value is None else f"{value:{form}}"


def numbers(item: Any, paths: str) -> Iterator[str]:
    """Format the values at dotted paths such as "final rollout.kept:.0f" (default: .3f).

    A dash stands for None.
    """
    for path in paths.split():
        names, _, form = path.partition(":")
        value = item
        for name in names.split("."):
            if value is not None:
                value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        yield number(value, form or ".3f")


def with_interval(value: float | None, interval: Interval | None) -> str:
    return number(value, "+.3f") + (" [{:+.3f}, {:+.3f}]".format(*interval) if interval else "")


def analysis_tables(results: StudyResults) -> dict[str, Sequence[Item]]:
    """The start, and the sections of a study's analysis."""
    start, analysis = results.start, results.analysis
    items: dict[str, Sequence[Item]] = {}
    if start is not None:
        items["start"] = [text_table("start", [_start_row(start)])]
    if analysis is None:
        return items
    items |= {"power": [power(analysis)], "comparisons": [comparisons(analysis)]}
    items["predictions"] = [predictions(analysis)] if analysis.hypotheses else []
    return {**items, "leading": leading(analysis)}


def _start_row(start: StartAnswers) -> list[str]:
    return [start.model, *numbers(start, "answers:d right cut_off wrong")]


def power(analysis: Analysis) -> Table:
    paths = "sd:.2f half non_inferior:.2f detectable"
    rows = (
        [", ".join(power.comparisons), "{} / {}".format(*power.seeds), *numbers(power, paths)]
        for power in analysis.power
    )
    return text_table("power", rows)


def comparisons(analysis: Analysis) -> Table:
    """Differences in right, cut off and wrong, with the verdict."""
    return text_table("comparisons", map(_comparison_row, analysis.comparisons))


def _comparison_row(pair: Comparison) -> list[str]:
    def shown(share: Share | None) -> str:
        return DASH if share is None else with_interval(share.value, share.interval)

    return [
        f"{pair.arm} less {pair.reference}",
        "{} / {}".format(*pair.runs),
        *map(shown, (pair.right, pair.cut_off, pair.wrong)),
        number(pair.cut_off_share),
        pair.verdict,
    ]


def predictions(analysis: Analysis) -> Table:
    shown = {True: "holds", False: "does not hold", None: "not decided"}
    rows = [
        (name, prediction, shown[holds])
        for name, parts in analysis.hypotheses.items()
        for prediction, holds in parts.items()
    ]
    return text_table("predictions", rows)


def leading(analysis: Analysis) -> list[Item]:
    """Indicators over all runs, and the alarms of every run."""
    paths = "fallen:d leads:d follows:d first:d p others:d false:d missing:d"
    verdict = {True: "leads", False: "no", None: DASH}
    rows = ([i.name, *numbers(i, paths), verdict[i.leading]] for i in analysis.indicators)
    names = [indicator.name for indicator in analysis.indicators]

    def alarm(run: RunAlarms, name: str) -> str:
        at = run.alarms.get(name)
        return "never" if at is None and name in run.alarms else number(at, "d")

    runs = [
        [run.cell, "never" if run.fell is None else str(run.fell), *(alarm(run, n) for n in names)]
        for run in analysis.alarms
    ]
    alarms = text_table("alarms", runs, TEXTS["alarms"]["title"], names="|".join(names))
    return [text_table("leading", rows), alarms]


def survivors(results: StudyResults) -> list[Item]:
    """p05 by bin of lengths with the share of watched answers that reach it, mean of the seeds."""
    tails = {arm.name: [c.worst.bins for c in arm.cells if c.worst] for arm in results.arms}
    starts = sorted({start for arm in tails.values() for bins in arm for start in bins})
    counted = any(t.survivors is not None for a in tails.values() for b in a for t in b.values())
    if not counted:
        return []

    def shown(bins: Sequence[Mapping[int, BinTail]], start: int) -> str:
        having = [part[start] for part in bins if start in part]
        reached = [tail.survivors for tail in having if tail.survivors is not None]
        if not reached:
            return DASH
        return f"{fmean(tail.p05 for tail in having):.3f} ({sum(reached) / len(bins):.0%})"

    rows = ([name, *(shown(bins, start) for start in starts)] for name, bins in tails.items())
    return [text_table("survivors", rows, starts="|".join(map(str, starts)))]
