"""Plans of made-up surfaces: optimal, honest about what cannot be reached, priced."""

import json
import shlex
from dataclasses import replace
from io import StringIO
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support import surfaces
from support.cli import passed
from support.specs import TINY

from sparrow.calibration.planning import plan as planning
from sparrow.calibration.planning.advice import advise, cheapest_constant
from sparrow.calibration.planning.context import PlanningContext, Workload
from sparrow.calibration.planning.hardware import Hardware
from sparrow.calibration.tables import check_table, layers_table, plan_tables, tails_tables
from sparrow.models.spec import spec_to_hf
from sparrow.schema.calibrate import PlanConfig
from sparrow.schema.evaluation import Estimate
from sparrow.schema.plan import CheckedBin, ComparedBin, PlanFile
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.surface import Cell, LayerLoss, Surface, Variant
from sparrow.sparse import preset

BENCH = Path(__file__).parents[3] / "bench"
BINS = (0, 256, 512, 768)
BUDGETS = (64, 128, 256, 512)
SPEC = replace(TINY, max_positions=40_960)
# Acceptance by bin and budget.
RISING = {
    0: {64: 0.90, 128: 0.95, 256: 1.0, 512: 1.0},
    256: {64: 0.80, 128: 0.90, 256: 0.95, 512: 1.0},
    512: {64: 0.70, 128: 0.85, 256: 0.88, 512: 0.97},
}


def cell(variant: str, budget: int | None, start: int, p05: float, **changes: Any) -> Cell:
    figures = {"p05": p05, "low": p05 - 0.01, "high": min(1.0, p05 + 0.01)} | changes
    return Cell(**surfaces.cell(variant, budget, start, start + 256, **figures))


def variant(name: str = "block-mean", **changes: Any) -> Variant:
    own = {"flow": "block-mean", "source": "block_mean", "field_bytes": 32, "dense_layers": ()}
    return Variant(**surfaces.variant(name) | own | changes)


def surface(figures: dict[int, dict[int, float]] | None = None, **changes: Any) -> Surface:
    found = RISING if figures is None else figures
    given: dict[str, Any] = {"model": "mine", "fingerprint": "cd", "prompt_tokens": 16}
    given |= {"bins": BINS, "budgets": BUDGETS, "variants": (variant(),)}
    given |= {
        "cells": [cell("block-mean", b, s, p) for s, row in found.items() for b, p in row.items()],
        "floor": [cell("dense", None, start, 0.999, low=0.998, high=1.0) for start in found],
    }
    return Surface(**surfaces.surface(**given | changes))


def context(
    found: Surface | None = None, machine: str | Hardware = "h200", **work: Any
) -> PlanningContext:
    hardware = Hardware.load(machine) if isinstance(machine, str) else machine
    lengths = work.pop("lengths", [700] * 8 + [300] * 4)
    made = Workload(name="made up", lengths=np.array(lengths), **work)
    return PlanningContext(surface=found or surface(), spec=SPEC, hardware=hardware, workload=made)


def config(target: float = 0.86, **settings: Any) -> PlanConfig:
    return PlanConfig(surface=Path("surface.json"), target=target, **settings)


def plan(place: PlanningContext, target: float = 0.86, **settings: Any) -> PlanFile:
    beside = {name: settings.pop(name, None) for name in ("compare", "check")}
    return planning.plan(place, config(target, **settings), **beside)


def best(place: PlanningContext, target: float = 0.86, **settings: Any) -> planning.PlanOption:
    return planning.plan_options(place, config(target, **settings))[0]


def notes(place: PlanningContext, target: float = 0.86) -> str:
    return " ".join(planning.notes(place, best(place, target)))


def test_the_least_budget_of_every_bin_that_surely_reaches_the_target() -> None:
    found = best(context())
    assert found.budgets == (64, 128, 256)  # 0.89, 0.89, 0.87 at the lower ends
    assert found.schedule.lengths.tolist() == [0, 256, 512, 768]
    assert found.schedule.budgets.tolist() == [64, 128, 256, DENSE]  # not measured: not promised
    assert [one.p05 for one in found.bins] == [0.90, 0.90, 0.88]
    assert best(context(), 0.88, by="low").budgets == (64, 128, 512)
    assert best(context(), 0.88, by="p05").budgets == (64, 128, 256)  # p05 itself asks less
    # Budgets never fall.
    figures = RISING | {0: {64: 0.5, 128: 0.6, 256: 1.0, 512: 1.0}}
    assert best(context(surface(figures))).budgets == (256, 256, 256)


