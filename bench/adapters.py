"""What adapters of requests cost decode steps, and one engine with several against several engines.

    python bench/adapters.py > adapters.jsonl
    python bench/adapters.py --model tiny --device cpu --batch 8 --context 64 --steps 4 --rounds 1

steps   an engine with room for the most adapters; its rows use 2, 4 or 8 of them in turns, or none.
        us: of a projection, beyond the step without adapters (`fused` by our kernels, `unfused` by
        the definition of the four products). floor_us: A and B of the adapters in use, read at the
        memory's published speed.
serve   N adapters (of the first rank) in the largest batch of one engine, against N engines, each
        with the weights of one adapter merged and its share of the rows. The engines take turns:
        each step reads all weights of its own, and each product alone fills the memory's bandwidth,
        so running them at the same time could not be much faster (nor may it be done in one
        process: our products count arrivals in memory that one stream of a device may use).

Rows as in `sparrow bench decode`: random keys and values, dense. Times are medians over rounds in
which cases alternate. Prints a line of JSON for every case, then two short tables.
"""

import argparse
import copy
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from sparrow import models, ops
from sparrow.benchmarks import decode, timing
from sparrow.engine import Engine
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import Sample, pages_for
from sparrow.engine.runner import PAGES
from sparrow.models.checkpoint import pick_device
from sparrow.models.lora import FUSED, Adapter, module_sizes
from sparrow.models.spec import SHAPES

TINY = {"layers": 3, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "head_size": 32}
GIB = 2**30
ROOM = 8 * PAGE  # tokens that rows may draw beyond the context
Row = dict[str, Any]


def build(model: models.Decoder, rows: int, context: int, capacity: int, rank: int) -> Engine:
    """An engine for these rows, with a random cache and without page summaries."""
    spec = model.spec
    fields = ops.kv_fields(PAGE, spec.head_size, model.dtype)
    page_bytes = ops.page_bytes(fields, layers=spec.layers, kv_heads=spec.kv_heads)
    most = max(context, PAGES[0] * PAGE) + ROOM
    engine = Engine(
        model,
        max_running=rows,
        max_context=most,
        kv_bytes=rows * pages_for(most, PAGE) * page_bytes,
        adapters=capacity,
        adapter_rank=rank,
        rule=None,
    )
    decode.fill(engine)
    return engine


def unfused(model: models.Decoder) -> AbstractContextManager[Any]:
    """Products with updates run their definition in this with-block; on a CPU they always do."""
    if model.device.type != "cuda":
        return nullcontext()
    from sparrow.ops.kernels import layers

    plain = layers.supports

    def supports(op: str, *tensors: Any, update: ops.LowRank | None = None, **options: Any) -> bool:
        return update is None and plain(op, *tensors, **options)

    return patch.object(layers, "supports", supports)


@contextmanager
def running(
    engine: Engine, names: Sequence[str | None], context: int, steps: int
) -> Iterator[list[Sample]]:
    """As many rows as the engine has, which use these adapters in turns, after the warm-up."""
    contexts = [context - decode.WARM - steps] * engine.max_running
    with decode.running(engine, contexts, None, room=decode.WARM + 2 * steps + 2) as samples:
        for sample, name in zip(samples, cycle(names), strict=False):
            request, slot = sample.request, engine._adapters.find(name)
            request.adapter, request.adapter_slot = name, slot
            assert sample.row is not None
            engine.runner.rows.adapter_R[sample.row] = slot.slot
        timing.repeat(engine.step, decode.WARM)
        timing.synchronize(engine.model.device)
        yield samples


def measure(
    engines: Sequence[Engine], names: Sequence[str | None], context: int, steps: int
) -> tuple[float, float]:
    """Milliseconds of a step of all engines, one after the other: with the engine, device alone."""
    device = engines[0].model.device
    with ExitStack() as stack:
        groups = [stack.enter_context(running(one, names, context, steps)) for one in engines]
        lengths = [one.runner.rows.length_R.clone() for one in engines]

        def step() -> None:
            for one in engines:
                one.step()

        def alone() -> None:
            for one, samples in zip(engines, groups, strict=True):
                one.runner.decode(samples)

        whole = timing.seconds(partial(timing.repeat, step, steps), device) / steps
        for one, length_R in zip(engines, lengths, strict=True):
            one.runner.rows.length_R.copy_(length_R)
        return whole * 1e3, timing.device_seconds(alone, steps, device) * 1e3


def load(engine: Engine, adapter: Adapter, count: int) -> list[str]:
    """The same adapter under many names: times do not depend on its numbers."""
    names = [f"adapter {number}" for number in range(count)]
    for name in names:
        engine.load_adapter(name, adapter)
    return names


