"""The figure at the top of the README, from the raw files beside this script.

python bench/plot_first.py
"""

import json
from pathlib import Path

from sparrow.reporting.calibration import cells_line
from sparrow.reporting.page import Axis, Bar, BarGroup, Bars, Chart, Section, target_levels
from sparrow.reporting.render import svg_file
from sparrow.schema.surface import Surface

HERE = Path(__file__).parent
OUT = HERE.parent / "docs/results/first.svg"
SCHEDULE, BUDGET, TARGET = "qwen3-1.7b-0.86", 1024, 0.86


def steps() -> Bars:
    """Dense beside the published schedule, as `sparrow bench decode` measured them."""
    result = json.loads((HERE / "2026-11-15-decode-h200.json").read_text(encoding="utf-8"))
    measured = [row for row in result["rows"] if row["batch"] == 32]
    rows = {(row["context"], row["schedule"]): row for row in measured}
    groups = []
    for context in (2048, 16_384, 32_768):
        dense, sparse = (rows[context, name]["ms_step"] for name in (None, SCHEDULE))
        pair = [Bar(name=n, value=ms, role=n) for n, ms in (("dense", dense), ("sparse", sparse))]
        say = f"{dense / sparse:.1f}x faster"
        groups.append(BarGroup(name=f"{context // 1024}K tokens", bars=pair, say=say))
    title = "A decode step, Qwen3-1.7B's shape, batch 32"
    return Bars(key="steps", title=title, unit="ms", groups=groups)


def tail() -> Chart:
    """One budget at all lengths (calibration), and the plan's schedule on new prompts (check)."""
    names = ("calibrate-small-h200", "check-small-h200")
    surface, check = (Surface.load(HERE / f"2026-11-15-{name}.json") for name in names)
    return Chart(
        key="tail",
        title="p05 of acceptance by length, the shipped small",
        x=Axis(name="total length, tokens", low=0, form=".0f"),
        y=Axis(name="p05 of acceptance", low=0.6, high=1, form=".2f"),
        lines=(
            cells_line(check.cells, "planned", "run-0"),
            cells_line(surface.of("block-mean", BUDGET), f"{BUDGET} tokens", "sparse"),
        ),
        levels=target_levels([TARGET]),
    )


if __name__ == "__main__":
    figure = Section(key="first", title="", say="", items=(steps(), tail()))
    OUT.write_text(svg_file(figure), encoding="utf-8")
    print(OUT)