PLAIN = Hardware(name="plain", bytes_per_s=1e11, memory=10**11, flops_per_s=1e12)


def test_no_other_schedule_that_keeps_the_target_is_faster() -> None:
    """Every rising schedule over the measured budgets, priced as a whole."""
    for target, place in product((0.75, 0.86, 0.9), (context(), context(machine=PLAIN))):
        found = best(place, target)
        reached = {(c.start, c.budget): c.low for c in place.surface.cells}
        others = [
            place.rollout(variant(), variant().schedule(BINS[:-1], choice))
            for choice in product(BUDGETS, repeat=3)
            if list(choice) == sorted(choice)
            and all(
                b >= stop or reached[start, b] >= target
                for start, stop, b in zip(BINS[:-1], BINS[1:], choice, strict=True)
            )
        ]
        assert len(others) > 1
        assert found.seconds == pytest.approx(min(others))
        assert place.rollout(variant(), found.schedule) == pytest.approx(found.seconds)


def test_a_target_out_of_reach_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(planning.Unreachable, match="512") as raised:
        plan(context(), 0.98)
    assert raised.value.nearest == pytest.approx(0.96)
    assert best(context(), raised.value.nearest).budgets == (256, 512, 512)
    dense = best(context(), 0.98, allow_dense=True)
    assert dense.budgets == (256, 512, None)
    assert dense.schedule.budgets.tolist() == [256, 512, DENSE]
    assert dense.bins[2].kept_share == 1  # page summaries, read for nothing, are no K and V
    for budget in (64, 1024):  # above the longest length: all of K and V, and no more
        wide = {start: {budget: 0.99} for start in RISING}
        shares = [one.kept_share for one in best(context(surface(wide))).bins]
        assert all(share <= 1 for share in shares)
        assert (shares == [1] * 3) == (budget == 1024)

    # No rollout is nearer to dense than dense.
    for p05, target, allow_dense in ((0.97, 0.98, True), (0.93, 0.93, False)):
        floor = tuple(cell("dense", None, start, p05) for start in RISING)
        with pytest.raises(planning.Unreachable):
            plan(context(surface(floor=floor)), target, allow_dense=allow_dense)


# Hard misses by bin and budget, one more at the upper end.
MISSES = {
    0: {64: 1.0, 128: 1.0, 256: 0.0, 512: 0.0},
    256: {64: 9.0, 128: 6.0, 256: 3.0, 512: 0.0},
    512: {64: 20.0, 128: 9.0, 256: 4.5, 512: 2.0},
}


def missed(floor: float = 0.0) -> Surface:
    """RISING with hard misses; dense beside dense has some too."""

    def rate(value: float) -> Estimate:
        return Estimate(value=value, low=max(0.0, value - 1), high=value + 1)

    made = surface()
    cells = [c.replace(hard_misses=rate(MISSES[c.start][c.budget])) for c in made.cells]
    return made.replace(cells=cells, floor=[c.replace(hard_misses=rate(floor)) for c in made.floor])


def test_hard_misses_are_a_second_constraint() -> None:
    place = context(missed())
    assert best(place).budgets == best(place, hard_misses=7.0).budgets == (64, 128, 256)
    assert best(place, hard_misses=6.0).budgets == (64, 256, 256)  # 7, 4 and 5.5 at upper ends
    assert best(place, hard_misses=5.0).budgets == (64, 256, 512)
    assert best(place, by="p05", hard_misses=6.0).budgets == (64, 128, 256)
    planned = plan(place, hard_misses=5.0)
    assert planned.hard_misses == 5
    assert [one.hard_misses.value for one in planned.bins] == [1, 3, 2]
    assert [one.budgets for one in planned.sensitivity] == [(64, 256, 512), (64, 256, 512)]
    with pytest.raises(planning.Unreachable, match="hard misses") as raised:
        plan(place, hard_misses=1.5)
    assert raised.value.nearest == -np.inf
    dense = best(place, hard_misses=1.5, allow_dense=True)
    assert dense.budgets == (256, 512, None)  # 1 at budget 64 may be 2; 512 is all of bin 256
    with pytest.raises(planning.Unreachable):  # dense itself misses as many
        best(context(missed(floor=2.0)), hard_misses=1.5, allow_dense=True)


def test_a_surface_without_hard_misses_cannot_be_bounded() -> None:
    with pytest.raises(ValueError, match="calibrate again"):
        plan(context(), hard_misses=5.0)
    part = missed()
    old = part.replace(cells=[part.cells[0].replace(hard_misses=None), *part.cells[1:]])
    with pytest.raises(ValueError, match="hard misses"):
        plan(context(old), hard_misses=5.0)


