"""Plans for a terminal."""

from rich.table import Table

from sparrow.calibrate.planning.files import Planned, as_json
from sparrow.schema.schedule import DENSE


def tables(planned: Planned) -> list[Table]:
    found = [bins_table(planned), summary(planned)]
    return [*found, compare_table(planned)] if planned.compare is not None else found


def bins_table(planned: Planned) -> Table:
    best = planned.best
    table = Table("total length", title=f"{best.schedule.name}: {best.variant.name}")
    headings = ["tokens kept", "p05", "95 % interval", "KV read", "seconds", "dense"]
    headings += ["check: p05"] if planned.check else []
    for heading in headings:
        table.add_column(heading, justify="right")
    checked = {each["start"]: each for each in planned.check or ()}
    for each in best.bins:
        cell = each.cell
        row = [
            f"{each.start} to {each.stop}",
            "all" if each.budget == DENSE else str(each.budget),
            f"{cell.p05:.3f}" if cell else "-",
            f"{cell.low:.3f} {cell.high:.3f}" if cell else "-",
            f"{each.kept_share:.0%}",
            f"{each.seconds:.2f}",
            f"{each.dense_seconds:.2f}",
        ]
        if planned.check:
            seen = checked.get(each.start)
            row.append(f"{seen['p05']:.3f}" if seen else "-")
        table.add_row(*row)
    return table


def summary(planned: Planned) -> Table:
    """What the plan promises, and how firmly."""
    best, data = planned.best, as_json(planned)
    table = Table("", "rollout", title=f"{data['workload']}, {data['hardware']}")
    rows = {
        "predicted speed-up": f"{best.speed_up:.2f}x",
        "that bytes alone would allow": f"{best.limit.speed_up:.2f}x",
        "in eFLOPs (ours, as printed)": f"{data['eflops']:.2f}x, {data['eflops_printed']:.2f}x",
        "a step": f"{data['ms_step']:.2f} ms, dense {data['dense_ms_step']:.2f} ms",
        "the rollout": f"{best.seconds:.1f} s, dense {best.dense_seconds:.1f} s",
    }
    for each in planned.sensitivity:
        rows[f"at target {each['target']:g}"] = (
            f"{each['speed_up']:.2f}x, keeps {', '.join(_kept(b) for b in each['budgets'])}"
            if each["reached"]
            else f"not reached, nearest {each['nearest']:.3f}"
        )
    for other in planned.plans[1:]:
        rows[f"instead: {other.variant.name}"] = f"{other.speed_up:.2f}x"
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _kept(budget: int | None) -> str:
    return "all" if budget is None else str(budget)


def compare_table(planned: Planned) -> Table:
    """The plan beside another schedule."""
    other = planned.compare
    assert other is not None
    table = Table("from length", title=f"the plan beside {other['name']}")
    headings = ("plan keeps", f"{other['name']} keeps", "p05 there, at least", "measured with")
    for heading in headings:
        table.add_column(heading, justify="right")
    for each, own in zip(planned.best.bins, other["bins"], strict=True):
        table.add_row(
            str(each.start),
            "all" if each.budget == DENSE else str(each.budget),
            "all" if own["budget"] is None else str(own["budget"]),
            "-" if own["p05"] is None else f"{own['p05']:.3f}",
            "-" if own["measured"] is None else str(own["measured"]),
        )
    speeds = f"speed-up {planned.best.speed_up:.2f}x and {other['speed_up']:.2f}x"
    differs = f"; made for {', '.join(other['differs'])}" if other["differs"] else ""
    table.caption = speeds + differs
    return table
