"""The front of a campaign of flows: objectives against bytes, and times, of all candidates."""

from collections.abc import Sequence
from typing import Literal

from sparrow.reporting import page
from sparrow.reporting.render import svg_file
from sparrow.schema.campaign import BASELINES, OBJECTIVES, Campaign, CampaignRow, Objective

Cost = Literal["of_mean", "microseconds"]
COSTS: dict[Cost, page.Axis] = {
    "of_mean": page.Axis(name="bytes read of a page, over one 16-bit mean", low=0, form=".2f"),
    "microseconds": page.Axis(name="microseconds of a layer", low=0, form=".0f"),
}
AXES: dict[Objective, page.Axis] = {
    "p05": page.Axis(name="p05 of acceptance", form=".3f"),
    "acceptance": page.Axis(name="share of drafts accepted", form=".3f"),
    "hard_misses": page.Axis(name="hard misses per 1000 tokens", low=0, form=".1f"),
}
SPLITS: dict[str, page.Role] = {"validation": "run-2", "held_out": "run-3"}


def front_svg(campaign: Campaign) -> str:
    """A chart of every objective against every cost; the campaign's own objective comes first."""
    first = campaign.objective
    objectives = [first, *(name for name in OBJECTIVES if name != first)]
    costs = [name for name in COSTS if any(getattr(row, name) for row in campaign.rows)]
    charts = [_chart(campaign, objective, cost) for objective in objectives for cost in costs]
    say = f"{campaign.tried} candidates tried, {campaign.published} published."
    title = f"Flows on {campaign.model}"
    section = page.Section(key="campaign", title=title, say=say, items=charts)
    return svg_file(section, columns=len(costs))


def _chart(campaign: Campaign, objective: Objective, cost: Cost) -> page.Chart:
    """Marks for candidates and baselines, a line for the front of the search texts."""

    def points(rows: Sequence[CampaignRow], split: str = "search") -> list[page.Point]:
        scores = ((getattr(row, cost), getattr(row, split)) for row in rows)
        known = [(at, score) for at, score in scores if at is not None and score is not None]
        return sorted((at, getattr(score, objective).value) for at, score in known)

    built_in = [row for row in campaign.rows if row.number < len(BASELINES)]
    others = [row for row in campaign.rows if row.number >= len(BASELINES)]
    lines = [
        page.Line(name="candidates", points=points(others), role="quiet", shape="marks"),
        page.Line(name="built in", points=points(built_in), role="run-0", shape="marks"),
    ]
    if objective == campaign.objective:
        front = page.Line(name="front, search texts", points=points(campaign.front), role="run-1")
        lines.insert(0, front)
    for split, role in SPLITS.items():
        name, own = split.replace("_", "-"), points(others, split)
        lines.append(page.Line(name=name, points=own, role=role, shape="marks"))
    return page.Chart(
        key=f"{objective}-{cost}",
        title=AXES[objective].name,
        x=COSTS[cost],
        y=AXES[objective],
        lines=[line for line in lines if line.points],
    )
