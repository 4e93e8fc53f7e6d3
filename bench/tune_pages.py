"""Tune block sizes of page selection and sampling on this GPU, after checks.

    python3 bench/tune_pages.py

Each line is the median of replays of a CUDA graph that holds many calls, so the gap between two
launches counts and Python does not. Starred lines are what the package uses. The kernels of flows
are tuned by bench/tune_flows.py.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from tuning import DEVICE, KV_HEADS, PAGE, constants, microseconds, print_best

from sparrow import ops
from sparrow.ops.kernels import pages as page_kernels
from sparrow.ops.kernels import sampling

ROWS = 32
BUDGET = 4096
VOCABULARY = 151_936
CALLS = 20  # in a graph


class Warps(NamedTuple):
    """How a row is selected."""

    warps: int


class Blocks(NamedTuple):
    """How a row is sampled."""

    chunk: int
    sum_warps: int
    draw_warps: int


def expected_of(op: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with ops.using("reference"):
        return op(*arguments, **options)


def tune_select(pages: int, budget: int) -> None:
    print(f"\nselect, {ROWS} rows, {pages} pages, budget {budget}")
    scores = torch.randn(ROWS, KV_HEADS, pages, device=DEVICE)
    lengths = torch.full((ROWS,), pages * PAGE - 3, device=DEVICE, dtype=torch.int32)
    arguments = (scores, lengths, torch.full_like(lengths, budget))
    options = {"page": PAGE, "width": min(pages, budget // PAGE + 1)}
    expected = expected_of(ops.select_pages, *arguments, **options)
    call, times = partial(page_kernels.select_pages, *arguments, **options), {}
    own = Warps(page_kernels.warps_of(pages))
    for warps in (1, 2, 4, 8, 16):
        if 2 <= pages // (32 * warps) <= 64:
            with constants(page_kernels, warps_of=lambda _, warps=warps: warps):
                assert all(torch.equal(*pair) for pair in zip(call(), expected, strict=True))
                times[Warps(warps)] = microseconds(*[call] * CALLS)
    print_best(times, own, scores.nbytes / 1e12, "TB/s")


def tune_sample(rows: int) -> None:
    print(f"\nsample, {rows} rows")
    logits = torch.randn(rows, VOCABULARY, device=DEVICE) * 3
    index, ones = torch.arange(rows, device=DEVICE), torch.ones(rows, device=DEVICE)
    arguments = (logits, index, index, ones)
    expected = expected_of(ops.sample, *arguments)
    call, times = partial(sampling.sample, *arguments), {}
    own = Blocks(sampling.CHUNK, sampling.SUM_WARPS, sampling.DRAW_WARPS)
    for blocks in map(Blocks._make, product((1024, 2048, 4096, 8192), (4, 8), (4, 8, 16))):
        chunk, first, second = blocks
        if chunk // first > 1024 or not 128 <= chunk // second <= 1024:
            continue
        with constants(sampling, CHUNK=chunk, SUM_WARPS=first, DRAW_WARPS=second):
            draws = call()
            torch.testing.assert_close(draws.entropies, expected.entropies, atol=1e-4, rtol=1e-4)
            assert (draws.tokens == expected.tokens).float().mean() > 0.9  # rounding moves few
            times[blocks] = microseconds(*[call] * CALLS)
    print_best(times, own, logits.nbytes / 1e12, "TB/s")


if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    for pages in (128, 256, 1024, 2048):
        # A budget that keeps all looks at no score; short rows get a smaller one as well.
        for budget in (BUDGET, 1024) if pages * PAGE <= BUDGET else (BUDGET,):
            tune_select(pages, budget)
    for rows in (16, 32):
        tune_sample(rows)
