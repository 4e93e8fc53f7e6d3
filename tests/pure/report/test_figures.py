"""Every figure draws without a warning, twice the same, with its numbers as words in the SVG."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from support.surfaces import cell, layer_loss, plan, surface

from sparrow.report.plan_plots import cost, schedule, write_plan
from sparrow.report.style import drawing, save, sheet, width_of, wrapped
from sparrow.report.surface_plots import (
    budgets,
    distribution,
    estimators,
    layers,
    means,
    tails,
    write_surface,
)
from sparrow.schema.surface import Surface

ROOT = Path(__file__).parents[3]
LADDER = [256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120]
LADDER += [6144, 7168, 8192]
LARGE: dict[str, Any] = {"bins": range(0, 40_001, 2000), "budgets": LADDER}
FOUR = ("block_mean", "quest", "means4", "oracle")
SURFACES = {
    "small": surface(),
    "large": surface(**LARGE),
    "missing": surface(**LARGE, missing=0.3),
    "four": surface(bins=(0, 64, 128, 1024), names=FOUR, targets=[0.84, 0.86]),
    "one cell": surface(bins=(0, 500), budgets=(128,), floor=[]),
}
CHECK = [cell("v", 64, 0, 1000), cell("v", 64, 1000, 2000)]
PRESET = {"name": "qwen3-1.7b-0.86", "starts": [0, 500, 9000], "budgets": [512, 1024, 4096]}
PLANS = {
    "small": plan(),
    "large": plan(18, 2000, compare=PRESET | {"speed_up": 1.9}, check=CHECK),
    "partly dense": plan(5, dense_from=3),
    "dense": plan(4, dense_from=0, sensitivity=[]),
    "one bin": plan(1),
}
Draw = Callable[[dict[str, Any]], Any]
EVERY = (tails, means, budgets, layers, distribution, estimators)
CASES = [(draw, name) for draw in EVERY for name in ("small", "missing", "one cell")]
CASES += [(tails, "large"), (estimators, "large"), (tails, "four"), (budgets, "four")]


def drawn(draw: Draw, data: dict[str, Any], stem: Path) -> str:
    """Draw with warnings as errors, no words cut or overlapping; the SVG."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw(data)
        check_words(figure)
        (svg,) = save(figure, stem, formats=["svg"])
    return svg.read_text(encoding="utf-8")


@pytest.mark.parametrize(("draw", "name"), CASES)
def test_surfaces_draw(draw: Draw, name: str, tmp_path: Path) -> None:
    assert "qwen3-1.7b" in drawn(draw, SURFACES[name], tmp_path / "figure")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("draw", [schedule, cost])
def test_plans_draw(draw: Draw, name: str, tmp_path: Path) -> None:
    assert "qwen3-1.7b" in drawn(draw, PLANS[name], tmp_path / "figure")


def test_the_surfaces_here_are_what_calibrations_write(tmp_path: Path) -> None:
    source = tmp_path / "surface.json"
    source.write_text(json.dumps(SURFACES["four"]), encoding="utf-8")
    assert [variant.name for variant in Surface.load(source).variants] == list(FOUR)


def test_budgets_and_targets_are_words(tmp_path: Path) -> None:
    svg = drawn(tails, SURFACES["large"], tmp_path / "tails")
    for text in [*map(str, LADDER), "target 0.86", "dense floor", "40K", "p05 of acceptance"]:
        assert f">{text}<" in svg
    svg = drawn(schedule, PLANS["large"], tmp_path / "schedule")
    for text in ["256", "3840", "target 0.86", "target 0.84", "qwen3-1.7b-0.86", "check run"]:
        assert f">{text}<" in svg
    assert ">dense<" in drawn(schedule, PLANS["partly dense"], tmp_path / "dense")


def test_estimates_that_were_not_made_are_left_out(tmp_path: Path) -> None:
    given = surface()
    for made in given["cells"]:
        made["estimators"] |= {"ratio_p05": None, "ratio_mean": None, "ratio_error": None}
    svg = drawn(estimators, given, tmp_path / "given")
    assert ">sampled ratio<" not in svg
    assert ">top-20 lower<" in svg


def test_cells_without_a_fit_have_no_density(tmp_path: Path) -> None:
    unfitted = surface()
    for made in unfitted["cells"]:
        made["beta"] = []
    assert "KS 0" not in drawn(distribution, unfitted, tmp_path / "unfitted")


def test_figures_without_their_data_say_so() -> None:
    with pytest.raises(ValueError, match="no losses by layer"):
        layers(surface(layers=0))
    bare = surface()
    bare["cells"] = [made | {"estimators": None} for made in bare["cells"]]
    with pytest.raises(ValueError, match="holds none for block_mean"):
        estimators(bare)


def test_more_layer_groups_than_fit_are_cut(tmp_path: Path) -> None:
    many = surface()
    many["layers"] = [layer_loss("block_mean", 64 * n, 4, 24) for n in range(1, 7)]
    svg = drawn(layers, many, tmp_path / "layers")
    assert "256 kept tokens" in svg
    assert "320 kept tokens" not in svg


def test_files_hold_what_the_data_allows(tmp_path: Path) -> None:
    data = surface(bins=(0, 500), budgets=(128,), names=("a/b", "c"), layers=0)
    for made in data["cells"]:
        if made["variant"] == "c":
            made["estimators"] = None
    source = tmp_path / "surface.json"
    source.write_text(json.dumps(data), encoding="utf-8")
    stems = ["tails", "means", "budgets", "distribution-a-b", "estimators-a-b", "distribution-c"]
    names = [path.name for path in write_surface(source, tmp_path / "figures")]
    assert names == [f"{stem}.{end}" for stem in stems for end in ("svg", "png")]


