"""Plans of made-up surfaces: optimal, honest about what cannot be reached, priced."""

import json
import subprocess
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.specs import TINY

from sparrow.calibrate.arms import schedule_of
from sparrow.calibrate.planning import files
from sparrow.calibrate.planning.hardware import Hardware
from sparrow.calibrate.planning.plan import Plan, Unreachable, least_kept, plan
from sparrow.calibrate.planning.pricing import Ground, rollout
from sparrow.calibrate.planning.tables import tables
from sparrow.calibrate.planning.workload import Workload
from sparrow.models.spec import spec_to_hf
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.surface import FORMAT, Cell, Surface, Variant
from sparrow.sparse import preset

BINS = (0, 256, 512, 768)
BUDGETS = (64, 128, 256, 512)
SPEC = replace(TINY, max_positions=40_960)


def cell(variant: str, budget: int | None, start: int, p05: float, **changes: Any) -> Cell:
    given: dict[str, Any] = {
        "variant": variant,
        "budget": budget,
        "start": start,
        "stop": start + 256,
        "tokens": 4000,
        "sequences": 60,
        "prompts": 60,
        "mean": 0.99,
        "p01": p05 / 2,
        "p05": p05,
        "low": p05 - 0.01,
        "high": min(1.0, p05 + 0.01),
        "p50": 1.0,
        "above": 0.9,
        "beta": (),
        "uncertain_p05": None,
        "uncertain": 0,
    }
    return Cell(**(given | changes))


def variant(name: str = "block-mean", **changes: Any) -> Variant:
    given = {"flow": "block-mean", "source": "block_mean", "digest": "ab", "field_bytes": 32}
    return Variant(name=name, **(given | changes))


# Acceptance by bin and budget.
RISING = {
    0: {64: 0.90, 128: 0.95, 256: 1.0, 512: 1.0},
    256: {64: 0.80, 128: 0.90, 256: 0.95, 512: 1.0},
    512: {64: 0.70, 128: 0.85, 256: 0.88, 512: 0.97},
}


def surface(figures: dict[int, dict[int, float]] | None = None, **changes: Any) -> Surface:
    found = RISING if figures is None else figures
    cells = [cell("block-mean", b, s, p) for s, row in found.items() for b, p in row.items()]
    given: dict[str, Any] = {
        "format": FORMAT,
        "model": "mine",
        "family": "qwen3",
        "fingerprint": "cd",
        "shape": json.dumps(spec_to_hf(SPEC, "bfloat16")),
        "dtype": "bfloat16",
        "device": "cpu",
        "mode": "generated",
        "prompts": "made up",
        "prompts_digest": "ef",
        "seed": 0,
        "temperature": 1.0,
        "max_tokens": 512,
        "targets": (0.86,),
        "bins": BINS,
        "variants": (variant(),),
        "budgets": BUDGETS,
        "cells": tuple(cells),
        "floor": tuple(cell("dense", None, start, 0.999, low=0.998, high=1.0) for start in found),
        "positions": (),
        "layers": (),
        "lengths": (700, 700, 300, 500),
        "prompt_tokens": 16,
        "undecided": (),
        "warnings": (),
        "versions": (),
        "command": "",
        "created": "",
    }
    return Surface(**(given | changes))


def ground(found: Surface | None = None, machine: str | Hardware = "h200", **work: Any) -> Ground:
    hardware = Hardware.load(machine) if isinstance(machine, str) else machine
    lengths = work.pop("lengths", [700] * 8 + [300] * 4)
    made = Workload(name="made up", lengths=np.array(lengths), **work)
    return Ground(surface=found or surface(), spec=SPEC, hardware=hardware, workload=made)


def best(place: Ground, target: float = 0.86, **settings: Any) -> Plan:
    return plan(place, target, **settings)[0]


def test_the_least_budget_of_every_bin_that_surely_reaches_the_target() -> None:
    found = best(ground())
    assert found.budgets == [64, 128, 256]  # 0.89, 0.89, 0.87 at the lower ends
    assert found.schedule.lengths.tolist() == [0, 256, 512, 768]
    assert found.schedule.budgets.tolist() == [64, 128, 256, DENSE]  # not measured: not promised
    assert [one.cell and one.cell.p05 for one in found.bins] == [0.90, 0.90, 0.88]


def test_by_p05_itself_less_is_asked() -> None:
    assert best(ground(), 0.88, by="low").budgets == [64, 128, 512]
    assert best(ground(), 0.88, by="p05").budgets == [64, 128, 256]


def test_budgets_never_fall() -> None:
    figures = {start: dict(row) for start, row in RISING.items()}
    figures[0] = {64: 0.5, 128: 0.6, 256: 1.0, 512: 1.0}
    assert best(ground(surface(figures))).budgets == [256, 256, 256]


PLAIN = Hardware.plain("plain", bytes_per_s=1e11, memory=10**11, flops_per_s=1e12)