def test_layers_that_get_less_are_not_taken_for_dense() -> None:
    """A budget of the length keeps everything only where every layer has it."""
    uneven = variant("uneven", shares=(0.25, 1.0, 2.0))
    assert (planning.least_kept(uneven, 512), planning.least_kept(variant(), 512)) == (128, 512)
    figures = {0: {64: 0.5, 256: 0.5, 512: 0.9}}
    cells = tuple(cell("uneven", b, 0, p) for b, p in figures[0].items())
    found = surface(figures, variants=(uneven,), cells=cells, bins=(0, 256))
    assert best(context(found)).budgets == (512,)


def test_the_cheapest_variant_wins_and_the_others_are_told() -> None:
    better = [cell("better", one.budget, one.start, 1.0, high=1.0) for one in surface().cells]
    names = ("unmeasured", "block-mean", "better")
    both = surface(cells=(*surface().cells, *better), variants=tuple(map(variant, names)))
    found = planning.plan_options(context(both, PLAIN), config())
    assert [one.variant.name for one in found] == ["better", "block-mean"]
    assert found[0].seconds < found[1].seconds
    (only,) = planning.plan_options(context(both, PLAIN), config(variant=("block-mean",)))
    assert only.variant.name == "block-mean"
    with pytest.raises(ValueError, match="worse"):
        plan(context(both), 0.86, variant=("worse",))


def test_cells_of_few_prompts_are_not_believed() -> None:
    thin = tuple(c.replace(prompts=7) if c.start == 512 else c for c in surface().cells)
    found = best(context(surface(cells=thin)))
    assert found.budgets == (64, 128)
    assert "lengths over 512" in notes(context(surface(cells=thin)))
    assert found.schedule.budget(600) == DENSE
    none = tuple(c.replace(prompts=7) for c in surface().cells)
    with pytest.raises(ValueError, match="block-mean"):
        plan(context(surface(cells=none)), 0.86)
    reached = {0: RISING[0], 256: RISING[256], 512: {64: 0.3, 128: 0.4}}  # by bad budgets alone
    assert best(context(surface(reached))).schedule.budget(600) == DENSE

    # Bins without measurements keep what the next one needs.
    place = context(surface({256: RISING[256], 512: RISING[512]}))
    assert best(place).budgets == (128, 128, 256)
    assert "lengths 0 on" in notes(place)

    # Where only falling budgets would do, nothing is planned.
    figures = {0: {64: 0.5, 128: 0.9}, 256: {64: 0.9, 128: 0.5}}
    with pytest.raises(planning.Unreachable, match="fall"):
        plan(context(surface(figures, bins=(0, 256, 512)), lengths=[500]), 0.86)


def test_provenance_and_doubts_are_said() -> None:
    found = best(context()).schedule
    assert (found.name, found.model, found.family) == ("mine-0.86", "mine", "qwen3")
    told = {note.key: note.text for note in found.provenance}
    assert ("0.86" in told["target"], told["weights"]) == (True, "cd")
    assert "no faster than dense" in notes(context())
    thin = tuple(c.replace(prompts=20) if c.start == 512 else c for c in surface().cells)
    said = notes(context(surface(cells=thin, undecided=("something",))), 0.85)
    for doubt in ("512 to 768 (20)", "1 cells in doubt", "0.86, not of 0.85"):
        assert doubt in said


# What calibrate says of a surface.


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, ""),
        ({"targets": (0.5,)}, "--target=0.5"),
        ({"targets": (0.98,)}, "--target=0.98 --allow-dense"),
        ({"figures": {start: {512: 0.42} for start in (256, 512)}}, "--target=0.41"),
    ],
)
def test_calibrate_recommends_a_plan_that_works(
    changes: dict[str, Any], step: str, tmp_path: Path
) -> None:
    figures = changes.pop("figures", None)
    floor = {} if figures is None else {"floor": [cell("dense", None, s, 0.5) for s in figures]}
    made = surface(figures, shape=json.dumps(spec_to_hf(SPEC, "bfloat16")), **floor, **changes)
    made.save(tmp_path / "surface.json")
    advice = advise(made, tmp_path)
    assert str(made.targets[0]) in advice.answer
    words = shlex.split(advice.next_step)
    assert " ".join(words[3:]) == step
    passed(*words[1:], "--no-plots")
    assert (tmp_path / "schedule.json").exists()


