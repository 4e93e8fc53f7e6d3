"""Tables for a terminal: a row for each record, columns named as in the JSON."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from sparrow.schema.campaign import LAST_BASELINE, Campaign
from sparrow.schema.distill import DistillResult
from sparrow.schema.evaluation import Estimate
from sparrow.schema.flow import FlowCheck, FlowScores
from sparrow.schema.plan import PlanFile
from sparrow.schema.surface import Cell, DraftCell, LayerLoss, Surface, reach

GOOD, DOUBTFUL, BAD = "green", "yellow", "red"
MOST_BINS = 9  # side by side in 80 columns


def figures(
    title: str | Text,
    rows: Iterable[Any],
    fields: str,
    *,
    group: str | None = None,
    caption: str | None = None,
    **shown: Callable[[Any], object],
) -> Table:
    """Make a table of records or mappings; `fields` are their names, separated by spaces.

    shown: how some of them are made from a row. group: the field that sets rows apart.
    """
    names, rows = fields.split(), list(rows)
    values = [[shown[n](row) if n in shown else _field(row, n) for n in names] for row in rows]
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for place, name in enumerate(names):
        column = [row_values[place] for row_values in values]
        texts = all(isinstance(value, str | Text) for value in column)
        # Headings break at spaces, texts anywhere, figures nowhere.
        width = 0 if texts else max((len(_text(value)) for value in column), default=0)
        side: JustifyMethod = "left" if texts else "right"
        table.add_column(name.replace("_", " "), justify=side, min_width=width, overflow="fold")
    for number, row_values in enumerate(values):
        if group and number and _field(rows[number - 1], group) != _field(rows[number], group):
            table.add_section()
        table.add_row(*map(_text, row_values))
    return table


def summary(title: str, values: Mapping[str, object], caption: str | None = None) -> Table:
    """Make a table of names and values."""
    rows = [{"name": name, "value": value} for name, value in values.items()]
    return figures(title, rows, "name value", caption=caption)


def _field(row: Any, name: str) -> Any:
    return row[name] if isinstance(row, Mapping) else getattr(row, name)


def _text(value: object) -> str | Text:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(part)}" for key, part in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(str, map(_text, value)))
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    return value if isinstance(value, Text) else str(value)


def _kept(row: Any) -> str:
    return "all" if row.budget is None else str(row.budget)


# Surfaces.


def tails_tables(surface: Surface, variant: str) -> list[Table]:
    """p05 and its interval by budget and length; green: surely at the target, red: surely not."""
    target = surface.targets[0]
    title = f"{variant}: p05 of acceptance by total length"
    return _by_length(surface, variant, title, f"target {target}", lambda c: _tail(c, target))


def distill_tables(result: DistillResult) -> list[Table]:
    """Acceptance on held-out prompts by budget and length, before and after; then the looks."""

    def estimate(value: float | None, low: float | None, high: float | None) -> str:
        if value is None:
            return "-"
        places = 1 if max(value, high or 0) >= 10 else 3
        shown = [f"{x:.{places}f}" for x in (value, low, high) if x is not None]
        return shown[0] if low is None else f"{shown[0]} [{shown[1]}, {shown[2]}]"

    rows = []
    for arm in result.arms:
        after = {(cell.start, cell.stop): cell for cell in arm.after}
        for cell in arm.before:
            if (other := after.get((cell.start, cell.stop))) is None:
                continue
            rows.append(
                {
                    "kept": "schedule" if arm.budget is None else str(arm.budget),
                    "length": f"{cell.start} to {cell.stop}",
                    "when": "before\nafter",
                    "prompts": f"{cell.prompts}\n{other.prompts}",
                    "mean": f"{cell.mean:.4f}\n{other.mean:.4f}",
                    "p05": "\n".join(estimate(c.p05, c.low, c.high) for c in (cell, other)),
                    "hard_misses": "\n".join(
                        "-" if m is None else estimate(m.value, m.low, m.high)
                        for m in (cell.hard_misses, other.hard_misses)
                    ),
                }
            )
        for one, two in zip(arm.drafts_before, arm.drafts_after, strict=False):
            ends = [estimate(*dict(c.accepted).values()) for c in (one, two)]
            rows.append(
                {
                    "kept": "schedule" if arm.budget is None else str(arm.budget),
                    "length": f"accepted of {one.draft_tokens} drafts",
                    "when": "before\nafter",
                    "prompts": f"{one.prompts}\n{two.prompts}",
                    "mean": "\n".join(ends),
                    "p05": "",
                    "hard_misses": "",
                }
            )
    about = f"{result.prompts}; {result.held_out} held-out prompts, 95 % intervals over them"
    title = f"{result.model}: acceptance before and after distillation"
    before = figures(
        title, rows, "kept length when prompts mean p05 hard_misses", group="kept", caption=about
    )
    steps = figures(
        f"held-out acceptance while fitting (step {result.best} was taken)",
        result.looks,
        "step loss p05 low high mean hard_misses",
    )
    return [steps, before]


def misses_tables(surface: Surface, variant: str) -> list[Table]:
    """Hard misses and their interval by budget and length; none in older surfaces."""
    if not any(cell.hard_misses for cell in surface.cells):
        return []
    title = f"{variant}: hard misses per 1000 tokens by total length"
    about = "dense entropy under 0.1 nats and acceptance under 0.5"
    return _by_length(surface, variant, title, about, _misses)


def _by_length(
    surface: Surface, variant: str, title: str, about: str, show: Callable[[Cell], Text | str]
) -> list[Table]:
    """Figures of cells by budget and length; as many tables as fit their bins into 80 columns."""
    budgets = surface.kept(variant)
    arms: dict[str, Sequence[Cell]] = {str(kept): surface.of(variant, kept) for kept in budgets}
    bins = sorted({(cell.start, cell.stop) for cells in arms.values() for cell in cells})
    names = {start: f"{start}_to_{stop}" for start, stop in bins}
    none: dict[str, Text | str] = dict.fromkeys(names.values(), "-")
    rows = [
        none
        | {"budget": name}
        | {names[cell.start]: show(cell) for cell in cells if cell.start in names}
        for name, cells in (arms | {"dense (floor)": surface.floor}).items()
    ]
    caption = (
        f"{surface.model}, {surface.dtype} on {surface.device}; {surface.prompts}; "
        f"95 % intervals over prompts; {about}"
    )
    parts = _parts([*names.values()], MOST_BINS)
    return [figures(title, rows, " ".join(["budget", *part]), caption=caption) for part in parts]


def _parts(names: list[str], most: int) -> list[list[str]]:
    """The names in as few parts as possible, of about equal size and at most so many."""
    size = -(-len(names) // max(1, -(-len(names) // most))) or 1
    return [names[first : first + size] for first in range(0, len(names), size)]


def _tail(cell: Cell, target: float) -> Text:
    text = Text(f"{cell.p05:.3f}\n", style=verdict(cell, target)[1])
    return text.append(f"{cell.low:.3f}\n{cell.high:.3f}", style="dim")


def _misses(cell: Cell) -> Text | str:
    if (found := cell.hard_misses) is None:
        return "-"
    return Text(f"{found.value:.4g}\n").append(f"{found.low:.4g}\n{found.high:.4g}", style="dim")


def verdict(cell: Cell, target: float) -> tuple[str, str]:
    """Return whether a cell reaches a target, and a colour."""
    if cell.low >= target:
        return "holds", GOOD
    if cell.high >= target:
        return "within the interval", DOUBTFUL
    return "below", BAD


def layers_table(losses: Sequence[LayerLoss], shares: Sequence[float] = ()) -> Table:
    """p05 where only one group of layers is sparse, and the group's share of the budget."""
    return figures(
        f"layers sparse alone, {losses[0].budget} tokens kept",
        losses,
        "layers p05 low high mean share",
        layers=lambda loss: f"{loss.layers[0]} to {loss.layers[-1]}",
        share=lambda loss: shares[loss.layers[0]] if shares else None,
    )


