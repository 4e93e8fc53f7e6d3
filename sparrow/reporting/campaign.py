"""The front of a campaign of flows: p05 against bytes, of all candidates."""

from sparrow.reporting import page
from sparrow.reporting.render import svg_file
from sparrow.schema.campaign import BASELINES, Campaign, CampaignRow

BYTES = page.Axis(name="bytes of a page, over those of one 16-bit mean", low=0, form=".2f")
P05 = page.Axis(name="p05 of acceptance", form=".3f")


def front_svg(campaign: Campaign) -> str:
    """Marks for candidates and baselines, a line for the front of the search texts."""
    built_in = [row for row in campaign.rows if row.number < len(BASELINES)]
    others = [row for row in campaign.rows if row.number >= len(BASELINES)]
    lines = [
        page.Line(name="front, search texts", points=_points(campaign.front), role="run-1"),
        page.Line(name="candidates", points=_points(others), role="quiet", shape="marks"),
        page.Line(name="built in", points=_points(built_in), role="run-0", shape="marks"),
    ]
    for split in ("validation", "held_out"):
        rows = [row for row in others if getattr(row, split) is not None]
        points = sorted((row.of_mean or 0.0, getattr(row, split)) for row in rows)
        role: page.Role = "run-2" if split == "validation" else "run-3"
        name = split.replace("_", " ")
        lines.append(page.Line(name=name, points=points, role=role, shape="marks"))
    shown = [line for line in lines if line.points]
    say = f"{campaign.tried} candidates tried, {campaign.published} published."
    title = f"Flows on {campaign.model}"
    chart = page.Chart(key="front", title=title, x=BYTES, y=P05, lines=shown, say=say)
    return svg_file(page.Section(key="campaign", title=title, say=say, items=[chart]), columns=1)


def _points(rows: list[CampaignRow]) -> list[page.Point]:
    return sorted((row.of_mean or 0.0, row.search) for row in rows)