def floor(model: models.Decoder, adapters: int, rank: int) -> float | None:
    """Microseconds of a projection to read A and B of these adapters."""
    peak = timing.peak_bandwidth(model.device)
    numbers = adapters * rank * sum(sum(sizes) for sizes in module_sizes(model.spec).values())
    return None if peak is None else numbers * model.dtype.itemsize / peak / len(FUSED) * 1e6


def steps_of(
    model: models.Decoder, asked: argparse.Namespace, batch: int, adapter: Adapter
) -> list[Row]:
    """Steps of one batch without adapters, and with each number of them, fused and unfused."""
    most, rank = max(asked.adapters), adapter.rank
    engines = [build(model, batch, asked.context, most, rank) for _ in range(2)]
    names, _ = (load(engine, adapter, most) for engine in engines)
    cases: list[tuple[int, bool]] = [(0, True)]
    cases += [(count, fused) for count in asked.adapters for fused in (True, False)]
    times: dict[tuple[int, bool], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(asked.rounds):
        for count, fused in cases:
            with nullcontext() if fused else unfused(model):
                used: list[str | None] = [*names[:count]] or [None]
                engine = engines[0 if fused else 1]
                times[count, fused].append(measure([engine], used, asked.context, asked.steps))
    found: list[Row] = []
    for count, fused in cases:
        ms_step, ms_device = (median(part) for part in zip(*times[count, fused], strict=True))
        row: Row = {"case": "steps", "batch": batch, "rank": rank, "adapters": count}
        row |= {"fused": fused, "ms_step": ms_step, "ms_device": ms_device}
        if count:
            more = ms_device - found[0]["ms_device"]
            row["us"] = more * 1e3 / (len(FUSED) * model.spec.layers)
            row |= {
                "ratio": ms_device / found[0]["ms_device"],
                "floor_us": floor(model, count, rank),
            }
        found.append(row)
    return found


def allocated(device: torch.device) -> int:
    timing.free_memory(device)
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def served(
    model: models.Decoder, asked: argparse.Namespace, count: int, adapter: Adapter, *, merged: bool
) -> Row:
    """One engine with so many adapters, or so many engines with merged weights; the same rows."""
    rows, rank, device = max(asked.batch), adapter.rank, model.device
    own = 0 if merged else sum(weight.nbytes for weight in model.parameters())
    before = allocated(device) - own
    names: Sequence[str | None] = [None]
    if merged:
        decoders = [copy.deepcopy(model) for _ in range(count)]
        for decoder in decoders:
            adapter.merge_into(decoder)
        engines = [build(each, rows // count, asked.context, 1, rank) for each in decoders]
    else:
        engines = [build(model, rows, asked.context, count, rank)]
        names = load(engines[0], adapter, count)
    times = [measure(engines, names, asked.context, asked.steps) for _ in range(asked.rounds)]
    ms_step, ms_device = (median(part) for part in zip(*times, strict=True))
    row: Row = {"case": "serve", "adapters": count, "rank": rank, "rows": rows}
    row |= {"engines": len(engines), "rows_of_engine": rows // len(engines)}
    row |= {"ms_step": ms_step, "ms_device": ms_device, "tokens_per_s": rows / ms_step * 1e3}
    return row | {"gib": (allocated(device) - before) / GIB if device.type == "cuda" else None}


def table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Columns of some rows, aligned."""

    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [list(columns), *([text(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-1.7b", choices=["tiny", *SHAPES])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--adapters", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rank", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=["steps", "serve"], help="one of the two alone")
    asked = parser.parse_args()
    if any(max(asked.batch) % count for count in asked.adapters):
        parser.error(f"--batch {max(asked.batch)}: expected a multiple of --adapters")
    shape, sizes = ("qwen3-0.6b", TINY) if asked.model == "tiny" else (asked.model, {})
    model = models.random(shape, device=pick_device(asked.device), dtype="auto", **sizes)
    found: list[Row] = []

    def take(rows: Sequence[Row]) -> None:
        for row in rows:
            print(json.dumps({"model": asked.model} | row), flush=True)
        found.extend(rows)
        timing.free_memory(model.device)

    kind: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    adapters = [Adapter.random(model.spec, rank, **kind) for rank in asked.rank]
    if asked.part != "serve":
        for batch in asked.batch:
            for adapter in adapters:
                take(steps_of(model, asked, batch, adapter))
    if asked.part != "steps":
        for count in asked.adapters:
            for merged in (False, True):
                take([served(model, asked, count, adapters[0], merged=merged)])
    print(f"\n{timing.machine(model.device).describe()}, context {asked.context}\n")
    steps = [row for row in found if row["case"] == "steps"]
    table(steps, ("batch", "rank", "adapters", "fused", "ms_device", "ratio", "us", "floor_us"))
    serve = [row for row in found if row["case"] == "serve"]
    table(serve, ("adapters", "engines", "rows_of_engine", "ms_step", "tokens_per_s", "gib"))


if __name__ == "__main__":
    main()
