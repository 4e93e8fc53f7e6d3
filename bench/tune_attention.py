"""Tune launch plans of the attention kernels on this GPU: `python3 bench/tune_attention.py`.

Shapes are those of Qwen3-1.7B in bf16 with pages of 16 tokens, shuffled. Every plan is checked
before it is timed. Times are medians of replays of a CUDA graph that walks over enough pools to
leave the cache cold. The last columns are what counts: TB/s of the K and V that a call must read,
TFLOP/s of the visible half of a prompt. The plan that the package would take is marked with *.

At the end, batches of uneven lengths as the trace of the published workload has them: microseconds
of sparse and dense calls by the module's LONG_SPLIT and EVEN_SPLIT.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tuning import DEVICE, GROUP, KV_HEADS, PAGE, SIZE, constants, microseconds, print_best

from sparrow.ops import PageLists
from sparrow.ops.kernels import attend_decode as decode
from sparrow.ops.kernels import attend_prefill as prefill
from sparrow.ops.reference.attention import attend_decode

HEADS, SCALE = KV_HEADS * GROUP, SIZE**-0.5
# rows, tokens, and how many pages of a list (None: dense)
CASES = (
    (32, 32768, (None, 256)),
    (16, 32768, (None, 64)),
    (16, 16384, (None, 64)),
    (60, 16384, (None, 128)),
    (16, 128, (None,)),
    (1, 32768, (None, 256)),
    (32, 2048, (None,)),
)
SCHEDULES = ((64, 4, 3), (64, 4, 4), (64, 8, 3), (32, 4, 4))
SPLITS = (1, 2, 4, 8, 16, 32)
LEAST = (64, 128, 256)  # tokens of a split
TURNS = 8  # lists that take turns, so that the cache does not hold what they name
COLD = 512 << 20  # bytes that a graph reads before it comes back to a pool
PROMPTS = (4096, 16384)
BLOCKS = ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2))
# Uneven: rows, the batch they are padded to, mean length, pages of the table, tokens kept.
BATCHES = (
    (51, 64, 8600, 1024, 2560),
    (39, 48, 12100, 1024, 3072),
    (33, 48, 13700, 1024, 3328),
    (26, 32, 16100, 1024, 3584),
    (31, 32, 14800, 1024, 3328),
    (17, 24, 19900, 1536, 4096),
    (24, 24, 17600, 1536, 3840),
    (12, 16, 23300, 1536, 4096),
    (9, 16, 30000, 2048, 4096),
    (8, 8, 32700, 2048, 4096),
)
POOL = 70_000  # pages that they share
UNEVEN_SPLITS = ((4096, 4096), (4096, 1024), (2048, 2048), (2048, 1024), (2048, 512), (1024, 512))
SPARSE_LAYERS, DENSE_LAYERS = 26, 2  # of Qwen3-1.7B: how much each kind of call counts
Pool = tuple[Tensor, Tensor]


class Batch(NamedTuple):
    """Rows of a batch over some pools, dense or with lists that take turns."""

    q_BHD: Tensor
    pools: Sequence[Pool]
    table_BM: Tensor
    lengths_B: Tensor
    lists: Sequence[PageLists | None]

    def call(self, attend: Callable[..., Tensor], turn: int = 0) -> Tensor:
        pool, lists = self.pools[turn % len(self.pools)], self.lists[turn % len(self.lists)]
        return attend(self.q_BHD, *pool, self.table_BM, self.lengths_B, lists, scale=SCALE)

    def time(self) -> float:
        turns = max(len(self.pools), len(self.lists))
        return microseconds(*(partial(self.call, decode.attend_decode, n) for n in range(turns)))


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    for rows, tokens, lists in CASES:
        width = tokens // PAGE
        copies = max(1, COLD // (4 * rows * width * KV_HEADS * PAGE * SIZE))
        pools = [make_pool(rows * width) for _ in range(copies)]
        table_BM = torch.randperm(rows * width, device=DEVICE, dtype=torch.int32).view(rows, width)
        lengths_B = torch.full((rows,), tokens, device=DEVICE)
        for kept in lists:
            tune_decode(make_batch(pools, table_BM, lengths_B, kept), kept)
        del pools
        torch.cuda.empty_cache()
    for tokens in PROMPTS:
        tune_prefill(tokens)
    tune_uneven()


def random_bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def make_pool(pages: int) -> Pool:
    return random_bf16(pages, KV_HEADS, PAGE, SIZE), random_bf16(pages, KV_HEADS, PAGE, SIZE)


def make_batch(
    pools: Sequence[Pool], table_BM: Tensor, lengths_B: Tensor, kept: int | None
) -> Batch:
    """`kept`: random pages of every row and head, or None for dense."""
    rows, width = table_BM.shape
    lists = [None if kept is None else random_lists(lengths_B, width, kept) for _ in range(TURNS)]
    used = lists if kept else [None]
    return Batch(random_bf16(rows, HEADS, SIZE), pools, table_BM, lengths_B.int(), used)


def random_lists(lengths_B: Tensor, width: int, kept: int) -> PageLists:
    """As wide as the table, as selected: pages in order, then -1."""
    page_M, pages_B = torch.arange(width, device=DEVICE), (lengths_B + PAGE - 1) // PAGE
    score = torch.rand(len(lengths_B), KV_HEADS, width, device=DEVICE)
    order = score.masked_fill((page_M >= pages_B[:, None])[:, None], 2).argsort(2)
    count_BG = pages_B.clamp(max=kept)[:, None].expand(-1, KV_HEADS)
    chosen = order.masked_fill(page_M >= count_BG[..., None], width).sort(2).values
    return PageLists(chosen.masked_fill(chosen == width, -1).int(), count_BG.int().contiguous())


def tune_decode(batch: Batch, kept: int | None) -> None:
    rows, tokens = len(batch.lengths_B), int(batch.lengths_B[0])
    read = rows * KV_HEADS * (kept or tokens // PAGE) * 2 * PAGE * SIZE * 2  # bytes
    what = "dense" if kept is None else f"{kept} pages a head"
    print(f"\ndecode, batch {rows}, {tokens} tokens, {what}: {read / 1e6:.0f} MB")
    own = decode.plan(rows, KV_HEADS, tokens, SIZE, 2)
    attend = partial(batch.call, decode.attend_decode)
    expected = batch.call(attend_decode.definition)
    times = tried(decode, [own, *decode_plans(tokens)], attend, expected, batch.time)
    print_best(times, own, read / 1e12, "TB/s")


def decode_plans(tokens: int) -> Iterator[decode.DecodePlan]:
    """Splits by schedule; how short they may be, with the first schedule only."""
    for tile, warps, stages in SCHEDULES:
        for splits in SPLITS:
            for least in LEAST if (tile, warps, stages) == SCHEDULES[0] else (128,):
                if splits * least <= tokens or splits == 1:
                    yield decode.DecodePlan(tile, splits, least, warps, stages)


def tune_prefill(tokens: int) -> None:
    operations = 2 * tokens * tokens * HEADS * SIZE
    print(f"\nprefill of {tokens} tokens: {operations / 1e9:.0f} GFLOP")
    pool, q_THD = make_pool(tokens // PAGE), random_bf16(tokens, HEADS, SIZE)
    table_BM = torch.randperm(tokens // PAGE, device=DEVICE, dtype=torch.int32)[None]
    where = table_BM, *(torch.tensor(x, device=DEVICE).int() for x in ([tokens], [0, tokens]))
    attend = partial(prefill.attend_causal_paged, q_THD, *pool, *where, scale=SCALE)
    k, v = (t[table_BM[0]].transpose(1, 2).flatten(0, 1) for t in pool)
    q, k, v = (t.transpose(0, 1)[None] for t in (q_THD, k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    own = prefill.plan(SIZE, 2)
    plans = [own, *(prefill.PrefillPlan(*numbers) for numbers in BLOCKS)]
    clock = partial(microseconds, attend)
    times = tried(prefill, plans, attend, expected[0].transpose(0, 1), clock)
    print_best(times, own, operations / 1e12, "TFLOP/s")


def tried(
    module: ModuleType,
    plans: Sequence[NamedTuple],
    attend: Callable[[], Tensor],
    expected: Tensor,
    clock: Callable[[], float],
) -> dict[NamedTuple, float]:
    """Microseconds by plan, each checked before."""
    times = {}
    for plan in dict.fromkeys(plans):
        with constants(module, plan=lambda *_, plan=plan: plan):
            error = (attend().float() - expected.float()).norm() / expected.float().norm()
            assert error < 0.01, f"{plan}: relative error {error:.3g}"
            times[plan] = clock()
    return times


def tune_uneven() -> None:
    print("\nrows of uneven lengths by (LONG_SPLIT, EVEN_SPLIT), us")
    pool = make_pool(POOL)
    batches: dict[str, list[Batch]] = {"sparse": [], "dense": []}
    for rows, padded, mean, pages, kept in BATCHES:
        share = 0.6 + 0.8 * torch.rand(rows, device=DEVICE)
        lengths_B = torch.zeros(padded, dtype=torch.long, device=DEVICE)
        lengths_B[:rows] = (mean * share).clamp(max=pages * PAGE).long()
        table_BM = torch.randint(POOL, (padded, pages), device=DEVICE, dtype=torch.int32)
        for kind, own in (("sparse", kept // PAGE), ("dense", None)):
            batches[kind].append(make_batch([pool], table_BM, lengths_B, own))
    for long, even in UNEVEN_SPLITS:
        with constants(decode, LONG_SPLIT=long, EVEN_SPLIT=even):
            us = {kind: [batch.time() for batch in own] for kind, own in batches.items()}
        weighed = SPARSE_LAYERS * sum(us["sparse"]) + DENSE_LAYERS * sum(us["dense"])
        print((long, even), {kind: [round(x) for x in own] for kind, own in us.items()}, end=" ")
        print(f"weighed sum {weighed:.0f}", flush=True)


if __name__ == "__main__":
    main()
