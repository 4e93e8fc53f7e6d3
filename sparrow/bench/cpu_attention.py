"""Decode attention on this CPU against what its memory can deliver, measured in one process.

Decoding reads keys and values once and computes little, so the yardstick is bytes per second: the
cases of a model shape take turns in every round, and each is compared, by medians over the same
rounds, with the best plain read of the same memory. The pool exceeds the last cache, and its pages
are shuffled as in an engine that has run for long.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparrow.bench import timing
from sparrow.bench.timing import Case
from sparrow.models.shapes import shape
from sparrow.models.spec import ModelSpec
from sparrow.ops.cpu import attention as cpu
from sparrow.ops.cpu.threads import share
from sparrow.ops.reference import attention as reference
from sparrow.ops.types import PageLists
from sparrow.schema.bench import CpuAttentionBenchmark, CpuAttentionRow

PAGE = 16
CONTEXT = 4096
ROWS = 8  # at least; small models get more, to fill the pool
POOL_BYTES = 1 << 28  # keys and values together
MODELS = ("smollm2-135m", "qwen3-1.7b", "qwen3-14b")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KEPT = (4, 8)  # one page in so many

Array = np.ndarray[Any, Any]


def run(
    *,
    models: tuple[str, ...] = MODELS,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    rounds: int = 5,
    pool_bytes: int = POOL_BYTES,
    progress: Callable[[str], None] = lambda text: None,
) -> CpuAttentionBenchmark:
    """Measure every model shape in every dtype."""
    device, rows = torch.device("cpu"), []
    for model in models:
        for dtype in dtypes:
            progress(f"{model} {dtype}")
            cases = _cases(shape(model), DTYPES[dtype], pool_bytes)
            measured = timing.measure(cases, device, replays=1, rounds=rounds)
            plain = max(row["tb_per_s"] for row in measured if row["case"].startswith("read"))
            rows += [
                CpuAttentionRow(
                    model=model,
                    dtype=dtype,
                    case=row["case"],
                    bytes=row["bytes"],
                    seconds=row["us"] / 1e6,
                    gb_per_s=row["tb_per_s"] * 1e3,
                    ratio=row["tb_per_s"] / plain,
                )
                for row in measured
            ]
    return CpuAttentionBenchmark(
        machine=timing.machine(device),
        page=PAGE,
        context=CONTEXT,
        rounds=rounds,
        rows=tuple(rows),
    )


def _cases(spec: ModelSpec, dtype: torch.dtype, pool_bytes: int) -> list[Case]:
    """Reads of a pool of keys and values from end to end, and attention over all or some of it."""
    block, pages = (spec.kv_heads, PAGE, spec.head_size), CONTEXT // PAGE
    row_bytes = 2 * pages * torch.Size(block).numel() * dtype.itemsize
    rows = max(ROWS, pool_bytes // row_bytes)
    draw, scale = torch.Generator().manual_seed(0), spec.head_size**-0.5
    k, v = (torch.randn(rows * pages, *block, generator=draw).to(dtype) for _ in range(2))
    q = torch.randn(rows, spec.heads, spec.head_size, generator=draw).to(dtype)
    table = torch.randperm(rows * pages, generator=draw).int().view(rows, pages)
    paged = q, k, v, table, torch.full((rows,), CONTEXT, dtype=torch.int32)
    flat = [pool.view(-1).view(torch.float32) for pool in (k, v)]
    arrays = [pool.numpy() for pool in flat]
    # The same bytes as if they were contiguous sequences; what they mean does not matter here.
    long_k, long_v = (pool.view(rows, spec.kv_heads, CONTEXT, spec.head_size) for pool in (k, v))

    def case(name: str, call: Callable[[], object], part: int = 1) -> Case:
        return Case(names={"case": name}, bytes=(k.nbytes + v.nbytes) // part, calls=[call])

    return [
        case("read, numba sum", partial(_read, arrays)),
        case("read, torch sum", lambda: [pool.sum() for pool in flat]),
        case("attention, dense", lambda: cpu.attend_decode(*paged, scale=scale)),
        *(
            case(
                f"attention, kept 1/{part}",
                partial(cpu.attend_decode, *paged, _lists(spec, table, part, draw), scale=scale),
                part,
            )
            for part in KEPT
        ),
        case(
            "torch SDPA, contiguous",
            lambda: scaled_dot_product_attention(q[:, :, None], long_k, long_v, enable_gqa=True),
        ),
        case("reference", lambda: reference.attend_decode.definition(*paged, scale=scale)),
    ]


def _lists(spec: ModelSpec, table: Tensor, part: int, draw: torch.Generator) -> PageLists:
    """One page in `part` at random, for every row and KV head by itself."""
    rows, pages = table.shape
    order = torch.rand(rows, spec.kv_heads, pages, generator=draw).argsort(dim=2)
    chosen = order[:, :, : pages // part].sort(dim=2).values.int()
    return PageLists(chosen, torch.full(chosen.shape[:2], pages // part, dtype=torch.int32))


def _read(arrays: list[Array]) -> None:
    for array in arrays:
        share(partial(_sum, array), len(array))


@numba.njit(nogil=True, fastmath={"reassoc"})
def _sum(array: Array, first: int, last: int) -> np.float32:
    part, total = array[first:last], np.float32(0)
    for e in range(len(part)):
        total += part[e]
    return total
