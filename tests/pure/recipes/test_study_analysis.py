"""The analysis of a design: intervals by hand, the limit, predictions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import study_folders as folders
from support.run_folders import write_lines

from sparrow_recipes.study.analysis import Analysis, Comparison
from sparrow_recipes.study.files import read_study
from sparrow_recipes.study.outcome import conclude

PAIR = ("p", "dense")
Plain = dict[str, Any]


def analysed(
    folder: Path,
    finals: dict[str, Sequence[float]],
    cut_off: dict[str, float] | None = None,
    *,
    allow: bool = False,
    **analysis: Any,
) -> Analysis:
    """The analysis of runs that stay at a final accuracy from their first evaluation on."""
    seeds = {name: [*range(len(values))] for name, values in finals.items()}
    arms = [folders.make_arm("dense", "baseline", "dense", seeds=seeds["dense"])]
    arms += [folders.make_arm(name, seeds=seeds[name]) for name in finals if name != "dense"]
    plain = {"primary": PAIR, "sd": [0.1]} | analysis
    changes: Plain = {"analysis": plain, "cut_off": 0.05, "allow_cut_off": allow}
    study = folders.study(folder, arms, **changes)
    for name, values in finals.items():
        for seed, final in enumerate(values):
            place = folders.cell(study, name, seed, (0.5, final, final, final))
            shares = {"cut_off": (cut_off or {}).get(name, 0.0)}
            rows = [folders.evaluation(2 * at, final, **shares) for at in range(4)]
            write_lines(place / "validation.jsonl", rows)
    found = conclude(read_study(study)).analysis
    assert found is not None
    return found


def primary(*arguments: Any, **settings: Any) -> Comparison:
    return analysed(*arguments, **settings).comparisons[0]


def test_welchs_interval_at_90_percent_by_hand(tmp_path: Path) -> None:
    """Both have variance 0.0001 over three: SE sqrt(0.0002 / 3), t(0.95, 4) = 2.1318."""
    found = primary(tmp_path, {"dense": (0.89, 0.90, 0.91), "p": (0.87, 0.88, 0.89)})
    half = 2.1318 * (0.0002 / 3) ** 0.5
    assert found.runs == (3, 3)
    assert found.right.value == pytest.approx(-0.02)
    assert found.right.interval == pytest.approx((-0.02 - half, -0.02 + half), abs=1e-5)


def test_verdicts_of_the_primary_comparison(tmp_path: Path) -> None:
    """Half widths are 0.017: the margin of 0.05 decides."""
    dense = (0.89, 0.90, 0.91)
    for number, (mean, cut_off, verdict) in enumerate(
        (
            (0.88, {}, "non-inferior"),
            (0.92, {}, "non-inferior"),
            (0.85, {}, "undecided"),
            (0.80, {}, "inferior"),
            (0.88, {"dense": 0.05}, "the limit again"),
            (0.88, {"p": 0.06}, "the limit again"),
            (0.88, {"dense": 0.049, "p": 0.049}, "non-inferior"),
        )
    ):
        finals = {"dense": dense, "p": (mean - 0.01, mean, mean + 0.01)}
        assert primary(tmp_path / str(number), finals, cut_off).verdict == verdict, number
    finals = {"dense": dense, "p": (0.9,)}
    assert primary(tmp_path / "one", finals).verdict == "no result"


def test_permission_to_begin_does_not_make_the_primary_count(tmp_path: Path) -> None:
    finals = {"dense": (0.89, 0.90, 0.91), "p": (0.59, 0.60, 0.61)}
    pairs = [("dense", "p")]
    for allow, verdict in ((True, "higher"), (False, "the limit again")):
        found = analysed(tmp_path / str(allow), finals, {"p": 0.3}, allow=allow, compare=pairs)
        assert [pair.verdict for pair in found.comparisons] == ["the limit again", verdict]
        assert found.comparisons[1].cut_off_share == pytest.approx(0.3)
        assert found.comparisons[1].cut_off.value == pytest.approx(-0.3)
        wrong = found.comparisons[1].wrong.value  # 0.1 and 0.1
        assert wrong == pytest.approx(0.0, abs=1e-9)


def test_what_was_not_measured_gives_no_verdict(tmp_path: Path) -> None:
    arms = [folders.make_arm("dense", "baseline", "dense"), folders.make_arm("p")]
    plain = {"analysis": {"primary": PAIR, "sd": [0.1]}, "cut_off": 0.05}
    study = folders.study(tmp_path, arms, **plain)
    for name in ("dense", "p"):
        for seed, final in enumerate((0.89, 0.90, 0.91)):
            folders.cell(study, name, seed, (0.5, final, final, final))
    (found,) = conclude(read_study(study)).analysis.comparisons
    assert (found.cut_off, found.verdict) == (None, "cut off not measured")


def test_predictions_of_hypotheses(tmp_path: Path) -> None:
    """p is lower by 0.3, q by 0.005 with an interval that holds 0; no run falls."""

    def prediction(name: str, right: str | None = None, arm: str = "p", **fell: Any) -> Plain:
        compared = {"compare": (arm, "dense"), "right": right} if right else {}
        return {"hypothesis": name, "fell": fell, **compared}

    finals = {"dense": (0.89, 0.90, 0.91), "p": (0.59, 0.60, 0.61), "q": (0.885, 0.895, 0.905)}
    sides = ("higher", "lower", "open", "non-inferior")
    predictions = [
        *(prediction(f"p {side}", side) for side in sides),
        *(prediction(f"q {side}", side, "q") for side in sides),
        prediction("loses", "lower", p=[0.0, 0.2]),
        prediction("loses", None, dense=[0.0, 0.0]),
        prediction("falls", "lower", p=[0.5, 1.0]),
    ]
    found = analysed(tmp_path, finals, predictions=predictions).hypotheses
    assert {name: list(parts.values()) for name, parts in found.items()} == {
        "p higher": [False],
        "p lower": [True],
        "p open": [False],
        "p non-inferior": [False],
        "q higher": [None],
        "q lower": [None],
        "q open": [True],
        "q non-inferior": [True],
        "loses": [True, True, True],
        "falls": [True, False],
    }
    limited = analysed(tmp_path / "l", finals, {"p": 0.2}, predictions=predictions).hypotheses
    assert list(limited["p lower"].values()) == [None]
    assert list(limited["q open"].values()) == [True]
