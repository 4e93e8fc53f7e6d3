"""Decode attention on this CPU against what its memory can deliver, measured in one process.

Decoding reads keys and values once and computes little, so the yardstick is bytes per second: the
cases of a model shape take turns in every round, and each is compared, by medians over the same
rounds, with the best plain read of the same memory. The pool exceeds the last cache, and its pages
are shuffled as in an engine that has run for long. The cases "pages" read what attention has to
read, in its order, and do nothing with it: what they lose is the price of scattered pages.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numba
import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparrow.bench import timing
from sparrow.calibrate.tables import figures
from sparrow.models.spec import ModelSpec, shape
from sparrow.ops.cpu import attention as cpu
from sparrow.ops.cpu.simd import share
from sparrow.ops.reference import attention as reference
from sparrow.ops.types import PageLists
from sparrow.schema.bench import Benchmark

PAGE = 16
CONTEXT = 4096
ROWS = 8  # at least; small models get more, to fill the pool
POOL_BYTES = 1 << 28  # keys and values together
SLOW = 0.2  # seconds
MODELS = ("smollm2-135m", "qwen3-1.7b", "qwen3-14b")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KEPT = {"1/4": 4, "1/8": 8}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time: its name, the bytes it moves, and how."""

    name: str
    bytes: int
    work: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Arguments of one decode call over a full pool."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    generator: torch.Generator

    def bytes(self, part: int = 1) -> int:
        return (self.k.nbytes + self.v.nbytes) // part

    def arguments(self, lists: PageLists | None = None) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.table, self.lengths, lists


def run(
    *,
    models: tuple[str, ...] = MODELS,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    rounds: int = 5,
    pool_bytes: int = POOL_BYTES,
    progress: Callable[[str], None] | None = None,
) -> Benchmark:
    """Measure every model shape in every dtype."""
    rows = []
    for model in models:
        for dtype in dtypes:
            if progress is not None:
                progress(f"{model} {dtype}")
            call = _call(shape(model), DTYPES[dtype], pool_bytes)
            measured = _measure([*_reads(call), *_attention(call)], rounds)
            rows += [{"model": model, "dtype": dtype, **row} for row in measured]
    about = {"page": PAGE, "context": CONTEXT, "rounds": rounds}
    return Benchmark(machine=timing.machine(torch.device("cpu")), **about, rows=rows)


def table(result: Benchmark) -> Table:
    """The result for a terminal; ratios are to the best plain read."""
    machine = result.machine
    title = f"Decode attention, {machine.threads} threads, {machine.describe()}"
    fields = "model dtype case bytes seconds gb_per_s ratio"
    return figures(title, result["rows"], fields, group="dtype")


def _measure(cases: list[Case], rounds: int) -> list[dict[str, Any]]:
    """Median time of every case, and its speed relative to the best case named "read".

    The first round, which compiles and touches the memory, does not count. A case as slow as SLOW
    takes part in one more round only.
    """
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds + 1):
        for taken, case in zip(times, cases, strict=True):
            if len(taken) < 2 or taken[-1] < SLOW:
                start = time.perf_counter()
                case.work()
                taken.append(time.perf_counter() - start)
    seconds = [median(taken[1:]) for taken in times]
    speeds = [case.bytes / took for case, took in zip(cases, seconds, strict=True)]
    plain = max(
        speed for case, speed in zip(cases, speeds, strict=True) if case.name.startswith("read")
    )
    return [
        {
            "case": case.name,
            "bytes": case.bytes,
            "seconds": took,
            "gb_per_s": speed / 1e9,
            "ratio": speed / plain,
        }
        for case, took, speed in zip(cases, seconds, speeds, strict=True)
    ]


