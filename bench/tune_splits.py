"""How decode attention is best cut for rows of uneven lengths, on the GPU at hand.

    python bench/tune_splits.py

Batches as the trace of the published workload has them: rows, the batch they are padded to, mean
length, pages of the table, tokens kept. Sparse and dense calls, microseconds, by the module's
LONG_SPLIT and EVEN_SPLIT; CUDA-graph replay, shuffled pages.
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from sparrow.bench import timing
from sparrow.ops import PageLists
from sparrow.ops.kernels import attend_decode as decode

DEVICE, POOL = torch.device("cuda"), 70_000
KV_HEADS, GROUP, SIZE, PAGE = 8, 2, 128, 16
SPLITS = ((4096, 4096), (4096, 1024), (2048, 2048), (2048, 1024), (2048, 512), (1024, 512))
SPARSE_LAYERS, DENSE_LAYERS = 26, 2  # of Qwen3-1.7B: how much each kind of call counts


class Batch(NamedTuple):
    rows: int
    padded: int
    mean: int
    pages: int
    kept: int


BATCHES = (
    Batch(51, 64, 8600, 1024, 2560),
    Batch(39, 48, 12100, 1024, 3072),
    Batch(33, 48, 13700, 1024, 3328),
    Batch(26, 32, 16100, 1024, 3584),
    Batch(31, 32, 14800, 1024, 3328),
    Batch(17, 24, 19900, 1536, 4096),
    Batch(24, 24, 17600, 1536, 3840),
    Batch(12, 16, 23300, 1536, 4096),
    Batch(9, 16, 30000, 2048, 4096),
    Batch(8, 8, 32700, 2048, 4096),
)


def arguments(batch: Batch, draw: torch.Generator) -> tuple[tuple[Tensor, ...], PageLists]:
    """Queries, tables and lengths between 0.6 and 1.4 of the mean, and random lists."""
    share = 0.6 + 0.8 * torch.rand(batch.rows, generator=draw)
    length_B = torch.zeros(batch.padded, dtype=torch.long)
    length_B[: batch.rows] = (batch.mean * share).clamp(max=batch.pages * PAGE).long()
    table_BM = torch.randint(POOL, (batch.padded, batch.pages), generator=draw).int()
    page_B = (length_B + PAGE - 1) // PAGE
    count_B = page_B.clamp(max=batch.kept // PAGE).int()
    list_BGK = torch.full((batch.padded, KV_HEADS, batch.pages), -1, dtype=torch.int32)
    for row, head in torch.cartesian_prod(torch.arange(batch.rows), torch.arange(KV_HEADS)):
        count = int(count_B[row])
        chosen = torch.randperm(int(page_B[row]), generator=draw)[:count].sort().values
        list_BGK[row, head, :count] = chosen.int()
    q_BHD = torch.randn(batch.padded, KV_HEADS * GROUP, SIZE, generator=draw).to(torch.bfloat16)
    given = tuple(x.to(DEVICE) for x in (q_BHD, table_BM, length_B))
    counts = count_B[:, None].expand(-1, KV_HEADS).contiguous()
    return given, PageLists(list_BGK.to(DEVICE), counts.to(DEVICE))


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(POOL, KV_HEADS, PAGE, SIZE, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(2)
    )
    beds = [arguments(batch, draw) for batch in BATCHES]
    for long, even in SPLITS:
        decode.LONG_SPLIT, decode.EVEN_SPLIT = long, even
        cases = []
        for (q, table, length), lists in beds:
            for kind, own in (("sparse", lists), ("dense", None)):
                call = partial(decode.attend_decode, q, k, v, table, length, own, scale=SIZE**-0.5)
                cases.append(timing.Case(names={"kind": kind}, bytes=1, calls=[call] * 4))
        found = timing.measure(cases, DEVICE, replays=6, rounds=3)
        us = {
            kind: [row["us"] for row in found if row["kind"] == kind]
            for kind in ("sparse", "dense")
        }
        weighed = SPARSE_LAYERS * sum(us["sparse"]) + DENSE_LAYERS * sum(us["dense"])
        print((long, even), {kind: [round(x) for x in own] for kind, own in us.items()}, end=" ")
        print(f"weighed sum {weighed:.0f}", flush=True)


if __name__ == "__main__":
    main()