def test_calibrate_says_why_no_plan_works() -> None:
    shape = {"shape": json.dumps(spec_to_hf(SPEC, "bfloat16"))}
    few = [c.replace(prompts=7) for c in surface().cells]
    assert "--prompts" in advise(surface(cells=few, **shape), Path("x")).next_step
    none = {start: {512: 0.0} for start in (256, 512)}
    floor = [cell("dense", None, start, 0.0, low=0.0) for start in none]
    cells = [cell("block-mean", 512, start, 0.0, low=0.0) for start in none]
    bad = surface(none, floor=floor, cells=cells, **shape)
    assert "--budget=1024" in advise(bad, Path("x")).next_step
    assert cheapest_constant(surface(), 0.86) == (256, "block-mean")
    assert cheapest_constant(surface(), 0.99) is None


# As a file and tables.


def test_tables_fit_80_columns() -> None:
    """Every figure of many bins, large numbers and long names is there."""
    bins = tuple(range(0, 120_000, 5000))
    made = surface(
        bins=bins,
        cells=[surfaces.cell("block-mean", 16_384, *edge) for edge in pairwise(bins)],
        floor=[surfaces.cell("dense", None, *edge) for edge in pairwise(bins)],
    )
    loss = surfaces.layer_loss("block-mean", 64, 0, 48) | {"layers": tuple(range(24))}
    planned = PlanFile(**surfaces.plan(12, 10_000))
    rate = Estimate(value=12.345, low=9.0, high=15.0)
    planned = planned.replace(bins=[one.replace(hard_misses=rate) for one in planned.bins])
    tail = {"p05": 0.8712, "low": 0.8123, "high": 0.9123}
    fields = dict.fromkeys(CheckedBin.model_fields, 0) | tail | {"p0_1": None, "hard_misses": None}
    check = [CheckedBin(**fields | {"start": one.start}) for one in planned.bins]
    screen = StringIO()
    console = Console(width=80, file=screen, markup=False)
    for table in (
        *tails_tables(made, "block-mean"),
        layers_table([LayerLoss(**loss)]),
        check_table(made, 0.86),
        *plan_tables(planned.replace(check=check)),
    ):
        assert console.measure(table).minimum <= 80, table.title
        console.print(table)
    text = screen.getvalue()
    assert "…" not in text
    for cell_ in made.cells:
        assert f"{cell_.p05:.3f}" in text


def test_a_plan_is_a_file_with_everything_beside_it(tmp_path: Any) -> None:
    name = "mine-0.86"
    cells = tuple(cell(name, None, start, 0.87) for start in RISING)
    check = surface(variants=(variant(name),), cells=cells)
    planned = plan(context(most=4), 0.86, compare=preset("qwen3-1.7b-0.86"), check=check)
    (tmp_path / ".plan.json.99999999.unfinished").touch()  # of a process that was killed
    schedule, written = planning.write(planned, tmp_path)
    assert {*tmp_path.iterdir()} == {schedule, written}
    assert Schedule.load(schedule) == planned.schedule
    assert PlanFile.load(written) == planned
    assert [one.budget for one in planned.bins] == [64, 128, 256]
    asides = [(one.target, one.budgets) for one in planned.sensitivity]
    assert asides[1] == (0.88, (64, 128, 512))
    assert planned.compare.differs == ("dense layers (0, 1) (the plan: ())",)
    assert planned.compare.bins[0].measured is None  # with its dense layers
    assert planned.check[0].p05 == 0.87
    assert planned.speed_up == pytest.approx(planned.dense_seconds / planned.seconds)
    assert min(planned.limit, planned.eflops) > 1
    assert all(0 < one.kept_share < 1 for one in planned.bins)
    assert len(plan_tables(planned)) == 4
    with pytest.raises(ValueError, match="check"):
        plan(context(), 0.86, check=surface())
    other = preset("qwen3-1.7b-0.86").forced_onto(dense_layers=())  # of the same rule
    planned = plan(context(), 0.95, compare=other)
    assert planned.compare.bins[2] == ComparedBin(start=512, budget=512, measured=512, p05=0.97)
    low, high = planned.sensitivity
    assert (low.reached, high.reached, high.nearest) == (True, False, pytest.approx(0.96))
    files = sorted(BENCH.glob("*-plan-*.json"))  # plans of earlier weeks open
    assert len(files) > 2
    assert all(PlanFile.load(file).bins for file in files)


def test_surfaces_that_cannot_be() -> None:
    for field, value in (
        ("bins", (0,)),
        ("bins", (0, 512, 256)),
        ("variants", ()),
        ("cells", (cell("block-mean", 64, 0, 0.5, low=0.6),)),
        ("cells", (cell("block-mean", 64, 7, 0.5),)),
    ):
        with pytest.raises(ValueError, match=field):
            surface(**{field: value})
