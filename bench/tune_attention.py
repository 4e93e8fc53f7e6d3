"""Try launch plans of the attention kernels on the GPU at hand: `python3 bench/tune_attention.py`.

Shapes are those of Qwen3-1.7B in bf16 with pages of 16 tokens, shuffled. Every plan is checked
before it is timed. Times are medians of replays of a CUDA graph that walks over enough pools to
leave the cache cold. The last columns are what counts: TB/s of the K and V that a call must read,
TFLOP/s of the visible half of a prompt. The plan that the package would take is marked with *.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))
from sparrow.bench import timing
from sparrow.ops import PageLists
from sparrow.ops.kernels import attend_decode as decode
from sparrow.ops.kernels import attend_prefill as prefill
from sparrow.ops.reference.attention import attend_decode

HEADS, KV_HEADS, SIZE, PAGE = 16, 8, 128, 16
SCALE = SIZE**-0.5
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
ROUNDS = 15


class Case(NamedTuple):
    """One batch over several pools, dense or with lists; calls must read `bytes` each."""

    q_BHD: Tensor
    pools: list[tuple[Tensor, Tensor]]
    table_BM: Tensor
    lengths_B: Tensor
    lists: list[PageLists | None]
    bytes: int

    def attend(self, turn: int) -> Tensor:
        k_NGPD, v_NGPD = self.pools[turn % len(self.pools)]
        lists = self.lists[turn % len(self.lists)]
        return decode.attend_decode(
            self.q_BHD, k_NGPD, v_NGPD, self.table_BM, self.lengths_B, lists, scale=SCALE
        )

    def exact(self) -> Tensor:
        k_NGPD, v_NGPD = self.pools[0]
        return attend_decode.definition(
            self.q_BHD, k_NGPD, v_NGPD, self.table_BM, self.lengths_B, self.lists[0], scale=SCALE
        )


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    for rows, tokens, lists in CASES:
        pools = make_pools(rows, tokens)
        for kept in lists:
            tune_decode(make_case(pools, rows, tokens, kept), rows, tokens, kept)
        del pools
        torch.cuda.empty_cache()
    for tokens in PROMPTS:
        tune_prefill(tokens)


def make_pools(rows: int, tokens: int) -> list[tuple[Tensor, Tensor]]:
    pages = rows * tokens // PAGE
    shape = pages, KV_HEADS, PAGE, SIZE
    copies = max(1, COLD // (4 * pages * KV_HEADS * PAGE * SIZE))
    return [
        (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(copies)
    ]


def make_case(pools: list[tuple[Tensor, Tensor]], rows: int, tokens: int, kept: int | None) -> Case:
    width = tokens // PAGE
    read = width if kept is None else kept
    return Case(
        q_BHD=torch.randn(rows, HEADS, SIZE, device="cuda", dtype=torch.bfloat16),
        pools=pools,
        table_BM=torch.randperm(rows * width, device="cuda", dtype=torch.int32).view(rows, width),
        lengths_B=torch.full((rows,), tokens, device="cuda", dtype=torch.int32),
        lists=[None if kept is None else random_lists(rows, width, kept) for _ in range(TURNS)],
        bytes=rows * KV_HEADS * read * 2 * PAGE * SIZE * pools[0][0].itemsize,
    )


def random_lists(rows: int, width: int, kept: int) -> PageLists:
    order = torch.rand(rows, KV_HEADS, width, device="cuda").argsort(2)
    pages = torch.full_like(order, -1, dtype=torch.int32)  # as wide as the table, as selected
    pages[..., :kept] = order[..., :kept].sort(2).values.int()
    return PageLists(pages, torch.full((rows, KV_HEADS), kept, device="cuda", dtype=torch.int32))


def tune_decode(case: Case, rows: int, tokens: int, kept: int | None) -> None:
    what = "dense" if kept is None else f"{kept} pages a head"
    print(f"\ndecode, batch {rows}, {tokens} tokens, {what}: {case.bytes / 1e6:.0f} MB")
    expected = case.exact()
    own = decode.plan(rows, KV_HEADS, tokens, SIZE, 2)
    found = []
    for cut in dict.fromkeys((own, *decode_plans(tokens))):
        with planned(decode, cut):
            check(cut, case.attend(0), expected)
            seconds = cold_time(case.attend, max(len(case.pools), TURNS if kept else 1))
        found.append((seconds, cut))
    report(found, own, case.bytes / 1e12, "TB/s")


def decode_plans(tokens: int) -> Iterator[decode.Plan]:
    """Splits by schedule; how short they may be, with the first schedule only."""
    for tile, warps, stages in SCHEDULES:
        for splits in SPLITS:
            for least in LEAST if (tile, warps, stages) == SCHEDULES[0] else (128,):
                if splits * least <= tokens or splits == 1:
                    yield decode.Plan(tile, splits, least, warps, stages)


def tune_prefill(tokens: int) -> None:
    operations = 2 * tokens * tokens * HEADS * SIZE
    print(f"\nprefill of {tokens} tokens: {operations / 1e9:.0f} GFLOP")
    q_THD = torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    case = make_case(make_pools(1, tokens)[:1], 1, tokens, None)
    bounds = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    (pool,), table_BM, lengths_B = case.pools, case.table_BM, case.lengths_B

    def attend(_: int) -> Tensor:
        where = table_BM, lengths_B, bounds
        return prefill.attend_causal_paged(q_THD, *pool, *where, scale=SCALE)

    k, v = (t[table_BM[0]].transpose(1, 2).flatten(0, 1) for t in pool)
    q, k, v = (t.transpose(0, 1)[None] for t in (q_THD, k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    own = prefill.plan(SIZE, 2)
    found = []
    for cut in dict.fromkeys((own, *(prefill.Plan(*numbers) for numbers in BLOCKS))):
        with planned(prefill, cut):
            check(cut, attend(0), expected[0].transpose(0, 1))
            found.append((cold_time(attend, 1), cut))
    report(found, own, operations / 1e12, "TFLOP/s")


@contextmanager
def planned(module: ModuleType, cut: NamedTuple) -> Iterator[None]:
    """Let a module launch by this plan."""
    before = module.plan
    module.plan = lambda *_: cut  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.plan = before  # type: ignore[attr-defined]


def check(cut: NamedTuple, found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    if not error < 0.01:
        raise AssertionError(f"{cut}: relative error {error:.3g}")


def cold_time(call: Callable[[int], Tensor], pools: int) -> float:
    """Median seconds of a call, each on the next pool."""
    case = timing.Case(names={}, bytes=1, calls=[partial(call, pool) for pool in range(pools)])
    return timing.measure([case], torch.device("cuda"), replays=1, rounds=ROUNDS)[0]["us"] / 1e6


def report(
    found: Sequence[tuple[float, NamedTuple]], own: NamedTuple, amount: float, unit: str
) -> None:
    """The five best plans and our own, the best one last."""
    ranked = sorted(found, key=lambda entry: entry[0])
    shown = [entry for place, entry in enumerate(ranked) if place < 5 or entry[1] == own]
    print("  ".join([*(f"{name:>7}" for name in own._fields), f"{'us':>9}", f"{unit:>8}"]))
    for seconds, cut in reversed(shown):
        cells = [f"{number:>7}" for number in cut]
        mark = " *" if cut == own else ""
        print("  ".join([*cells, f"{seconds * 1e6:>9.1f}", f"{amount / seconds:>8.2f}"]) + mark)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
