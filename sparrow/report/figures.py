"""Figures of surfaces and plans as files of their own: what calibrate and plan draw.

Each figure is a section: its charts are the panels, its title and sentence the words around them.
"""

import re
from collections.abc import Sequence
from statistics import median

import numpy as np

from sparrow.report.calibration import (
    ACCEPTANCE,
    LENGTH,
    budgets_of,
    cells_line,
    everything,
    kept_points,
    middle,
    variant_lines,
)
from sparrow.report.page import Axis, Bar, BarGroup, Bars, Chart, Line, Section, named_levels, ramp
from sparrow.schema.plan import PlanFile
from sparrow.schema.surface import LEAST_PROMPTS, Cell, Surface

MOST_PANELS, MOST_DENSITIES, MOST_LETTERS = 4, 5, 100
WHOLE = 0.999  # acceptance above this counts as whole; Beta distributions are of the rest


def surface_figures(surface: Surface) -> list[Section]:
    """Every figure that the data allow; those of one variant are named after it."""
    if not surface.cells:
        raise ValueError("the surface has no cells: nothing to draw")
    names = list(dict.fromkeys(cell.variant for cell in surface.cells))[:MOST_PANELS]
    found = [tails(surface, names), means(surface, names)]
    found += [budgets(surface, names)] if any(cell.budget for cell in surface.cells) else []
    found += [layers(surface)] if surface.layers else []
    for name in names:
        end = f"-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}" if len(names) > 1 else ""
        found.append(distribution(surface, name, f"distribution{end}"))
        line = telling_line(surface, name)
        found += [estimators(surface, line, f"estimators{end}")] if line else []
    return found


def _about(surface: Surface) -> str:
    """What was measured and how to read it."""
    prompts = max(cell.prompts for cell in surface.cells)
    how = "generated from" if surface.mode == "generated" else "given tokens of"
    source = surface.prompts[:MOST_LETTERS] + "…" * (len(surface.prompts) > MOST_LETTERS)
    few = f" Fewer than {LEAST_PROMPTS} prompts: the true intervals are wider."
    return (
        f"{surface.model}, {surface.dtype} on {surface.device}, {how} {source}, {prompts} prompts. "
        "Bars are 95 % intervals over prompts."
    ) + few * (prompts < LEAST_PROMPTS)


def tails(surface: Surface, names: Sequence[str]) -> Section:
    """p05 against length, a line per budget with its interval, a panel per variant."""
    panels = [_by_length(surface, name, "p05", f"tails-{i}") for i, name in enumerate(names)]
    title = "p05 of acceptance by length and tokens kept"
    return Section(key="tails", title=title, say=_about(surface), items=panels)


def means(surface: Surface, names: Sequence[str]) -> Section:
    """The mean beside p05, a row per variant: the mean hides what the tail shows."""
    panels = [
        _by_length(surface, name, field, f"means-{rank}-{field}")
        for rank, name in enumerate(names)
        for field in ("mean", "p05")
    ]
    mean, tail = (min(getattr(c, field) for c in surface.cells) for field in ("mean", "p05"))
    title = f"Where p05 falls to {tail:.2f}, the mean stays at {mean:.2f}"
    return Section(key="means", title=title, say=_about(surface), items=panels)


def _by_length(surface: Surface, variant: str, field: str, key: str) -> Chart:
    name = {"above": "share of tokens accepted whole"}.get(field, f"{field} of acceptance")
    y = Axis(name=name, high=1, form=".2f")
    lines, levels = variant_lines(surface, variant, field), named_levels(surface.targets)
    levels, title = levels if field == "p05" else [], f"{variant}: {name}"
    return Chart(key=key, title=title, x=LENGTH, y=y, lines=lines, levels=levels)


