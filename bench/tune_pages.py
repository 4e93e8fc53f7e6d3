"""Selection and sampling on this GPU: checks, then microseconds over their block sizes.

    python3 bench/tune_pages.py

Each line is the median of replays of a CUDA graph that holds many calls, so the gap between two
launches counts and Python does not. Starred lines are what the package uses. The kernels of flows
are tuned by bench/tune_flows.py.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from sparrow import ops
from sparrow.bench import timing
from sparrow.ops.kernels import pages as page_kernels
from sparrow.ops.kernels import sampling

ROWS, KV_HEADS, PAGE = 32, 8, 16
BUDGET = 4096
VOCABULARY = 151_936
CALLS, ROUNDS = 20, 15


def microseconds(call: Callable[[], object]) -> float:
    """Time of one call among CALLS in a graph, the median of ROUNDS replays."""
    case = timing.Case(names={}, bytes=1, calls=[call] * CALLS)
    return timing.measure([case], torch.device("cuda"), replays=1, rounds=ROUNDS)[0]["us"]


@contextmanager
def settings(module: ModuleType, **values: Any) -> Iterator[bool]:
    """The module with other constants; tells whether they are the ones it has anyway."""
    old = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield old == values
    finally:
        for name, value in old.items():
            setattr(module, name, value)


def line(name: str, setting: str, star: bool, time: float, bytes_read: int = 0) -> str:
    speed = f"{bytes_read / time / 1e6:8.2f}" if bytes_read else " " * 8
    return f"{name:<32} {setting:<34} {'*' if star else ' '} {time:9.2f} {speed}"


def expected_of(op: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with ops.using("reference"):
        return op(*arguments, **options)


def tune_select(pages: int, budget: int, kind: str) -> Iterator[str]:
    scores = torch.randn(ROWS, KV_HEADS, pages, device="cuda")
    lengths = torch.full((ROWS,), pages * PAGE - 3, device="cuda", dtype=torch.int32)
    budgets = torch.full_like(lengths, budget)
    arguments = (scores, lengths, budgets)
    options = {"page": PAGE, "width": min(pages, budget // PAGE + 1)}
    expected = expected_of(ops.select_pages, *arguments, **options)
    chosen = page_kernels.warps_of(pages)
    for warps in (1, 2, 4, 8, 16):
        if not 2 <= pages // (32 * warps) <= 64:
            continue
        with settings(page_kernels, warps_of=lambda _, warps=warps: warps):
            lists = page_kernels.select_pages(*arguments, **options)
            assert all(torch.equal(*pair) for pair in zip(lists, expected, strict=True))
            time = microseconds(lambda: page_kernels.select_pages(*arguments, **options))
        yield line(f"select, {pages} pages, {kind}", f"warps {warps}", warps == chosen, time)


def tune_sample(rows: int) -> Iterator[str]:
    logits = torch.randn(rows, VOCABULARY, device="cuda") * 3
    index, ones = torch.arange(rows, device="cuda"), torch.ones(rows, device="cuda")
    arguments = (logits, index, index, ones)
    expected = expected_of(ops.sample, *arguments)
    for chunk, first, second in product((1024, 2048, 4096, 8192), (4, 8), (4, 8, 16)):
        if chunk // first > 1024 or not 128 <= chunk // second <= 1024:
            continue
        with settings(sampling, CHUNK=chunk, SUM_WARPS=first, DRAW_WARPS=second) as star:
            draws = sampling.sample(*arguments)
            torch.testing.assert_close(draws.entropies, expected.entropies, atol=1e-4, rtol=1e-4)
            assert (draws.tokens == expected.tokens).float().mean() > 0.9  # rounding moves few
            time = microseconds(lambda: sampling.sample(*arguments))
        setting = f"chunk {chunk} warps {first}, {second}"
        yield line(f"sample, {rows} rows", setting, star, time, 4 * logits.numel())


def main() -> None:
    torch.manual_seed(0)
    lines: list[str] = []
    for pages in (128, 256, 1024, 2048):
        # A budget that keeps all looks at no score; short rows get a smaller one as well.
        lines += tune_select(pages, BUDGET, f"budget {BUDGET}")
        if pages * PAGE <= BUDGET:
            lines += tune_select(pages, 1024, "budget 1024")
    for rows in (16, 32):
        lines += tune_sample(rows)
    print(torch.cuda.get_device_name(), "rows", ROWS, "KV heads", KV_HEADS)
    print(f"{'what':<32} {'setting':<34}   {'us':>9} {'TB/s':>8}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
