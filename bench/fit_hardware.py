"""Fit the constants of a machine to what `sparrow bench trace --json` measured on it.

    PYTHONPATH=. python bench/fit_hardware.py                           # the H200 of the package
    PYTHONPATH=. python bench/fit_hardware.py FILES... --out mine.json --name mine \\
        --bytes-per-s 3.35e12 --flops-per-s 989e12

Prints how far predicted steps are from measured ones: of the shapes that were fitted, of each shape
predicted from the others alone, of steps that were not fitted (`bench decode`), and of rollouts.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sparrow.bench import timing
from sparrow.bench.trace_points import points, reads_of, traces
from sparrow.calibrate.planning import cost
from sparrow.calibrate.planning.cost import ByteModel
from sparrow.calibrate.planning.hardware import EngineTimes, Hardware, StepModel
from sparrow.calibrate.planning.hardware_fit import Point, errors, fit
from sparrow.models.shapes import shape

HERE = Path(__file__).parent
TRACES = [HERE / f"2026-11-15-trace-{size}-h200.json" for size in ("1.7b", "4b", "8b", "14b")]
OTHERS = [HERE / f"2026-11-15-decode{which}-h200.json" for which in ("", "-1024")]
OUT = HERE.parent / "sparrow" / "calibrate" / "planning" / "machines" / "h200.json"
NOTE = (
    "fitted to {}, in pages of 16 under the block-mean flow, one schedule for all rows of a step; "
    "other shapes, other flows and more rows than most_rows are extrapolated"
)
ALONE = "; of one shape, so time of layers and of weights is not told apart: only for that shape"
TOLERANCE = 0.10
UNSTEADY = 1.03  # rounds of a point that differ by more are shown


def main() -> None:
    options = _options()
    results = {_label(path): json.loads(path.read_text("utf-8")) for path in options.files}
    measured = {name: points(result) for name, result in results.items()}
    machine = Hardware(
        name=options.name,
        bytes_per_s=options.bytes_per_s,
        flops_per_s=options.flops_per_s,
        memory=options.memory or int(min(result["memory"] for result in results.values())),
        reserve=cost.RESERVE,
        engine=fit([point for own in measured.values() for point in own]),
        note=_note(results),
        sources=tuple(results),
        command=shlex.join(["PYTHONPATH=.", "python", "bench/fit_hardware.py", *sys.argv[1:]]),
    )
    machine.save(options.out)
    console = Console(width=140)
    for table in _tables(machine, results, measured):
        console.print(table)
    _say_unsteady(console, results)
    console.print(f"{options.out}: {machine.engine}", soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, help="results of sparrow bench trace --json")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name")
    parser.add_argument("--bytes-per-s", type=float, help="of the memory, published")
    parser.add_argument("--flops-per-s", type=float, help="in 16 bits, published")
    parser.add_argument("--memory", type=int, help="bytes (default: what the results ran with)")
    options = parser.parse_args()
    told = ("out", "name", "bytes_per_s", "flops_per_s")
    if options.files and None in (getattr(options, name) for name in told):
        parser.error("files need --out, --name, --bytes-per-s and --flops-per-s of their machine")
    for name, default in zip(told, (OUT, "h200", cost.H200_BYTES_PER_S, 989e12), strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    options.files = options.files or TRACES
    return options


def _note(results: dict[str, Any]) -> str:
    shapes = sorted({f"{result['model']} ({result['dtype']})" for result in results.values()})
    alone = ALONE if len(shapes) == 1 else ""
    return NOTE.format(", ".join(shapes)) + alone


def _label(path: Path) -> str:
    """The file as the repository names it, or as it was given."""
    root = HERE.parent.resolve()
    inside = path.resolve().is_relative_to(root)
    return path.resolve().relative_to(root).as_posix() if inside else str(path)


# Tables: one function for each, a row of figures for each file or case.


def _tables(
    machine: Hardware, results: dict[str, Any], measured: dict[str, list[Point]]
) -> Iterator[Table]:
    assert machine.engine is not None
    yield _fitted(machine.engine, measured)
    if len(measured) > 1:
        yield _held_out(measured)
    yield _rollouts(machine, results)
    if machine.name == "h200":
        yield _not_fitted(machine)


def _fitted(times: EngineTimes, measured: dict[str, list[Point]]) -> Table:
    return _errors(
        "Steps that were fitted", {name: errors(times, own) for name, own in measured.items()}
    )


def _held_out(measured: dict[str, list[Point]]) -> Table:
    found = {}
    for name, own in measured.items():
        rest = [point for other, ps in measured.items() if other != name for point in ps]
        found[name] = errors(fit(rest), own)
    return _errors("Steps of each shape, from the other shapes alone", found)


def _errors(title: str, found: dict[str, Any]) -> Table:
    headings = ("steps", "median", "worst", "lowest", "highest", f"over {TOLERANCE:.0%}")
    table = _table(title, "file", *headings)
    for name, error in found.items():
        size = np.abs(error)
        figures = (np.median(size), size.max(), error.min(), error.max())
        over = str(int((size > TOLERANCE).sum()))
        table.add_row(name, str(len(error)), *(f"{x:+.1%}" for x in figures), over)
    return table


def _rollouts(machine: Hardware, results: dict[str, Any]) -> Table:
    headings = ("dense s", "predicted", "sparse s", "predicted", "speed-up", "predicted", "error")
    table = _table("Rollouts of the whole trace, summed from measured steps", "file", *headings)
    for name, result in results.items():
        whole, _ = traces(result)
        told = [row["seconds"] for row in result["rows"]]
        found = [
            cost.rollout_seconds(whole, StepModel(machine, reads)) for reads in reads_of(result)
        ]
        gain, expected = told[0] / told[1], found[0] / found[1]
        pairs = (f"{x:.1f}" for pair in zip(told, found, strict=True) for x in pair)
        last = (f"{gain:.3f}", f"{expected:.3f}", f"{expected / gain - 1:+.1%}")
        table.add_row(name, *pairs, *last)
    return table


def _not_fitted(machine: Hardware) -> Table:
    table = _table("Steps that were not fitted", "case", "measured ms", "predicted", "error")
    for path in OTHERS:
        result = json.loads(path.read_text("utf-8"))
        for row in result["rows"]:
            case = f"{row['batch']} x {row['context']} {row['schedule'] or 'dense'}"
            expected = _decode_ms(machine, result["model"], row)
            error = f"{expected / row['ms_step'] - 1:+.1%}"
            table.add_row(case, f"{row['ms_step']:.3f}", f"{expected:.3f}", error)
    return table


def _decode_ms(machine: Hardware, model: str, row: dict[str, Any]) -> float:
    """Mean over the steps of a case of `bench decode`, whose rows have equal lengths."""
    reads = ByteModel(spec=shape(model), schedule=timing.schedule_named(row["schedule"]))
    lengths = np.arange(row["context"] - row["steps"], row["context"]) + 1
    steps = np.repeat(lengths[:, None], row["batch"], axis=1)
    return float(StepModel(machine, reads)(steps).mean() * 1e3)


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(first, title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _say_unsteady(console: Console, results: dict[str, Any]) -> None:
    for name, result in results.items():
        for point in result["points"]:
            rounds: Sequence[float] = point["ms_step_rounds"]
            if max(rounds) > UNSTEADY * min(rounds):
                shown = " and ".join(f"{each:.3f}" for each in rounds)
                what = f"{point['who']}, {point['rows']} rows of {point['mean_length']:.0f}"
                console.print(f"{name}: {what}: rounds of {shown} ms, the faster one counts")


if __name__ == "__main__":
    main()