@pytest.mark.parametrize("target", [0.75, 0.86, 0.9])
@pytest.mark.parametrize("machine", ["h200", PLAIN])
def test_no_other_schedule_that_keeps_the_target_is_faster(
    target: float, machine: str | Hardware
) -> None:
    """Every rising schedule over the measured budgets, priced as a whole."""
    place = ground(machine=machine)
    found = best(place, target)
    reached = {(c.start, c.budget): c.low for c in place.surface.cells}
    others = [
        rollout(place, variant(), schedule_of(variant(), BINS[:-1], choice))
        for choice in product(BUDGETS, repeat=3)
        if list(choice) == sorted(choice)
        and all(
            b >= stop or reached[start, b] >= target
            for start, stop, b in zip(BINS[:-1], BINS[1:], choice, strict=True)
        )
    ]
    assert len(others) > 1
    assert found.seconds == pytest.approx(min(others))
    assert rollout(place, variant(), found.schedule) == pytest.approx(found.seconds)


def test_a_target_out_of_reach_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(Unreachable, match=r"lengths 512 to 768 \(best there: 0.960\)") as raised:
        plan(ground(), 0.98)
    assert raised.value.nearest == pytest.approx(0.96)
    assert best(ground(), raised.value.nearest).budgets == [256, 512, 512]
    assert "--allow-dense" in str(raised.value)


def test_bins_out_of_reach_may_run_dense() -> None:
    found = best(ground(), 0.98, allow_dense=True)
    assert found.budgets == [256, 512, DENSE]
    assert found.schedule.budgets.tolist() == [256, 512, DENSE]
    assert 1 <= found.bins[2].kept_share < 1.1  # landmarks are read for nothing


def test_where_rounding_alone_misses_the_target_nothing_helps() -> None:
    floor = tuple(cell("dense", None, start, 0.97) for start in RISING)
    with pytest.raises(Unreachable):
        plan(ground(surface(floor=floor)), 0.98, allow_dense=True)


def test_layers_that_get_less_are_not_taken_for_dense() -> None:
    """A budget of the length keeps everything only where every layer has it."""
    uneven = variant("uneven", shares=(0.25, 1.0, 2.0))
    assert least_kept(uneven, 512) == 128
    assert least_kept(variant(), 512) == 512
    figures = {0: {64: 0.5, 256: 0.5, 512: 0.9}}
    cells = tuple(cell("uneven", b, 0, p) for b, p in figures[0].items())
    found = surface(figures, variants=(uneven,), cells=cells, bins=(0, 256))
    assert best(ground(found)).budgets == [512]


def test_the_cheapest_variant_wins_and_the_others_are_told() -> None:
    better = [
        one.replace(
            variant="better", low=min(1, one.p05 + 0.04), p05=min(1, one.p05 + 0.05), high=1
        )
        for one in surface().cells
    ]
    both = surface(cells=(*surface().cells, *better), variants=(variant(), variant("better")))
    found = plan(ground(both, PLAIN), 0.86)
    assert [one.variant.name for one in found] == ["better", "block-mean"]
    assert found[0].seconds < found[1].seconds
    only = plan(ground(both, PLAIN), 0.86, variants=["block-mean"])
    assert [one.variant.name for one in only] == ["block-mean"]
    with pytest.raises(ValueError, match="no variant 'worse'; it has block-mean, better"):
        plan(ground(both), 0.86, variants=["worse"])


def test_cells_of_few_prompts_are_not_believed() -> None:
    thin = tuple(c.replace(prompts=7) if c.start == 512 else c for c in surface().cells)
    found = best(ground(surface(cells=thin)))
    assert found.budgets == [64, 128]
    assert any("lengths over 512 were not measured" in note for note in found.notes)
    assert found.schedule.budget(600) == DENSE
    none = tuple(c.replace(prompts=7) for c in surface().cells)
    with pytest.raises(ValueError, match="nothing can be planned"):
        plan(ground(surface(cells=none)), 0.86)


def test_bins_without_measurements_keep_what_the_next_one_needs() -> None:
    found = best(ground(surface({256: RISING[256], 512: RISING[512]})))
    assert found.budgets == [128, 128, 256]
    assert any("nothing was measured at lengths 0 on" in note for note in found.notes)


def test_provenance_says_where_it_comes_from_and_for_whom() -> None:
    found = best(ground()).schedule
    assert (found.name, found.model, found.family) == ("mine-0.86", "mine", "qwen3")
    notes = {note.key: note.text for note in found.provenance}
    assert "0.86" in notes["target"]
    assert notes["weights"] == "cd"
    assert "60 to 60 prompts" in notes["prompts"]
    assert "sparrow calibrate --schedule" in notes["check"]


def test_prices_add_up() -> None:
    place = ground(most=4)
    found = best(place)
    assert found.seconds == pytest.approx(sum(one.seconds for one in found.bins))
    assert found.dense_seconds == pytest.approx(sum(one.dense_seconds for one in found.bins))
    assert all(0 < one.kept_share < 1 for one in found.bins)
    assert found.limit.speed_up > 1
    assert found.limit.mean_batch <= 4