def budgets(surface: Surface, names: Sequence[str]) -> Section:
    """p05 against the budget, a line per bin of lengths: the needed budget is where it crosses."""
    panels, x = [], Axis(name="budget, kept tokens", form=".0f", log=True)
    levels = named_levels(surface.targets)
    for panel, variant in enumerate(names):
        own = [cell for cell in surface.cells if cell.variant == variant and cell.budget]
        bins = sorted({(cell.start, cell.stop) for cell in own})
        lines = []
        for rank, (start, stop) in enumerate(bins):
            points = sorted(
                (c.budget or 0, c.p05) for c in own if (c.start, c.stop) == (start, stop)
            )
            name, role = f"{start} to {stop}", ramp(rank, len(bins))
            lines.append(Line(name=name, points=points, role=role, shape="dots"))
        key = f"budgets-{panel}"
        panels.append(Chart(key=key, title=variant, x=x, y=ACCEPTANCE, lines=lines, levels=levels))
    title = "Where a line crosses the target is the budget that its lengths need"
    return Section(key="budgets", title=title, say=_about(surface), items=panels)


def layers(surface: Surface) -> Section:
    """Loss of the tail where only some layers are sparse, a group per variant and budget."""
    worst = min(surface.layers, key=lambda loss: loss.p05)
    groups: dict[str, list[Bar]] = {}
    for loss in surface.layers:
        name, role = layers_text(loss.layers), "sparse" if loss is worst else "quiet"
        bar = Bar(name=name, value=1 - loss.p05, role=role, interval=(1 - loss.high, 1 - loss.low))
        groups.setdefault(f"{loss.variant}, {loss.budget} kept tokens", []).append(bar)
    shown = [BarGroup(name=name, bars=bars) for name, bars in groups.items()][:MOST_PANELS]
    title = "Loss of the tail, 1 - p05 of acceptance"
    bars = Bars(key="layers-loss", title=title, unit="", groups=shown, form=".3f")
    title = f"The tail loses most in {layers_text(worst.layers)}: p05 {worst.p05:.2f}"
    say = f"One group of layers is sparse, all others are dense. {_about(surface)}"
    return Section(key="layers", title=title, say=say, items=[bars])


