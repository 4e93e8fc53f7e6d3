"""From measured decode steps to the constants of a machine: `EngineTimes`.

Least squares of the relative error, with constants that cannot be negative. A constant that comes
out as zero costs nothing that these steps show. Constants are kept to four digits: more would say
nothing, and differ between linear algebra libraries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparrow.calibrate.planning.cost import ByteModel, FloatArray, IntArray
from sparrow.calibrate.planning.hardware import (
    NARROW_PAGES,
    PRODUCT_ROWS,
    EngineTimes,
    as_read,
    fixed_work,
)

DIGITS = 4
CONSTANTS = (
    "layer_us",
    "weight_bytes_per_s",
    "product_flops_per_s",
    "score_us",
    "choice_us",
    "dense_bytes_per_s",
    "kept_bytes_per_s",
    "landmark_bytes_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Point:
    """A measured step: what it read, the total lengths of its rows, and its time."""

    reads: ByteModel
    lengths: IntArray
    seconds: float


def fit(points: Sequence[Point]) -> EngineTimes:
    """The constants that come closest to these steps, and how close."""
    if len(points) < len(CONSTANTS):
        raise ValueError(f"fit: got {len(points)} points, allowed: {len(CONSTANTS)} and more")
    work = np.stack([_work(point, PRODUCT_ROWS, NARROW_PAGES) for point in points])
    share = work / np.array([[point.seconds] for point in points])
    costs = non_negative(share, np.ones(len(points)))
    measured = dict(zip(CONSTANTS, costs.tolist(), strict=True))
    found: dict[str, Any] = {name: _constant(name, cost) for name, cost in measured.items()}
    sizes = [point.reads.spec.parameters() for point in points]
    times = EngineTimes(
        **found,
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


def errors(times: EngineTimes, points: Sequence[Point]) -> FloatArray:
    """Predicted over measured time, less one, of every point."""
    costs = np.concatenate([times.fixed_costs(), times.row_costs()])
    sizes = times.product_rows, times.narrow_pages
    predicted = np.array([_work(point, *sizes) @ costs for point in points])
    return predicted / np.array([point.seconds for point in points]) - 1


def non_negative(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 of least |matrix @ x - target|, by the active set method of Lawson and Hanson."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    unit, x = matrix / scale, np.zeros(matrix.shape[1])
    used = np.zeros(len(x), dtype=bool)
    while True:
        pull = np.where(used, -np.inf, unit.T @ (target - unit @ x))
        if pull.max() <= 1e-9 * np.linalg.norm(target):
            return x / scale
        used[pull.argmax()] = True
        x = _settle(unit, target, x, used)


def _settle(unit: FloatArray, target: FloatArray, x: FloatArray, used: Any) -> FloatArray:
    """Least squares over the columns in use; those that would turn negative leave it, in place."""
    while True:
        best = np.zeros_like(x)
        best[used] = np.linalg.lstsq(unit[:, used], target, rcond=None)[0]
        bad = used & (best <= 0)
        if not bad.any():
            return best
        x = x + (x[bad] / (x[bad] - best[bad])).min() * (best - x)
        used &= x > 1e-15


def _work(point: Point, product_rows: int, narrow_pages: int) -> FloatArray:
    """What a step does, in the order of CONSTANTS."""
    reads = as_read(point.reads)
    rows, longest = len(point.lengths), int(point.lengths.max())
    fixed = fixed_work(reads, rows, longest, product_rows, narrow_pages)
    return np.concatenate([fixed, [part.sum() for part in reads.rows(point.lengths)]])


def _constant(name: str, cost: float) -> float | None:
    """Seconds of a unit as a constant: microseconds, or units a second."""
    if name.endswith("_us"):
        return _short(cost * 1e6)
    return _short(1 / cost) if cost > 0 else None


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