def test_a_plan_that_does_not_pay_says_so() -> None:
    assert any("no faster than dense" in note for note in best(ground()).notes)


# As files and tables.


def test_files_and_tables(tmp_path: Any) -> None:
    name = "mine-0.86"
    cells = tuple(cell(name, None, start, 0.87) for start in RISING)
    check = surface(variants=(variant(name),), cells=cells)
    planned = files.make(ground(), 0.86, compare=preset("qwen3-1.7b-0.86"), check=check)
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / f".schedule.json.{ended.pid}.unfinished").write_text("a part")
    schedule, written = files.write(planned, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"schedule.json", "plan.json"}
    assert Schedule.load(schedule) == planned.best.schedule
    data = json.loads(written.read_text())
    assert [one["budget"] for one in data["bins"]] == [64, 128, 256]
    assert [one["target"] for one in data["sensitivity"]] == [0.84, 0.88]
    assert data["sensitivity"][1]["budgets"] == [64, 128, 512]
    assert data["compare"]["differs"] == ["dense layers (0, 1) (the plan: ())"]
    unknown = {"start": 0, "budget": 512, "measured": None, "p05": None}  # of its dense layers
    assert data["compare"]["bins"][0] == unknown
    assert data["check"][0]["p05"] == 0.87
    assert data["speed_up"] == pytest.approx(data["dense_seconds"] / data["seconds"])
    assert data["eflops"] > 1
    assert len(tables(planned)) == 3


def test_a_neighbouring_target_out_of_reach_is_named() -> None:
    planned = files.make(ground(), 0.95)
    low, high = planned.sensitivity
    assert low["reached"]
    assert not high["reached"]
    assert high["nearest"] == pytest.approx(0.96)
    assert len(tables(planned)) == 2


def test_a_dense_bin_is_null(tmp_path: Any) -> None:
    planned = files.make(ground(), 0.98, allow_dense=True)
    assert files.as_json(planned)["bins"][2]["budget"] is None


def test_another_schedule_of_the_same_rule_is_looked_up() -> None:
    other = preset("qwen3-1.7b-0.86").forced_onto(dense_layers=())
    data = files.as_json(files.make(ground(), 0.86, compare=other))
    assert data["compare"]["bins"][2] == {"start": 512, "budget": 512, "measured": 512, "p05": 0.97}


def test_what_the_surface_doubts_the_plan_says() -> None:
    thin = tuple(c.replace(prompts=20) if c.start == 512 else c for c in surface().cells)
    doubtful = surface(cells=thin, undecided=("something",))
    notes = " ".join(best(ground(doubtful), 0.85).notes)
    assert "fewer than 48 prompts, so too narrow intervals, at 512 to 768 (20)" in notes
    assert "1 cells in doubt" in notes
    assert "a target of 0.86, not of 0.85" in notes


def test_a_long_bin_that_only_bad_budgets_reached_is_not_measured() -> None:
    figures = {0: RISING[0], 256: RISING[256], 512: {64: 0.3, 128: 0.4}}
    found = best(ground(surface(figures)))
    assert found.budgets == [64, 128]
    assert found.schedule.budget(600) == DENSE


def test_where_only_falling_budgets_would_do_that_is_said() -> None:
    figures = {0: {64: 0.5, 128: 0.9}, 256: {64: 0.9, 128: 0.5}}
    found = surface(figures, bins=(0, 256, 512))
    with pytest.raises(Unreachable, match="would fall with the length"):
        plan(ground(found, lengths=[500]), 0.86)


def test_a_variant_without_measurements_does_not_hide_the_others() -> None:
    both = surface(variants=(variant("unknown"), variant()))
    assert [one.variant.name for one in plan(ground(both), 0.86)] == ["block-mean"]


def test_no_rollout_is_nearer_to_dense_than_dense() -> None:
    floor = tuple(cell("dense", None, start, 0.93) for start in RISING)
    with pytest.raises(Unreachable):
        plan(ground(surface(floor=floor)), 0.93)


def test_a_check_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give the check.json of its schedule"):
        files.make(ground(), 0.86, check=surface())


@pytest.mark.parametrize("target", [0.0, 1.0, -1.0, float("nan")])
def test_targets_are_between_0_and_1(target: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        plan(ground(), target)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bins": (0,)}, "edges that rise"),
        ({"bins": (0, 512, 256)}, "edges that rise"),
        ({"variants": ()}, "one at least"),
        ({"cells": (cell("block-mean", 64, 0, 0.5, low=0.6),)}, "low <= p05"),
        ({"cells": (cell("block-mean", 64, 7, 0.5),)}, "one of the bins"),
    ],
)
def test_surfaces_that_cannot_be(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        surface(**changes)