def layers_text(layers: Sequence[int]) -> str:
    """layer 3, layers 4-7, layers 0, 5, 9."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


def distribution(surface: Surface, variant: str, key: str) -> Section:
    """Share of tokens above 0.999 by length, and how the rest of the longest bin is spread."""
    least = min(cell.above for cell in surface.cells if cell.variant == variant)
    panels = [
        _by_length(surface, variant, "above", f"{key}-whole"),
        _densities(surface, variant, f"{key}-rest"),
    ]
    title = f"At least {least:.0%} of tokens are accepted whole; the rest makes the tail"
    say = (
        f"{variant}. Whole: acceptance above {WHOLE}. Densities: Beta distributions fitted to the "
        f"other tokens; KS is the largest distance between fit and tokens. {_about(surface)}"
    )
    return Section(key=key, title=title, say=say, items=panels)


def _densities(surface: Surface, variant: str, key: str) -> Chart:
    """Fitted densities of a few budgets in the longest bin that has most of them."""
    from scipy.stats import beta  # takes a while to import

    fitted = [cell for cell in surface.cells if cell.variant == variant and cell.beta]
    starts = [cell.start for cell in fitted]
    start = max(starts, key=lambda start: (starts.count(start), start), default=0)
    cells = sorted((c for c in fitted if c.start == start), key=lambda c: c.budget or 2**31)
    picks = np.linspace(0, len(cells) - 1, min(MOST_DENSITIES, len(cells))).round().astype(int)
    x = np.linspace(0.002, WHOLE - 0.002, 200)
    lines, top = [], 1.0
    for rank, cell in enumerate(cells[pick] for pick in picks):
        a, b, distance = cell.beta
        density = beta.pdf(x / WHOLE, a, b) / WHOLE
        top = max(top, float(density[x < 0.97].max()))
        points = list(zip(x.tolist(), density.tolist(), strict=True))
        name, role = f"{cell.budget or 'schedule'}, KS {distance:.3f}", ramp(rank, len(picks))
        lines.append(Line(name=name, points=points, role=role))
    token = Axis(name="acceptance of a token", low=0, high=1, form=".1f")
    y = Axis(name="density", low=0, high=1.08 * top, form=".1f")
    title = f"The other tokens, at lengths from {start} on"
    return Chart(key=key, title=title, x=token, y=y, lines=lines)


def telling_line(surface: Surface, variant: str) -> list[Cell]:
    """Cells with estimators of the budget whose p05 is nearest to the first target, by length."""
    own = [c for c in surface.cells if c.variant == variant and c.estimators is not None]
    lines = [[cell for cell in own if cell.budget == budget] for budget in budgets_of(own)]
    near = [abs(median(cell.p05 for cell in line) - surface.targets[0]) for line in lines]
    return sorted(lines[near.index(min(near))], key=middle) if lines else []


def estimators(surface: Surface, line: Sequence[Cell], key: str) -> Section:
    """Exact p05 beside its cheap estimates, for one budget; and how wrong they are."""
    known = [(cell, cell.estimators) for cell in line if cell.estimators is not None]
    top_k = known[0][1].top_k
    named = (
        (f"top-{top_k} upper", "upper_p05", "run-2"),
        (f"top-{top_k} lower", "lower_p05", "run-0"),
        ("sampled ratio", "ratio_p05", "sparse"),
    )
    estimates, errors = [cells_line(line, "p05", "exact p05", "dense")], []
    for name, field, role in named:
        found = [(cell, getattr(cheap, field)) for cell, cheap in known]
        points = [(middle(cell), value) for cell, value in found if value is not None]
        wrong = [(middle(cell), value - cell.p05) for cell, value in found if value is not None]
        if points:
            estimates.append(Line(name=name, points=points, role=role, shape="dots"))
            errors.append(Line(name=name, points=wrong, role=role, shape="dots"))
    gap = max(cheap.upper_p05 - cheap.lower_p05 for _, cheap in known)
    title = f"Bounds from the top {top_k} log-probs leave p05 open by up to {gap:.2f}"
    kept = "a schedule" if line[0].budget is None else f"{line[0].budget} kept tokens"
    say = (
        f"{line[0].variant}, {kept}. The sampled ratio min(1, p/q) has the mean of acceptance, "
        f"not its quantiles. {_about(surface)}"
    )
    levels, y = named_levels(surface.targets), Axis(name="estimate less exact p05", form=".2f")
    panels = [
        Chart(
            key=f"{key}-p05", title="p05", x=LENGTH, y=ACCEPTANCE, lines=estimates, levels=levels
        ),
        Chart(key=f"{key}-errors", title="How wrong estimates are", x=LENGTH, y=y, lines=errors),
    ]
    return Section(key=key, title=title, say=say, items=panels)


def plan_figures(plan: PlanFile) -> list[Section]:
    """The schedule with the tail it keeps, and what it costs."""
    if not plan.bins:
        raise ValueError("the plan has no bins: nothing to draw")
    return [schedule(plan), cost(plan)]


def schedule(plan: PlanFile) -> Section:
    """Budgets over length, with other targets and a preset; beside them, the tail they keep."""
    sparse = [bin.budget for bin in plan.bins if bin.budget is not None]
    title = f"No measured budget keeps p05 at {plan.target:g}: every length stays dense"
    if sparse:
        kept = f"{min(sparse)} to {max(sparse)}" if len(set(sparse)) > 1 else str(sparse[0])
        below = sum(bin.p05 is not None and bin.p05 < plan.target for bin in plan.bins)
        holds = f"; p05 is below it in {below} of {len(plan.bins)} bins" if below else ""
        title = f"{kept} kept tokens for p05 at {plan.target:g} or above{holds}"
    by = "the lower end of the interval" if plan.by == "low" else "the measured p05"
    say = f"{_whose(plan)}. Budgets are the smallest with {by} at the target; bars are intervals."
    return Section(key="schedule", title=title, say=say, items=[_kept(plan), _expected(plan)])


def _whose(plan: PlanFile) -> str:
    return ", ".join(filter(None, (plan.model, plan.variant, plan.hardware, plan.workload)))


def _stops(plan: PlanFile) -> dict[int, int]:
    """Where bins end, by start; a last one without an end is as wide as the one before."""
    starts = [bin.start for bin in plan.bins]
    wide = starts[-1] - starts[-2] if len(starts) > 1 else max(1000, starts[-1])
    return {bin.start: bin.stop or bin.start + wide for bin in plan.bins}


def _kept(plan: PlanFile) -> Chart:
    starts, end = [bin.start for bin in plan.bins], max(_stops(plan).values())
    own: Sequence[int | None] = [bin.budget for bin in plan.bins]
    drawn = [(f"target {plan.target:g}", "run-0", starts, own)]
    for other in plan.sensitivity:
        if other.reached and other.target != plan.target:
            role = "run-2" if other.target > plan.target else "run-1"
            drawn.append((_aside(plan, other.target, other.variant), role, starts, other.budgets))
    if plan.compare is not None:
        begins = [start for start in plan.compare.starts if start < end]
        drawn.append((plan.compare.name, "run-4", begins, plan.compare.budgets[: len(begins)]))
    lines = [
        Line(name=name, points=kept_points(begins, kept, end), role=role)
        for name, role, begins, kept in drawn
    ]
    known = [budget for *_, kept in drawn for budget in kept if budget is not None]
    y = Axis(name="kept tokens", low=0, high=1.15 * max(known, default=end), form=".0f")
    lines.append(everything(end, "all kept"))
    return Chart(key="schedule-kept", title="Budget by length", x=LENGTH, y=y, lines=lines)


def _aside(plan: PlanFile, target: float, variant: str | None) -> str:
    """A target beside the plan's, with the variant where that is another."""
    other = f", {variant}" if variant not in (None, plan.variant) else ""
    return f"target {target:g}{other}"