def drafts_table(drafts: Sequence[DraftCell]) -> Table:
    """Accepted drafts of a round, and acceptance by position in it."""
    most = max(cell.draft_tokens for cell in drafts)
    shown = [number for number in (1, 2, 4, 8, 16, 32, 64) if number <= most]
    columns: dict[str, Any] = {f"draft_{number}": partial(_draft, number) for number in shown}
    return figures(
        f"Drafts of exact decoding: accepted of {most} a round, acceptance by position",
        drafts,
        " ".join(["variant", "budget", "reselect", "prompts", "accepted", *columns]),
        accepted=_accepted,
        **columns,
    )


def _draft(number: int, cell: DraftCell) -> str:
    return f"{cell.acceptance[number - 1].value:.3f}"


def _accepted(cell: DraftCell) -> str:
    mean, low, high = cell.accepted.value, cell.accepted.low, cell.accepted.high
    return f"{mean:.2f}" if low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def check_table(surface: Surface, target: float) -> Table:
    """A check run by bin: p05 of a schedule, and the share of prompts that reach the bin."""
    floor = {cell.start: cell.p05 for cell in surface.floor}
    sparse, dense = reach(surface.cells), reach(surface.floor)
    return figures(
        f"{surface.variants[0].name}: check at target {target}",
        surface.cells,
        "start stop p05 low high misses prompts reach dense_reach floor verdict",
        misses=lambda cell: None if cell.hard_misses is None else cell.hard_misses.value,
        reach=lambda cell: sparse[cell.start],
        dense_reach=lambda cell: dense.get(cell.start),
        floor=lambda cell: floor.get(cell.start),
        verdict=lambda cell: Text(*verdict(cell, target)),
    )


