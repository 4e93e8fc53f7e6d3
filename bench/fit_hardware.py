"""Fit the constants of a machine to the results of `sparrow bench trace --json`.

    PYTHONPATH=. python bench/fit_hardware.py                           # the H200 of the package
    PYTHONPATH=. python bench/fit_hardware.py FILES... --out mine.json --name mine \\
        --bytes-per-s 3.35e12 --flops-per-s 989e12

Prints how far predicted steps are from measured ones: of the shapes that were fitted, of each shape
predicted from the others alone, and of rollouts; predict_steps.py does so of steps that were not
fitted (`sparrow bench decode`).

The fit: least squares of the relative error, with constants that cannot be negative. One that comes
out as zero costs nothing that these steps show. Constants are kept to four digits: more would say
nothing, and differ between linear algebra libraries.

A result names what it measured by rows, mean length and bytes. The trace is a function of what the
result also holds, so the lengths of every row follow, and the bytes prove them (`points`).
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from sparrow.benchmarks import timing
from sparrow.benchmarks.trace import BACK, MIDDLE, PROMPT, begin, find_states
from sparrow.calibration.planning import cost, hardware
from sparrow.calibration.planning.cost import ByteModel, FloatArray, IntArray, Trace
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import pages_for
from sparrow.models.spec import shape

HERE = Path(__file__).parent
TRACES = [HERE / f"2026-11-15-trace-{size}-h200.json" for size in ("1.7b", "4b", "8b", "14b")]
OUT = HERE.parent / "sparrow" / "calibration" / "planning" / "machines" / "h200.json"
NOTE = (
    "fitted to {}, in pages of 16 under the block-mean flow, one schedule for all rows of a step; "
    "other shapes, other flows and more rows than most_rows are extrapolated"
)
ALONE = "; of one shape, so time of layers and of weights is not told apart: only for that shape"
TOLERANCE = 0.10
DIGITS = 4  # of fitted constants


def main() -> None:
    options = _options()
    results = {_label(path): json.loads(path.read_text("utf-8")) for path in options.files}
    measured = {name: points(result) for name, result in results.items()}
    shapes = sorted({f"{result['model']} ({result['dtype']})" for result in results.values()})
    machine = hardware.Hardware(
        name=options.name,
        bytes_per_s=options.bytes_per_s,
        flops_per_s=options.flops_per_s,
        memory=options.memory or int(min(result["memory"] for result in results.values())),
        reserve=cost.RESERVE,
        engine=fit([point for own in measured.values() for point in own]),
        note=NOTE.format(", ".join(shapes)) + (ALONE if len(shapes) == 1 else ""),
        sources=tuple(results),
        command=shlex.join(["PYTHONPATH=.", "python", "bench/fit_hardware.py", *sys.argv[1:]]),
    )
    machine.save(options.out)
    _print_errors(machine, measured)
    _print_rollouts(machine, results)
    print(f"\n{options.out}: {machine.engine}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, help="results of sparrow bench trace --json")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name")
    parser.add_argument("--bytes-per-s", type=float, help="of the memory, published")
    parser.add_argument("--flops-per-s", type=float, help="in 16 bits, published")
    parser.add_argument("--memory", type=int, help="bytes (default: what the results ran with)")
    options = parser.parse_args()
    ours = {"out": OUT, "name": "h200", "bytes_per_s": cost.H200_BYTES_PER_S, "flops_per_s": 989e12}
    missing = [name for name in ours if getattr(options, name) is None]
    if options.files and missing:
        parser.error("files need --out, --name, --bytes-per-s and --flops-per-s of their machine")
    vars(options).update({name: ours[name] for name in missing})
    options.files = options.files or TRACES
    return options


def _label(path: Path) -> str:
    """The path relative to the repository, or as it is."""
    root = HERE.parent.resolve()
    inside = path.resolve().is_relative_to(root)
    return path.resolve().relative_to(root).as_posix() if inside else str(path)


# The fit.


CONSTANTS = tuple(hardware.EngineTimes.model_fields)[:8]  # from layer_us to landmark_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Point:
    """A measured step: what it read, the total lengths of its rows, and its time."""

    reads: ByteModel
    lengths: IntArray
    seconds: float


def fit(points: Sequence[Point]) -> hardware.EngineTimes:
    """Fit the constants to these steps; return them with the errors."""
    if len(points) < len(CONSTANTS):
        raise ValueError(f"expected at least {len(CONSTANTS)} points, got {len(points)} points")
    work = np.stack(
        [_work(point, hardware.PRODUCT_ROWS, hardware.NARROW_PAGES) for point in points]
    )
    share = work / np.array([[point.seconds] for point in points])
    costs = non_negative(share, np.ones(len(points)))
    measured = dict(zip(CONSTANTS, costs.tolist(), strict=True))
    constants: dict[str, Any] = {name: _constant(name, cost) for name, cost in measured.items()}
    sizes = [point.reads.spec.parameters() for point in points]
    times = hardware.EngineTimes(
        **constants,
        most_rows=max(len(point.lengths) for point in points),
        least_parameters=min(sizes),
        most_parameters=max(sizes),
        points=len(points),
        median_error=0,
        worst_error=0,
    )
    error = np.abs(errors(times, points))
    return times.replace(
        median_error=_short(float(np.median(error))), worst_error=_short(float(error.max()))
    )


def errors(times: hardware.EngineTimes, points: Sequence[Point]) -> FloatArray:
    """Relative error of the predicted time of every point."""
    costs = np.concatenate([times.fixed_costs(), times.row_costs()])
    sizes = times.product_rows, times.narrow_pages
    predicted = np.array([_work(point, *sizes) @ costs for point in points])
    return predicted / np.array([point.seconds for point in points]) - 1


def non_negative(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 of least |matrix @ x - target|; columns may differ by many orders of magnitude."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    return nnls(matrix / scale, target)[0] / scale


def _work(point: Point, product_rows: int, narrow_pages: int) -> FloatArray:
    """The quantities of a step, in the order of CONSTANTS."""
    reads = replace(point.reads, idle_landmarks=True)
    rows, longest = len(point.lengths), int(point.lengths.max())
    fixed = hardware.fixed_work(reads, rows, longest, product_rows, narrow_pages)
    return np.concatenate([fixed, [part.sum() for part in reads.rows(point.lengths)]])


def _constant(name: str, cost: float) -> float | None:
    """Seconds of a unit as a constant: microseconds, or units a second."""
    if name.endswith("_us"):
        return _short(cost * 1e6)
    return _short(1 / cost) if cost > 0 else None


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


# From a result back to its steps.


def points(result: dict[str, Any]) -> list[Point]:
    """Every measured step of a result, dense ones first, as the result lists them.

    Its time is that of the faster round: the first may still hold work of starting up.
    """
    both, states = traces(result), []
    for reads in reads_of(result):
        context = min(reads.spec.max_positions, int(both[0].lengths.max()) + BACK + PAGE)
        found = find_states(both, pages_for(context, PAGE), reads.steps(context))
        states += [(reads, begin(kind, lengths) + MIDDLE) for kind, lengths in found]
    return [_point(given, *state) for given, state in zip(result["points"], states, strict=True)]


def reads_of(result: dict[str, Any]) -> tuple[ByteModel, ByteModel]:
    """The byte models of a result, dense and sparse."""
    schedule, spec = timing.schedule_named(result["schedule"]), shape(result["model"])
    itemsize = getattr(torch, result["dtype"]).itemsize
    settings: dict[str, Any] = {"itemsize": itemsize, "page": PAGE, "idle_landmarks": True}
    return ByteModel(spec=spec, **settings), ByteModel(spec=spec, schedule=schedule, **settings)


def traces(result: dict[str, Any]) -> tuple[Trace, Trace]:
    """The traces of a result: the whole workload, and the measured part."""
    final, capacity = np.asarray(result["lengths"]), result["limit"]["capacity"]
    cut = np.minimum(final, result["confirmation"]["cutoff"])
    whole, short = (
        cost.trace(ends, prompt=PROMPT, capacity=capacity, page=PAGE) for ends in (final, cut)
    )
    return whole, short


def _point(given: dict[str, Any], reads: ByteModel, lengths: IntArray) -> Point:
    expected = len(lengths), int(lengths.max()), reads.step(lengths).total
    measured = given["rows"], given["longest"], given["bytes"]
    if measured != expected:
        raise ValueError(
            f"rows, longest and bytes of a point: expected {expected}, got {measured}: the result "
            "was made by another version of the benchmark"
        )
    return Point(reads=reads, lengths=lengths, seconds=min(given["ms_step_rounds"]) / 1e3)


# What is printed: a line of figures for each file.


def _print_errors(machine: hardware.Hardware, measured: dict[str, list[Point]]) -> None:
    """Of the shapes that were fitted, and of each shape predicted from the others alone."""
    assert machine.engine is not None
    print("steps: number, median error, worst, lowest, highest, how many over 10 %")
    for name, own in measured.items():
        print(f"{name}, fitted: {_figures(errors(machine.engine, own))}")
        rest = [point for other, ps in measured.items() if other != name for point in ps]
        if rest:
            print(f"{name}, from the others: {_figures(errors(fit(rest), own))}")


def _figures(error: FloatArray) -> str:
    size = np.abs(error)
    shares = (np.median(size), size.max(), error.min(), error.max())
    shown = " ".join(f"{share:+.1%}" for share in shares)
    return f"{len(error)} {shown} {(size > TOLERANCE).sum()}"


def _print_rollouts(machine: hardware.Hardware, results: dict[str, Any]) -> None:
    print("\nrollouts of the whole trace, summed from measured steps; predicted ones in brackets")
    for name, result in results.items():
        whole, _ = traces(result)
        times = [row["seconds"] for row in result["rows"]]
        models = [hardware.StepModel(machine, reads) for reads in reads_of(result)]
        dense, sparse = (cost.rollout_seconds(whole, model) for model in models)
        gain, expected = times[0] / times[1], dense / sparse
        seconds = f"dense {times[0]:.1f} ({dense:.1f}) s, sparse {times[1]:.1f} ({sparse:.1f}) s"
        speed_up = f"speed-up {gain:.3f} ({expected:.3f}, {expected / gain - 1:+.1%})"
        print(f"{name}: {seconds}, {speed_up}")


if __name__ == "__main__":
    main()
