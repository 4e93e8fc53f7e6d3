"""Tiles of attention over kept pages with gradients (sparrow/ops/kernels/attend_kept.py), tried.

`python bench/tune_kept.py [CASE ...]`, a case being sequences,length,heads,kv heads,head size:
checks every candidate against the first, then prints microseconds of each kernel, the best last.
"""

import sys
from itertools import zip_longest

import torch
from torch import Tensor
from tuning import DEVICE, PAGE, compile_all, constants

from sparrow.ops.kernels import attend_kept as kept

CASES = ("4,4096,16,8,128", "1,16384,16,8,128")
FORWARD = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2)]
QUERIES = [
    *((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3)),
    *((128, 32, 8, 2), (64, 128, 8, 2), (64, 32, 4, 3), (128, 128, 8, 1)),
]
KEYS = [
    *((64, 128, 8, 2), (64, 128, 8, 1), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3)),
    *((32, 128, 8, 1), (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (128, 128, 8, 1)),
    *((64, 64, 4, 1), (32, 128, 4, 2)),
]
KERNELS = ("_attend_queries", "_grad_queries", "_grad_keys")
SHARE = 0.3  # of pages that a query keeps


def candidates() -> list[kept.Plans]:
    """Every tile of each kernel at least once."""
    rows = zip_longest(FORWARD, QUERIES, KEYS)
    firsts = FORWARD[0], QUERIES[0], KEYS[0]
    filled = [[own or first for own, first in zip(row, firsts, strict=True)] for row in rows]
    return [kept.Plans(*(kept.KeptPlan(*tile) for tile in row)) for row in filled]


def attend(case: str, plans: kept.Plans, repeats: int = 1) -> list[Tensor]:
    """Output and gradients of random inputs."""
    sequences, length, heads, kv_heads, size = map(int, case.split(","))
    torch.manual_seed(0)
    tokens = sequences * length

    def random(heads: int) -> Tensor:
        return torch.randn(tokens, heads, size, device=DEVICE, dtype=torch.bfloat16)

    inputs = [random(n).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    words = -(-length // (PAGE * 32))
    mask = torch.rand(kv_heads, words, tokens, 32, device=DEVICE) < SHARE
    position_T = torch.arange(tokens, device=DEVICE) % length
    page = torch.arange(words * 32, device=DEVICE).view(words, 1, 32)
    own = (position_T // PAGE)[:, None]
    mask = (mask & (page <= own)) | (page == own)
    bits = (mask.long() << torch.arange(32, device=DEVICE)).sum(3)
    bits = torch.where(bits < 2**31, bits, bits - 2**32).int()
    bounds = torch.arange(0, tokens + 1, length, device=DEVICE, dtype=torch.int32)
    weight = random(heads)
    with constants(kept, plan=lambda *_: plans):
        for _ in range(repeats):
            out = kept.attend_kept(*inputs, bounds, bits, page=PAGE, scale=size**-0.5)
            grads = torch.autograd.grad(out, inputs, weight)
    torch.cuda.synchronize()
    return [out, *grads]


def attend_once(case: str, plans: kept.Plans) -> None:
    try:
        attend(case, plans)
    except Exception as error:  # too much shared memory
        print(plans, type(error).__name__, str(error)[:100])


def microseconds(case: str, plans: kept.Plans) -> dict[str, float]:
    with torch.profiler.profile() as profiled:
        attend(case, plans, repeats=4)
    events = profiled.key_averages()
    return {e.key: e.self_device_time_total / e.count for e in events if e.key in KERNELS}


def main(cases: list[str]) -> None:
    plans = candidates()
    for case in cases or CASES:
        compile_all(attend_once, [(case, own) for own in plans], 12)
        wanted = attend(case, plans[0])
        times: dict[tuple[str, kept.KeptPlan], float] = {}
        for own in plans:
            try:
                found = attend(case, own)
            except Exception as error:
                print(own, type(error).__name__)
                continue
            for mine, theirs in zip(found, wanted, strict=True):
                error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
                assert error < 0.01, f"{own}: relative error {error:.3g}"
            took = microseconds(case, own)
            times |= {(kernel, own[n]): took[kernel] for n, kernel in enumerate(KERNELS)}
        for kernel in KERNELS:
            print(f"\n{case} {kernel}: queries, keys, warps, stages, us")
            ranked = sorted((us, tile) for (name, tile), us in times.items() if name == kernel)
            for us, tile in reversed(ranked):
                print(*(f"{number:>4}" for number in tile), f"{us:>9.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