# Plans.


def plan_tables(plan: PlanFile) -> list[Table]:
    """Tables of a plan: bins, predictions, other targets, other variants, another schedule."""
    checked = {bin.start: bin.p05 for bin in plan.check or ()}
    measured = any(bin.hard_misses for bin in plan.bins)
    bins = f"start stop budget p05 low high{' misses' * measured} kept_share seconds dense_seconds"
    bins += " check_p05" if checked else ""
    bound = "" if plan.hard_misses is None else f", at most {plan.hard_misses:g}"
    promised = "speed_up limit eflops eflops_printed ms_step dense_ms_step seconds dense_seconds"
    tables = [
        figures(
            f"{plan.schedule.name}: {plan.variant}",
            plan.bins,
            bins,
            budget=_kept,
            misses=lambda bin: "-" if bin.hard_misses is None else f"{bin.hard_misses.value:.3g}",
            check_p05=lambda bin: checked.get(bin.start),
            caption=f"misses: hard misses per 1000 tokens{bound}" if measured else None,
        ),
        summary(
            f"predicted speed-up {plan.speed_up:.2f}x",
            {name: getattr(plan, name) for name in promised.split()},
            caption=f"{plan.workload}; {plan.hardware}",
        ),
        figures("at other targets", plan.sensitivity, "target variant speed_up budgets nearest"),
    ]
    if len(plan.variants) > 1:
        tables.append(figures("variants", plan.variants, "name speed_up limit"))
    if plan.compare is not None:
        other, planned = plan.compare, {bin.start: bin for bin in plan.bins}
        differs = f"; made for {', '.join(other.differs)}" if other.differs else ""
        compared = figures(
            f"the plan beside {other.name}",
            other.bins,
            "start plan budget p05 measured",
            plan=lambda bin: _kept(planned[bin.start]),
            budget=_kept,
            caption=f"speed-up {plan.speed_up:.2f}x and {other.speed_up:.2f}x{differs}",
        )
        tables.append(compared)
    return tables