def _expected(plan: PlanFile) -> Chart:
    """p05 that the plan expects in each bin, and what a check run measured."""
    stops, lines = _stops(plan), []
    for name, bins, role in (("expected", plan.bins, "run-0"), ("check run", plan.check, "sparse")):
        known = [
            ((bin.start + stops.get(bin.start, bin.start)) / 2, bin.p05, bin.low, bin.high)
            for bin in bins or ()
            if bin.p05 is not None and bin.low is not None and bin.high is not None
        ]
        points, spans = [(x, p05) for x, p05, *_ in known], [(x, a, b) for x, _, a, b in known]
        if known:
            lines.append(Line(name=name, points=points, spans=spans, role=role, shape="dots"))
    key, title, levels = "schedule-p05", "p05 that it keeps", named_levels([plan.target])
    return Chart(key=key, title=title, x=LENGTH, y=ACCEPTANCE, lines=lines, levels=levels)


def cost(plan: PlanFile) -> Section:
    """Seconds by length, dense against sparse, and the speed-up as three models see it."""
    lines, totals = [], {}
    for role, field in (("dense", "dense_seconds"), ("sparse", "seconds")):
        stops = _stops(plan)
        points = [((bin.start + stops[bin.start]) / 2, getattr(bin, field)) for bin in plan.bins]
        lines.append(Line(name=role, points=points, role=role, shape="dots"))
        totals[role] = sum(seconds for _, seconds in points)
    y, at = Axis(name="seconds of the rollout", low=0, form=".3g"), "Time spent at each length"
    speed, group = "Speed-up of the whole rollout over dense", BarGroup(name="", bars=_speeds(plan))
    panels: list[Chart | Bars] = [
        Chart(key="cost-seconds", title=at, x=LENGTH, y=y, lines=lines),
        Bars(key="cost-speed-up", title=speed, unit="x", form=".2f", groups=[group]),
    ]
    title = (
        f"The rollout takes {totals['sparse']:.3g} s instead of {totals['dense']:.3g} s, "
        f"{plan.speed_up:.2f}x; bytes alone would allow {plan.limit:.2f}x"
    )
    say = f"{_whose(plan)}. Predicted. Bytes alone: memory traffic at full bandwidth, nothing else."
    return Section(key="cost", title=title, say=say, items=panels)


def _speeds(plan: PlanFile) -> list[Bar]:
    """The plan, its neighbours, and other models of its cost."""
    rows = [(f"this plan, target {plan.target:g}", plan.speed_up, "sparse")]
    for other in plan.sensitivity:
        if other.speed_up is not None and other.target != plan.target:
            rows.append((_aside(plan, other.target, other.variant), other.speed_up, "run-0"))
    if plan.compare is not None:
        rows.append((plan.compare.name, plan.compare.speed_up, "run-4"))
    rows += [("bytes alone", plan.limit, "quiet"), ("the paper's eFLOPs", plan.eflops, "quiet")]
    return [Bar(name=name, value=value, role=role) for name, value, role in rows]