def _call(spec: ModelSpec, dtype: torch.dtype, pool_bytes: int) -> Decode:
    block = spec.kv_heads, PAGE, spec.head_size
    pages = CONTEXT // PAGE
    row_bytes = 2 * pages * torch.Size(block).numel() * dtype.itemsize
    rows = max(ROWS, pool_bytes // row_bytes)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(rows * pages, *block, generator=generator).to(dtype) for _ in range(2))
    return Decode(
        q=torch.randn(rows, spec.heads, spec.head_size, generator=generator).to(dtype),
        k=k,
        v=v,
        table=torch.randperm(rows * pages, generator=generator).int().view(rows, pages),
        lengths=torch.full((rows,), CONTEXT, dtype=torch.int32),
        generator=generator,
    )


def _lists(call: Decode, part: int) -> PageLists:
    """One page in `part` at random, for every row and KV head by itself."""
    rows, pages = call.table.shape
    kv_heads, kept = call.k.shape[1], pages // part
    draw = torch.rand(rows, kv_heads, pages, generator=call.generator)
    chosen = draw.argsort(dim=2)[:, :, :kept].sort(dim=2).values.int()
    return PageLists(chosen, torch.full((rows, kv_heads), kept, dtype=torch.int32))


def _reads(call: Decode) -> list[Case]:
    """Ways to read the pool: from end to end, by copying, and page by page as attention does."""
    pools = [pool.view(-1).view(torch.float32) for pool in (call.k, call.v)]
    arrays = [pool.numpy() for pool in pools]
    target = torch.empty_like(pools[0])
    cases = [
        Case("read, numba sum", call.bytes(), lambda: _read(arrays)),
        Case("read, torch sum", call.bytes(), lambda: [pool.sum() for pool in pools]),
        # A copy moves every byte twice: in and out.
        Case("copy", 2 * call.bytes(), lambda: [target.copy_(pool) for pool in pools]),
    ]
    for name, part in {"dense": 1, **{f"kept {name}": part for name, part in KEPT.items()}}.items():
        pages = _lists(call, part).pages if part > 1 else _every(call)
        cases.append(Case(f"pages, {name}", call.bytes(part), _page_reader(call, pages)))
    return cases


def _every(call: Decode) -> Tensor:
    rows, pages = call.table.shape
    return torch.arange(pages, dtype=torch.int32).repeat(rows, call.k.shape[1], 1)


def _attention(call: Decode) -> list[Case]:
    rows, _, size = call.q.shape
    scale = size**-0.5

    def attend(lists: PageLists | None) -> Callable[[], Tensor]:
        return lambda: cpu.attend_decode(*call.arguments(lists), scale=scale)

    # The same bytes as if they were contiguous sequences; what they mean does not matter here.
    k, v = (pool.view(rows, call.k.shape[1], CONTEXT, size) for pool in (call.k, call.v))
    q = call.q[:, :, None]
    return [
        Case("attention, dense", call.bytes(), attend(None)),
        *(
            Case(f"attention, kept {name}", call.bytes(part), attend(_lists(call, part)))
            for name, part in KEPT.items()
        ),
        Case(
            "torch SDPA, contiguous",
            call.bytes(),
            lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ),
        Case(
            "reference",
            call.bytes(),
            lambda: reference.attend_decode.definition(*call.arguments(), scale=scale),
        ),
    ]


def _read(arrays: list[Array]) -> None:
    for array in arrays:
        share(partial(_sum, array), len(array))


def _page_reader(call: Decode, pages_BGK: Tensor) -> Callable[[], object]:
    rows = len(call.table)
    physical = call.table[torch.arange(rows)[:, None, None], pages_BGK].numpy()
    pools = [pool.flatten(2).view(torch.float32).numpy() for pool in (call.k, call.v)]

    def read(first: int, last: int) -> None:
        for row in range(first, last):
            for pool in pools:
                _sum_pages(pool, physical[row])

    return lambda: share(read, rows)


@numba.njit(nogil=True, fastmath={"reassoc"})
def _sum(array: Array, first: int, last: int) -> np.float32:
    part, total = array[first:last], np.float32(0)
    for e in range(len(part)):
        total += part[e]
    return total


@numba.njit(nogil=True, fastmath={"reassoc"})
def _sum_pages(pool_NGE: Array, pages_GK: Array) -> np.float32:
    total = np.float32(0)
    for slot in range(pages_GK.shape[1]):
        for g in range(pages_GK.shape[0]):
            for e in range(pool_NGE.shape[2]):
                total += pool_NGE[pages_GK[g, slot], g, e]
    return total
