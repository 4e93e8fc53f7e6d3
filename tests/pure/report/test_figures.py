"""Figures of surfaces and plans: their numbers are those of the data, whatever the data lack."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from support.surfaces import cell, layer_loss, plan, surface

from sparrow.reporting import calibration
from sparrow.reporting.page import Chart, Section
from sparrow.reporting.render import svg_file, write_figures
from sparrow.schema.base import from_dict
from sparrow.schema.plan import PlanFile
from sparrow.schema.surface import Surface

LARGE: dict[str, Any] = {"bins": range(0, 40_001, 2000), "budgets": range(256, 8193, 512)}
FOUR = ("block_mean", "quest", "means4", "oracle")
PRESET = {"name": "qwen3-1.7b-0.86", "starts": [0, 500, 9000], "budgets": [512, 1024, None]}
PRESET |= {"speed_up": 1.9, "differs": [], "bins": []}
CHECK = [
    {"start": start, "stop": start + 1000, "p05": 0.87, "low": 0.86, "high": 0.88, "prompts": 60}
    for start in (0, 1000)
]


def measured(**changes: Any) -> Surface:
    return from_dict(Surface, surface(prompt_tokens=0, **changes))


def planned(*shape: Any, **changes: Any) -> PlanFile:
    return from_dict(PlanFile, plan(*shape, **changes))


def by_key(sections: list[Section]) -> dict[str, Section]:
    return {section.key: section for section in sections}


def charts(section: Section) -> list[Chart]:
    return [item for item in section.items if isinstance(item, Chart)]


def test_every_figure_draws_and_draws_the_same_twice() -> None:
    several = measured(bins=(0, 64, 128, 1024), names=FOUR, targets=[0.84, 0.86])
    one = measured(bins=(0, 500), budgets=(128,), floor=[])
    surfaces = (measured(), measured(**LARGE, missing=0.3), several, one)
    plans = [planned(), planned(18, 2000, compare=PRESET, check=CHECK), planned(5, dense_from=3)]
    plans += [planned(4, dense_from=0, sensitivity=[]), planned(1)]
    figures = [figure for shown in surfaces for figure in calibration.surface_figures(shown)]
    figures += [figure for shown in plans for figure in calibration.plan_figures(shown)]
    for figure in figures:
        drawn = svg_file(figure)
        ET.fromstring(drawn)
        assert svg_file(figure) == drawn
        assert "qwen3-1.7b" in drawn


def test_lines_are_the_cells_of_a_budget() -> None:
    result = measured()
    figures = by_key(calibration.surface_figures(result))
    assert list(figures) == ["tails", "layers", "estimators"]
    (tails,) = charts(figures["tails"])
    assert [line.name for line in tails.lines] == ["128 kept", "256 kept", "512 kept", "dense"]
    first = [c for c in result.cells if c.budget == 128]
    assert tails.lines[0].points == [((c.start + c.stop) / 2, c.p05) for c in first]
    assert tails.lines[0].spans[0] == (250, first[0].low, first[0].high)
    assert [level.name for level in tails.levels] == ["target 0.86"]
    few = [cell("block_mean", 128, 0, 500, prompts=12)]
    assert "Fewer than 48" in calibration.surface_figures(measured(cells=few))[0].say
    assert "Fewer" not in figures["tails"].say


def test_layers_are_bars_of_what_the_tail_loses() -> None:
    losses = [layer_loss("block_mean", 64 * n, 4, 24) for n in range(1, 7)]
    result = from_dict(Surface, surface(prompt_tokens=0) | {"layers": losses})
    (bars,) = by_key(calibration.surface_figures(result))["layers"].items
    assert len(bars.groups) == 4  # more groups than fit are cut
    assert bars.groups[0].bars[0].value == pytest.approx(1 - losses[0]["p05"])
    texts = [calibration.format_layers(layers) for layers in ([3], [4, 5, 6], [0, 5])]
    assert texts == ["layer 3", "layers 4-6", "layers 0, 5"]


def test_figures_follow_what_the_data_allow(tmp_path: Path) -> None:
    data = surface(bins=(0, 500), budgets=(128,), names=("a/b", "c"), layers=0, prompt_tokens=0)
    for fields in data["cells"]:
        if fields["variant"] == "c":
            fields["estimators"] = None
    kept = tmp_path / "kept.txt"
    kept.write_text("dear")
    (tmp_path / "tails.svg").symlink_to(kept)
    paths = write_figures(calibration.surface_figures(from_dict(Surface, data)), tmp_path)
    assert [path.name for path in paths] == ["tails.svg", "estimators-a-b.svg"]
    assert kept.read_text() == "dear"  # a figure replaces a link
    with pytest.raises(ValueError, match="cells"):
        calibration.surface_figures(measured(cells=[]))
    with pytest.raises(ValueError, match="bins"):
        calibration.plan_figures(planned(bins=[]))
    data = surface(budgets=(256,), layers=0, prompt_tokens=0) | {"budgets": []}
    for fields in data["cells"]:
        fields["budget"] = None
    figures = by_key(calibration.surface_figures(from_dict(Surface, data)))
    assert charts(figures["tails"])[0].lines[0].name == "schedule"  # of a check run


def test_estimators_are_of_the_budget_nearest_to_the_target() -> None:
    tails = {64: (0.7, 0.72), 128: (0.89, 0.92), 256: (0.99, 0.99)}
    cells = [
        cell("v", budget, start, start + 500, p05=p05, low=p05 - 0.01, high=p05)
        for budget, both in tails.items()
        for start, p05 in zip((0, 500), both, strict=True)
    ]
    result = measured(cells=cells, targets=[0.9])
    line = calibration.cells_near_target(result, "v")
    assert [c.budget for c in line] == [128, 128]
    assert calibration.cells_near_target(result, "other") == []
    p05, errors = charts(calibration.estimator_figure(result, line, "estimators"))
    assert p05.lines[0].points == [(250, 0.89), (750, 0.92)]
    exact, cheap = line[0].p05, line[0].estimators
    assert errors.lines[1].points[0] == (250, cheap.lower_p05 - exact)
    for fields in cells:
        fields["estimators"] |= {"ratio_p05": None, "ratio_mean": None, "ratio_error": None}
    unsampled = measured(cells=cells)
    (named, _) = charts(
        calibration.estimator_figure(
            unsampled, calibration.cells_near_target(unsampled, "v"), "estimators"
        )
    )
    assert [line.name for line in named.lines] == ["exact p05", "top-20 upper", "top-20 lower"]


def test_a_plan_is_drawn_beside_other_targets_a_preset_and_its_check() -> None:
    plan_data = plan(compare=PRESET, check=CHECK)
    plan_data["sensitivity"][0] |= {"variant": "quest", "budgets": [256, 256, 256]}
    missed = {"budgets": [], "speed_up": None, "reached": False, "variant": None}
    plan_data["sensitivity"][2] |= missed
    (schedule,) = calibration.plan_figures(from_dict(PlanFile, plan_data))
    kept, tail = charts(schedule)
    names = [line.name for line in kept.lines]
    assert names == ["target 0.86", "target 0.84, quest", "qwen3-1.7b-0.86", "all kept"]
    assert kept.lines[0].points[:3] == [(0, 0), (256, 256), (1000, 256)]
    assert [line.name for line in tail.lines] == ["expected", "check run"]
    assert tail.lines[1].points == [(500, 0.87), (1500, 0.87)]
    assert schedule.title == "256 to 768 kept tokens for p05 at 0.86 or above"
    assert calibration.plan_figures(planned(dense_from=0))[0].title.startswith("No measured budget")
    plan_data["bins"][1]["p05"] = 0.85
    assert "below it in 1 of 3" in calibration.plan_figures(from_dict(PlanFile, plan_data))[0].title