def test_a_check_run_has_one_line_for_its_schedule(tmp_path: Path) -> None:
    data = surface(budgets=(256,), layers=0)
    data["budgets"] = []
    for made in data["cells"]:
        made["budget"] = None
    source = tmp_path / "check.json"
    source.write_text(json.dumps(data), encoding="utf-8")
    written = write_surface(source, tmp_path / "figures")
    names = [path.stem for path in written if path.suffix == ".svg"]
    assert names == ["tails", "means", "distribution", "estimators"]
    assert ">schedule<" in written[0].read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="whole schedules only"):
        budgets(data)


def test_targets_aside_may_be_of_another_variant_or_out_of_reach(tmp_path: Path) -> None:
    made = plan()
    made["sensitivity"][0] |= {"variant": "quest", "budgets": [256, 256]}
    made["sensitivity"][2] |= {"budgets": [], "speed_up": None, "reached": False, "variant": None}
    made["compare"] = PRESET | {"budgets": [512, 1024, None], "speed_up": 1.5}
    svg = drawn(schedule, made, tmp_path / "aside")
    assert ">target 0.84, quest<" in svg
    assert ">target 0.88<" not in svg


@pytest.mark.parametrize("draw", [tails, budgets, layers, estimators])
def test_a_surface_drawn_twice_gives_the_same_bytes(draw: Draw, tmp_path: Path) -> None:
    first, second = (save(draw(surface()), tmp_path / run) for run in ("one", "two"))
    assert first[1].read_bytes().startswith(b"\x89PNG")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_plans_are_files_and_the_same_twice(tmp_path: Path) -> None:
    source = tmp_path / "plan.json"
    source.write_text(json.dumps(plan()), encoding="utf-8")
    first, second = (write_plan(source, tmp_path / run) for run in ("one", "two"))
    names = ["schedule.svg", "schedule.png", "cost.svg", "cost.png"]
    assert [path.name for path in first] == names
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "other.json: not valid JSON"),
        ("[]", "other.json: got list"),
        ('{"format": 2, "cells": []}', "is no file of format 1"),
        ('{"format": 1, "bins": []}', "is no file of format 1 of a surface"),
        ('{"format": 1, "cells": []}', "has no cells"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "other.json"
    source.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        write_surface(source, tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        write_plan(tmp_path / "nothing.json", tmp_path)


def test_settings_of_others_neither_matter_nor_change(tmp_path: Path) -> None:
    import matplotlib

    plain = drawn(tails, surface(), tmp_path / "plain")
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": "other", "lines.linewidth": 9}):
        assert drawn(tails, surface(), tmp_path / "odd") == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_long_titles_wrap_and_long_names_keep_their_end() -> None:
    with drawing():
        lines = wrapped("word " * 40, 13, 5.0)
        assert len(lines) > 1
        assert max(width_of(line, 13) for line in lines) <= 5.0
        (cut,) = wrapped("/a/very/long/folder" * 12 + "/model", 9, 3.0)
    assert cut.startswith("…")
    assert cut.endswith("/model")


def test_dollars_are_dollars(tmp_path: Path) -> None:
    with drawing():
        page = sheet(6, 1, "costs $5 and $6", "sub", "note")
    svg, _ = save(page.figure, tmp_path / "dollars")
    assert "costs $5 and $6" in svg.read_text(encoding="utf-8")


def check_words(figure: Any) -> None:
    """Words lie on the paper, and no two of them touch by more than a pixel."""
    with drawing():
        places = list(shown_words(figure))
    width, height = figure.bbox.size
    for i, (text, a) in enumerate(places):
        assert min(a.x0, a.y0) >= 0, f"{text!r} is cut"
        assert a.x1 <= width, f"{text!r} is cut"
        assert a.y1 <= height, f"{text!r} is cut"
        for other, b in places[i + 1 :]:
            across = min(a.x1, b.x1) - max(a.x0, b.x0)
            down = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert across <= 1 or down <= 1.6, f"{text!r} lies on {other!r}"


def shown_words(figure: Any) -> Iterator[tuple[str, Any]]:
    """Texts of a drawn figure with their places; ticks out of view are not shown."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = list(figure.texts)
    for axes in figure.axes:
        texts += [*axes.texts, axes.title, axes._left_title]
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            ticks = [t for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
            texts += [axis.label, *(x for t in ticks for x in (t.label1, t.label2))]
    for text in texts:
        if text.get_text() and text.get_visible():
            yield text.get_text(), text.get_window_extent(renderer)


def test_importing_needs_no_matplotlib_and_drawing_says_that_it_does() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
import sparrow.report.surface_plots
sys.path.insert(0, "tests")
from support.surfaces import plan
from sparrow.report.plan_plots import cost
try:
    cost(plan())
except ModuleNotFoundError as error:
    assert error.name == "matplotlib"
    assert "this needs the package matplotlib" in str(error)
else:
    sys.exit("drew without matplotlib")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_figure_replaces_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("dear")
    (tmp_path / "surface.svg").symlink_to(kept)
    save(tails(surface()), tmp_path / "surface", formats=["svg"])
    assert kept.read_text() == "dear"
