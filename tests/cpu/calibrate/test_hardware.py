"""Step times by hand, as sums, and within a tenth of those measured on the machine we know."""

import json
import sys
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.specs import TINY as SPEC

from sparrow.calibration.planning import cost
from sparrow.calibration.planning.cost import ByteModel
from sparrow.calibration.planning.hardware import (
    EngineTimes,
    Hardware,
    StepModel,
    extrapolation_notes,
)
from sparrow.models.spec import shape
from sparrow.schema.schedule import Schedule
from sparrow.sparse import preset

RESULTS = Path(__file__).parents[3] / "bench"
sys.path.insert(0, str(RESULTS))
fit_hardware = import_module("fit_hardware")
errors, fit = fit_hardware.errors, fit_hardware.fit
SHAPES = ("1.7b", "4b", "8b", "14b")
FIXED = Schedule.fixed(52, dense_layers=(0, 1))  # layers 0 and 1 dense
VECTOR, LANDMARK, WEIGHTS = 2 * 2 * 16 * 2, 2 * 16 * 2, SPEC.parameters() * 2
SIZES = {"product_rows": 2, "narrow_pages": 6, "most_rows": 8}
SIZES |= {"least_parameters": 10**6, "most_parameters": 10**9, "points": 0}
RATES = {"weight_bytes_per_s": 1e9, "product_flops_per_s": 1e10, "landmark_bytes_per_s": None}
RATES |= {"dense_bytes_per_s": 4e9, "kept_bytes_per_s": 2e9, "median_error": 0, "worst_error": 0}
TIMES = EngineTimes(layer_us=5, score_us=3, choice_us=2, **SIZES, **RATES)


def machine(engine: EngineTimes | None = TIMES) -> Hardware:
    plain = Hardware(name="mine", bytes_per_s=1e9, flops_per_s=1e11, memory=10**7, reserve=1000)
    return plain.replace(engine=engine)


@cache
def result(size: str) -> dict[str, Any]:
    path = RESULTS / f"2026-11-15-trace-{size}-h200.json"
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def points(size: str) -> list[Any]:
    return fit_hardware.points(result(size))


# Steps.


def test_steps_by_hand() -> None:
    reads, dense_reads = ByteModel(spec=SPEC, schedule=FIXED), ByteModel(spec=SPEC)
    steps = StepModel(machine(), reads)
    # 3 rows are a tile of 4, two of which cost; one of three layers chooses, in 7 pages.
    fixed = 3 * 5e-6 + WEIGHTS / 1e9 + 2 * SPEC.parameters() * 2 / 1e10 + 3e-6 + 2e-6
    assert steps.fixed(3, 100) == pytest.approx(fixed)
    assert steps.fixed(3, 96) == pytest.approx(fixed - 2e-6)
    row = 2 * 100 * VECTOR / 4e9 + 52 * VECTOR / 2e9  # landmarks take no time here
    assert len(steps.per_row(10)) == 11
    assert steps.per_row(100)[100] == pytest.approx(row)
    assert steps(np.array([[100, 100, 100], [96, 1, 1]]))[0] == pytest.approx(fixed + 3 * row)
    assert steps.per_row(40_000).tolist() == StepModel(machine(), reads).per_row(40_000).tolist()
    dense = StepModel(machine(), dense_reads)  # which chooses nothing
    assert dense.fixed(1, 100) == pytest.approx(3 * 5e-6 + WEIGHTS / 1e9)
    assert dense.per_row(100)[100] == pytest.approx(3 * 100 * VECTOR / 4e9)
    # Landmarks count as the engine reads them, also where no budget bites.
    engine = TIMES.replace(landmark_bytes_per_s=1e9, dense_bytes_per_s=None, kept_bytes_per_s=None)
    assert StepModel(machine(engine), reads).per_row(30)[30] == pytest.approx(LANDMARK / 1e9)
    # A machine that was not measured takes its bytes.
    lengths = np.array([[100, 30], [200, 7]])
    plain = StepModel(machine(None), reads)
    assert plain(lengths) == pytest.approx(reads.steps(200)(lengths) / 1e9)


