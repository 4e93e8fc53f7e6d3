"""The figure at the top of the README, from the raw files beside this script.

python bench/plot_first.py
"""

import json
from pathlib import Path
from typing import Any

from sparrow.report.page.parts import Axis, Bar, BarGroup, Bars, Chart, Level, Line
from sparrow.report.page.sheet import sheet

HERE = Path(__file__).parent
OUT = HERE.parent / "docs/results/first.svg"
SCHEDULE, BUDGET, TARGET = "qwen3-1.7b-0.86", 1024, 0.86


def read(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"2026-11-15-{name}.json").read_text(encoding="utf-8"))


def steps() -> Bars:
    """Dense beside the published schedule, as `sparrow bench decode` measured them."""
    rows = {
        (r["context"], r["schedule"]): r for r in read("decode-h200")["rows"] if r["batch"] == 32
    }
    groups = []
    for context in (2048, 16_384, 32_768):
        dense, sparse = (rows[context, name]["ms_step"] for name in (None, SCHEDULE))
        pair = (
            Bar(name="dense", value=dense, role="dense"),
            Bar(name="sparse", value=sparse, role="sparse"),
        )
        say = f"{dense / sparse:.1f}x faster"
        groups.append(BarGroup(name=f"{context // 1024}K tokens", bars=pair, say=say))
    return Bars(
        key="steps",
        title="A decode step, Qwen3-1.7B's shape, batch 32",
        unit="ms",
        groups=tuple(groups),
    )


def tail() -> Chart:
    """One budget at all lengths (calibration), and the plan's schedule on new prompts (check)."""
    surface, check = read("calibrate-small-h200"), read("check-small-h200")
    fixed = [c for c in surface["cells"] if (c["variant"], c["budget"]) == ("block-mean", BUDGET)]
    return Chart(
        key="tail",
        title="p05 of acceptance by length, the shipped small",
        x=Axis(name="total length, tokens", low=0, form=".0f"),
        y=Axis(name="p05 of acceptance", low=0.6, high=1, form=".2f"),
        lines=(
            line("planned", check["cells"], "run-0"),
            line(f"{BUDGET} tokens", fixed, "sparse"),
        ),
        levels=(Level(y=TARGET, name=f"target {TARGET}"),),
    )


def line(name: str, cells: list[dict[str, Any]], role: str) -> Line:
    ordered = sorted(cells, key=lambda cell: cell["start"])
    middle = [(cell["start"] + cell["stop"]) / 2 for cell in ordered]
    return Line(
        name=name,
        points=tuple((x, cell["p05"]) for x, cell in zip(middle, ordered, strict=True)),
        spans=tuple((x, c["low"], c["high"]) for x, c in zip(middle, ordered, strict=True)),
        role=role,
        shape="dots",
    )


if __name__ == "__main__":
    OUT.write_text(sheet([steps(), tail()]), encoding="utf-8")
    print(OUT)