# Flows.


def flow_check_tables(check: FlowCheck) -> list[Table]:
    """Tables of a flow check: fields, program, and the differential test."""
    sizes = f"page {check.page}, head size {check.head_size}, group {check.group}"
    name = f"{check.flow} ({check.digest}): {sizes}"
    about: dict[str, object] = {"bytes": f"{check.of_mean:.2f}x of one 16-bit mean"}
    about |= {"of_kv": f"{check.of_kv:.2%} of K and V"}
    for field in ("state", "operations", "over_pages", "mass", "kernels", "unordered"):
        about[field] = _text(getattr(check, field))  # which may break: some are long
    verdict_text = ("same pages", "") if check.passed else ("other pages", "bold red")
    title = Text.assemble(f"On random pages ({check.device}): ", verdict_text)
    tests = "sequence compared choices different near_ties first"
    return [
        figures(name, check.fields, "name kind shape bytes"),
        summary(name, about),
        figures(title, check.tests, tests, group="compared"),
    ]


def flow_score_table(scores: FlowScores) -> Table:
    """Table of flow scores by budget; the best flow first, submitted ones bold."""
    setup = scores.configuration
    where = f"{scores.model} ({scores.dtype}), {len(scores.texts)} texts of {scores.tokens} tokens"
    shown = [row for row in scores.rows if all(getattr(row, key) == value for key, value in setup)]
    dense = ", ".join(map(str, setup.dense_layers)) or "none"
    return figures(
        f"Flows on {where}",
        sorted(shown, key=lambda row: (row.budget, -row.p05)),
        "flow page of_mean budget p05 gain gain_low gain_high mean hard_misses recall mass error",
        flow=lambda row: Text(row.flow, style="bold" if row.submitted else ""),
        of_mean=lambda row: f"{row.of_mean:.2f}x",
        group="budget",
        caption=f"first {setup.first} and last {setup.last} pages kept, dense "
        f"layers: {dense}; gain: above the block mean; of_mean: bytes of landmarks against one "
        "16-bit mean; mean: of acceptance; hard misses per 1000 tokens; recall, mass, error on the "
        "dense stream",
    )


def campaign_table(campaign: Campaign) -> Table:
    """The leaderboard of a campaign: the front, what was validated, and the baselines."""
    counts = ", ".join(f"{count} {status}" for status, count in campaign.statuses.items())
    title = f"{campaign.model}: {campaign.tried} tried ({counts}), {campaign.published} published"
    table = Table(title=title, title_justify="left")
    timed = any(row.microseconds for row in campaign.rows)
    names = ["", "flow", "bytes", *(["us"] if timed else []), "search", "valid", "held out"]
    for name in [*names, "above spread_means(4)", "survived"]:
        table.add_column(name, justify="left" if name == "flow" else "right")
    for row in campaign.rows:
        if not (row.front or row.validation is not None):
            continue
        splits = [row.search, row.validation, row.held_out]
        last = next(split for split in reversed(splits) if split is not None)
        table.add_row(
            str(row.number),
            row.name + (" *" if row.front else ""),
            "-" if row.of_mean is None else f"{row.of_mean:.2f}x",
            *([f"{row.microseconds or 0:.0f}"] if timed else []),
            *(
                "-" if split is None else f"{getattr(split, campaign.objective).value:.3f}"
                for split in splits
            ),
            _signed(last.above[LAST_BASELINE][campaign.objective]),
            "-" if row.survived is None else f"{row.survived:.0%}",
        )
    table.caption = (
        f"{campaign.objective} by split, mean over budgets; bytes read of a page, over one 16-bit "
        "mean; * no other is better on the search texts at no greater cost; above spread_means(4): "
        "on the last split shown, 95 % paired by text; survived: the gain held out, of a sure one "
        "on the search texts"
    )
    return table


def _signed(estimate: Estimate) -> str:
    """A difference, with its interval where there is one."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:+.3f}"
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"