def test_steps_are_sums() -> None:
    lengths = np.random.default_rng(0).integers(1, 5000, (20, 5))
    machines = (machine(), machine(None), Hardware.load("h200"))
    for hardware, schedule in product(machines, (None, FIXED)):
        steps = StepModel(hardware, ByteModel(spec=SPEC, schedule=schedule))
        row = steps.per_row(int(lengths.max()))
        sums = [steps.fixed(5, int(own.max())) + row[own].sum() for own in lengths]
        assert steps(lengths) == pytest.approx(np.array(sums))
        assert row[0] == 0


# What was measured.


@pytest.mark.parametrize("size", SHAPES)
def test_measured_steps_within_a_tenth(size: str) -> None:
    hardware, found = Hardware.load("h200"), []
    for reads in fit_hardware.reads_of(result(size)):
        own = [p for p in points(size) if p.reads.schedule == reads.schedule]
        steps = StepModel(hardware, reads)
        found += [steps(p.lengths[None, :])[0] / p.seconds - 1 for p in own]
    assert len(found) == len(result(size)["points"])
    assert np.abs(found).max() < 0.10
    assert np.median(np.abs(found)) < 0.03
    assert sorted(found) == pytest.approx(sorted(errors(hardware.engine, points(size))))
    whole, _ = fit_hardware.traces(result(size))
    both = fit_hardware.reads_of(result(size))
    dense, sparse = (cost.rollout_seconds(whole, StepModel(hardware, reads)) for reads in both)
    assert [dense, sparse] == pytest.approx([r["seconds"] for r in result(size)["rows"]], rel=0.05)
    assert dense / sparse == pytest.approx(result(size)["speed_up"], rel=0.03)
    # Other batches and lengths, predicted before they were measured: none was fitted.
    path = RESULTS / f"2026-11-15-decode-fresh-{size}-h200.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 6
    for row in rows:
        schedule = None if row["schedule"] is None else preset(row["schedule"])
        reads = ByteModel(spec=shape(f"qwen3-{size}"), schedule=schedule)
        lengths = np.full((1, row["batch"]), round(row["mean_length"]))
        (seconds,) = StepModel(hardware, reads)(lengths)
        assert seconds * 1e3 == pytest.approx(row["ms_step"], rel=0.1)


def test_the_shipped_constants_are_those_of_the_fit() -> None:
    shipped = Hardware.load("h200").engine
    refit = fit([point for size in SHAPES for point in points(size)])
    for name in EngineTimes.model_fields:
        assert getattr(refit, name) == pytest.approx(getattr(shipped, name), rel=2e-3)
    given = json.loads(json.dumps(result("1.7b")))
    given["points"][3]["bytes"] += 1  # of another benchmark
    with pytest.raises(ValueError, match="bytes"):
        fit_hardware.points(given)
    with pytest.raises(ValueError, match="0 points"):
        fit([])


def test_files_of_machines(tmp_path: Path) -> None:
    h200 = Hardware.load("h200")
    published = (cost.H200_BYTES_PER_S, cost.H200_MEMORY, cost.RESERVE)
    assert h200.intensity == pytest.approx(989 / 4.8)
    assert ByteModel(spec=shape("qwen3-1.7b")).capacity() == result("1.7b")["limit"]["capacity"]
    assert (h200.bytes_per_s, h200.memory, h200.reserve) == published
    assert all((RESULTS.parent / source).is_file() for source in h200.sources)
    path = tmp_path / "mine.json"
    for engine in (TIMES, None):
        machine(engine).save(path)
        assert Hardware.load(path) == machine(engine)
    for field, value in {"layer_us": -1.0, "dense_bytes_per_s": 0.0, "product_rows": 0}.items():
        with pytest.raises(ValueError, match=field):
            TIMES.replace(**{field: value})


def test_what_is_extrapolated_is_said() -> None:
    h200 = Hardware.load("h200")
    assert extrapolation_notes(h200, shape("qwen3-4b"), 32) == []
    (small,) = extrapolation_notes(h200, SPEC, 8)
    assert "1.7 to 14.8 billion parameters" in small
    (many,) = extrapolation_notes(h200, shape("qwen3-4b"), 200)
    assert "200 sequences run at once, 60 were measured" in many
    (unknown,) = extrapolation_notes(machine(None), SPEC, 8)
    assert "not measured" in unknown
