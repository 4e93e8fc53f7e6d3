"""Machines: their published figures, and measured times of our engine's decode steps.

A step's time is a sum, so that a planner can take it apart: what a step costs whatever its rows,
and of each row the bytes that are read of it, each kind at the rate that was measured for it.

    seconds = fixed(rows, longest) + sum over rows of per_row[length]

Constants are those of one engine on one machine (`EngineTimes`). An unmeasured machine has
none: its steps take as long as their bytes at the published rate, and its note says so.
bench/fit_hardware.py fits them to measured steps. numpy and no torch: plans read this too.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from sparrow.calibration.planning.cost import RESERVE, ByteModel, FloatArray, IntArray
from sparrow.schema.base import File, Record

if TYPE_CHECKING:  # that room loads torch
    from sparrow.models.spec import ModelSpec

UNMEASURED = "not measured: bytes alone, all at the published rate, which no engine reaches"
PRODUCT_ROWS = 16  # rows of the narrowest tile of our products
NARROW_PAGES = 128  # of a table, up to which choosing pages is short work
MACHINES = Path(__file__).parent / "machines"
MOST_COUNT = 2**60  # of bytes, weights, microseconds
BOOK = 16_384  # lengths that are looked up at first

Rate = Annotated[float, Field(gt=0, le=1e30)]
Cost = Annotated[float, Field(ge=0, le=MOST_COUNT)]
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]


class EngineTimes(Record):
    """What a decode step of our engine costs on a machine. A rate of None: it takes no time.

    layer_us              kernels of a layer, beyond what they read
    weight_bytes_per_s    weights, read once a step
    product_flops_per_s   products with rows beyond the first `product_rows`, which come for free;
                          they run in tiles, so rows are rounded up to powers of two
    score_us              a layer that chooses pages: scoring and choosing, beyond what they read
    choice_us             added to that where a row has more than `narrow_pages` pages
    dense_bytes_per_s     keys and values of layers that keep everything
    kept_bytes_per_s      keys and values of chosen pages
    landmark_bytes_per_s  what pages are chosen by
    most_rows             rows of the largest step measured: more are extrapolated
    least_parameters      of the smallest model measured
    most_parameters       of the largest: others are extrapolated
    """

    layer_us: Cost
    weight_bytes_per_s: Rate | None
    product_flops_per_s: Rate | None
    score_us: Cost
    choice_us: Cost
    dense_bytes_per_s: Rate | None
    kept_bytes_per_s: Rate | None
    landmark_bytes_per_s: Rate | None
    product_rows: Annotated[int, Field(gt=0, le=MOST_COUNT)] = PRODUCT_ROWS
    narrow_pages: Count = NARROW_PAGES
    most_rows: Count
    least_parameters: Count
    most_parameters: Count
    points: Count  # that the constants were fitted to
    median_error: Cost  # over those, as a share of the measured time
    worst_error: Cost

    def fixed_costs(self) -> FloatArray:
        """Seconds of a unit of each of `fixed_work`."""
        rates = _per_unit(self.weight_bytes_per_s, self.product_flops_per_s)
        return np.array([self.layer_us * 1e-6, *rates, self.score_us * 1e-6, self.choice_us * 1e-6])

    def row_costs(self) -> FloatArray:
        """Seconds of a byte of each part of `ByteModel.rows`."""
        return _per_unit(self.dense_bytes_per_s, self.kept_bytes_per_s, self.landmark_bytes_per_s)


class Hardware(File):
    """A machine: published figures, and the times of our engine where they were measured."""

    what: ClassVar[str] = "machine"

    name: Annotated[str, Field(min_length=1)]
    bytes_per_s: Rate  # of its memory, published
    flops_per_s: Rate  # in 16 bits, published
    memory: Annotated[int, Field(gt=0, le=MOST_COUNT)]  # bytes
    reserve: Count = RESERVE  # bytes that hold neither weights nor keys and values
    engine: EngineTimes | None = None
    note: str = UNMEASURED
    sources: tuple[str, ...] = ()  # files that the times were fitted to
    command: str = ""  # that fitted them

    @classmethod
    def load(cls, source: str | Path) -> "Hardware":
        """A machine of the package by name, or any that `save` wrote by path."""
        if str(source) in known():
            return super().load(MACHINES / f"{source}.json")
        if Path(source).suffix == ".json":
            return super().load(source)
        names = ", ".join(known())
        raise ValueError(f"no machine {str(source)!r}; known: {names}, or a .json file of one")

    @property
    def intensity(self) -> float:
        """Operations that take as long as reading one byte, by the published figures."""
        return self.flops_per_s / self.bytes_per_s


def known() -> tuple[str, ...]:
    """Names of the machines that the package knows."""
    return tuple(sorted(file.stem for file in MACHINES.glob("*.json")))


class StepModel:
    """Seconds of a model's decode steps on a machine. A `cost.StepSeconds`, and its parts.

    Where the engine was measured, landmarks count in every sparse layer, also where no budget
    bites: the constants were fitted with that count, which is a little more than kernels read.
    """

    def __init__(self, hardware: Hardware, reads: ByteModel) -> None:
        self.hardware = hardware
        self.reads = replace(reads, idle_landmarks=True) if hardware.engine else reads
        self._seconds = np.zeros(1)  # of a row, by length

    def fixed(self, rows: int, longest: int) -> float:
        """Seconds of a step that do not depend on lengths, but for the longest: table widths do."""
        engine = self.hardware.engine
        if engine is None:
            return self.reads.weights / self.hardware.bytes_per_s
        work = fixed_work(self.reads, rows, longest, engine.product_rows, engine.narrow_pages)
        return float(work @ engine.fixed_costs())

    def per_row(self, longest: int) -> FloatArray:
        """Seconds that a row adds to a step, by its total length from 0 to `longest`.

        On the machines measured so far they are the same beside any number of rows.
        """
        if longest >= len(self._seconds):
            upto = max(longest, 2 * len(self._seconds), BOOK)
            parts, engine = self.reads.rows(np.arange(1, upto + 1)), self.hardware.engine
            seconds = parts.sum(axis=0) / self.hardware.bytes_per_s
            if engine is not None:
                seconds = np.stack([*parts], axis=-1) @ engine.row_costs()
            self._seconds = np.concatenate([[0.0], seconds])
        return self._seconds[: longest + 1]

    def __call__(self, lengths: IntArray) -> FloatArray:
        """Seconds of steps, given the total lengths of their rows [steps, rows]."""
        rows, longest = lengths.shape[1], lengths.max(axis=1)
        row_seconds = self.per_row(int(longest.max()))[lengths].sum(axis=1)
        engine = self.hardware.engine
        narrow = 1 if engine is None else max(1, engine.narrow_pages * self.reads.page)
        wide = longest > narrow  # all that fixed costs depend on beside the rows
        return row_seconds + np.where(wide, self.fixed(rows, narrow + 1), self.fixed(rows, narrow))


def extrapolation_notes(hardware: Hardware, spec: "ModelSpec", rows: int) -> list[str]:
    """Return notes on how far a model is from those that the machine was measured with."""
    engine, size = hardware.engine, spec.parameters()
    if engine is None:
        return [hardware.note]
    least, most = engine.least_parameters, engine.most_parameters
    notes = []
    if not least <= size <= most:
        notes.append(
            f"step times on {hardware.name} were fitted to models of {least / 1e9:.1f} to "
            f"{most / 1e9:.1f} billion parameters: for {size / 1e6:.1f} million they are "
            "extrapolated, and the speed-up with them"
        )
    if rows > engine.most_rows:
        notes.append(
            f"up to {rows} sequences run at once, {engine.most_rows} were measured: step times "
            "beyond are extrapolated"
        )
    return notes


def fixed_work(
    reads: ByteModel, rows: int, longest: int, product_rows: int, narrow_pages: int
) -> FloatArray:
    """Count the fixed work of a step, in the order of `EngineTimes.fixed_costs`."""
    tile = 1 << (rows - 1).bit_length()
    products = 2 * reads.weights / reads.itemsize * max(0, tile - product_rows)
    wide = longest > narrow_pages * reads.page
    scored = reads.scored_layers
    return np.array([reads.spec.layers, reads.weights, products, scored, scored * wide], np.float64)


def _per_unit(*rates: float | None) -> FloatArray:
    return np.array([0.0 if rate is None else 1 / rate for rate in rates])
