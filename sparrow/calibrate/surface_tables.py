"""Surfaces for a terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from sparrow.schema.surface import Cell, LayerLoss, Surface, reach

GOOD, DOUBTFUL, BAD = "green", "yellow", "red"


def tails(surface: Surface, variant: str) -> Table:
    """p05 and its interval by budget and length; green: surely at the target, red: surely not."""
    target = surface.targets[0]
    table = Table("tokens kept", title=f"{variant}: p05 of acceptance by total length")
    starts = sorted({cell.start for cell in surface.cells if cell.variant == variant})
    stops = {cell.start: cell.stop for cell in surface.cells}
    for start in starts:
        table.add_column(f"{start} to {stops[start]}", justify="right")
    budgets = sorted({c.budget for c in surface.cells if c.variant == variant and c.budget})
    for budget in budgets:
        table.add_row(str(budget), *_row(surface.of(variant, budget), starts, target))
    floor = [cell for cell in surface.floor if cell.start in starts]
    table.add_row("dense (floor)", *_row(floor, starts, None), style="dim")
    table.caption = (
        f"{surface.model}, {surface.dtype} on {surface.device}; {surface.prompts}; 95 % intervals "
        f"over prompts; target {target}"
    )
    return table


def details(surface: Surface, variant: str) -> Table:
    """Of every budget, what the cheap estimators would have said, at the longest lengths known."""
    table = Table("tokens kept", title=f"{variant}: exact and cheap, at the longest lengths")
    headings = ("lengths", "mean", "p05", "top-K says", "sampled: mean", "its p05", "over 0.999")
    for heading in (*headings, "Beta: KS", "p05, uncertain tokens"):
        table.add_column(heading, justify="right")
    for budget in sorted({c.budget for c in surface.cells if c.variant == variant and c.budget}):
        known = [cell for cell in surface.of(variant, budget) if cell.prompts > 1]
        if known:
            table.add_row(str(budget), *_details(known[-1]))
    table.caption = (
        "top-K: bounds of p05 from the most likely tokens of both sides; sampled: min(1, p/q) of "
        "the token drawn, whose mean is that of acceptance and whose p05 is not; uncertain: dense "
        "entropy over 0.1 nats"
    )
    return table


def _details(cell: Cell) -> list[str]:
    cheap = cell.estimators
    assert cheap is not None
    drawn = "-" if cheap.ratio_mean is None else f"{cheap.ratio_mean:.4f}"
    error = "" if cheap.ratio_error is None else f" ± {cheap.ratio_error:.4f}"
    return [
        f"{cell.start} to {cell.stop}",
        f"{cell.mean:.4f}",
        f"{cell.p05:.3f}",
        f"{cheap.lower_p05:.3f} {cheap.upper_p05:.3f}",
        drawn + error,
        "-" if cheap.ratio_p05 is None else f"{cheap.ratio_p05:.3f}",
        f"{cell.above:.1%}",
        f"{cell.beta[2]:.3f}" if cell.beta else "-",
        "-" if cell.uncertain_p05 is None else f"{cell.uncertain_p05:.3f}",
    ]


def _row(cells: Sequence[Cell], starts: Sequence[int], target: float | None) -> list[Text]:
    by_start = {cell.start: cell for cell in cells}
    return [_tail(by_start[start], target) if start in by_start else Text("-") for start in starts]


def _tail(cell: Cell, target: float | None) -> Text:
    style = "" if target is None else verdict(cell, target)[1]
    text = Text(f"{cell.p05:.3f}\n", style=style)
    return text.append(f"{cell.low:.3f} {cell.high:.3f}", style="dim")


def verdict(cell: Cell, target: float) -> tuple[str, str]:
    """What a cell says about a target, and in which colour."""
    if cell.low >= target:
        return "holds", GOOD
    if cell.high >= target:
        return "within the interval", DOUBTFUL
    return "below", BAD


def layers(losses: Sequence[LayerLoss], shares: Sequence[float] = ()) -> Table:
    """What each group of layers loses where it alone is sparse."""
    table = Table("sparse alone", title=f"layers, {losses[0].budget} tokens kept")
    for heading in ("p05", "95 % interval", "mean", "share of the budget"):
        table.add_column(heading, justify="right")
    for each in losses:
        name = f"layers {each.layers[0]} to {each.layers[-1]}"
        name = name if len(each.layers) > 1 else f"layer {each.layers[0]}"
        share = f"{shares[each.layers[0]]:.2f}" if shares else "-"
        table.add_row(
            name, f"{each.p05:.3f}", f"{each.low:.3f} {each.high:.3f}", f"{each.mean:.4f}", share
        )
    return table


def checked(surface: Surface, target: float) -> Table:
    """A check run: what a schedule reaches, bin by bin."""
    table = Table("total length", title=f"{surface.variants[0].name}: check at target {target}")
    headings = ("p05", "95 % interval", "mean", "prompts", "reach it", "dense", "floor", "verdict")
    for heading in headings:
        table.add_column(heading, justify="right")
    floor = {cell.start: f"{cell.p05:.3f}" for cell in surface.floor}
    own, dense = reach(surface.cells), reach(surface.floor)
    for cell in surface.cells:
        said, style = verdict(cell, target)
        table.add_row(
            f"{cell.start} to {cell.stop}",
            f"{cell.p05:.3f}",
            f"{cell.low:.3f} {cell.high:.3f}",
            f"{cell.mean:.4f}",
            str(cell.prompts),
            f"{own[cell.start]:.0%}",
            f"{dense[cell.start]:.0%}" if cell.start in dense else "-",
            floor.get(cell.start, "-"),
            Text(said, style=style),
        )
    return table
