"""How the score kernels of flows are best cut, on this GPU.

    python bench/tune_flows.py [flow ...] > bench/DATE-tune-flows-GPU.txt

Every cut is checked against the definition on a small case before it is timed. Batch 32, 32K
tokens, 8 KV heads of 128, pages of 16, 256 pages kept; random fields, several layers of them so
that no cache holds them; CUDA-graph replay.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from sparrow import ops
from sparrow.bench import timing
from sparrow.sparse.compile.launch import Compiled, Launch, launch_for
from sparrow.sparse.flows import interpret
from sparrow.sparse.flows.flow import Program, trace
from sparrow.sparse.flows.interpret import Scene
from sparrow.sparse.flows.loading import load_flow
from sparrow.sparse.rule import Rule

BATCH, PAGES, KV_HEADS, GROUP, SIZE, PAGE, KEPT = 32, 2048, 8, 2, 128, 16, 256
LAYERS = 4
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
FLOWS = ("block_mean", "softmax_sum", "fine_means(4)", "fine_means(2)", "quest", "sub_means(4)")
CUTS = ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4))  # pages, warps
LOOPS, STAGES = (2, 8), (1, 3)
WORKERS = 12


def cache_of(rule: Rule, batch: int, pages: int, layers: int) -> ops.PageCache:
    """Random fields; keys and values are not needed for a choice, so they are not there."""
    fields = rule.fields(page=PAGE, head_size=SIZE, dtype=DTYPE)
    keys = ops.Field(name="k", shape=(1, SIZE), dtype=DTYPE)
    cache = ops.PageCache(
        layers=layers,
        kv_heads=KV_HEADS,
        page=PAGE,
        pages=batch * pages,
        page_fields=(keys, *fields),
        device=DEVICE,
    )
    for layer in range(layers):
        for field in fields:
            block = cache.field(field.name, layer)
            if block.dtype == torch.uint8:
                block.random_(0, 256)
            else:
                block.copy_(torch.rand_like(block, dtype=torch.float16).add_(0.1))
    return cache


def arguments(batch: int, pages: int) -> tuple[torch.Tensor, ...]:
    q_BHD = torch.randn(batch, KV_HEADS * GROUP, SIZE, device=DEVICE).to(DTYPE)
    table_BM = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
    length_B = torch.full((batch,), pages * PAGE, device=DEVICE)
    budget_B = torch.full((batch,), KEPT * PAGE, dtype=torch.int32, device=DEVICE)
    return q_BHD, table_BM, length_B, budget_B


def agrees(program: Program, rule: Rule, kernels: Compiled) -> float:
    """The share of pages that kernels and the definition keep alike, on a short context."""
    cache = cache_of(rule, 4, 512, 1)
    q, table, length, budget = arguments(4, 512)
    length = length - torch.tensor([0, 1, 37, 4000], device=DEVICE)
    score = interpret.score_cache(program, cache, q, table, Scene(lengths=length))
    with ops.using("reference"):
        wanted = ops.select_pages(score, length, budget, page=PAGE)
    got = kernels.select(cache, 0, q, table, length, budget, None, first=1, last=2)
    assert torch.equal(wanted.counts, got.counts)
    same = [
        len(set(a[:n].tolist()) & set(b[:n].tolist())) / n
        for a, b, n in zip(
            wanted.pages.flatten(0, 1), got.pages.flatten(0, 1), got.counts.flatten(), strict=True
        )
    ]
    return min(same)


def cuts(program: Program) -> list[Launch]:
    """The default first."""
    tried = [Launch(b, n, w, s) for b, w in CUTS for n in LOOPS for s in STAGES]
    return list(dict.fromkeys([launch_for(program, DTYPE), *tried]))


def compile_one(text: str, launch: Launch) -> None:
    """In a process of its own: what it compiles, Triton keeps on disk for all."""
    program = trace(load_flow(text), PAGE, SIZE, GROUP)
    rule = Rule(flow=load_flow(text))
    kernels = Compiled(program, DTYPE, launch)
    cache = cache_of(rule, 1, 512, 1)
    kernels.select(cache, 0, *arguments(1, 512), None, first=1, last=2)


def tune(text: str) -> None:
    flow = load_flow(text)
    rule, program = Rule(flow=flow), trace(flow, PAGE, SIZE, GROUP)
    cache = cache_of(rule, BATCH, PAGES, LAYERS)
    given = arguments(BATCH, PAGES)
    size = BATCH * PAGES * KV_HEADS * program.bytes(DTYPE)
    default, cases = launch_for(program, DTYPE), []
    for launch in cuts(program):
        kernels = Compiled(program, DTYPE, launch)
        same = agrees(program, rule, kernels)
        calls = [
            partial(kernels.select, cache, layer, *given, None, first=1, last=2)
            for layer in range(LAYERS)
        ]
        names = {"launch": launch, "same": same}
        cases.append(timing.Case(names=names, bytes=size, calls=calls))
    found = sorted(timing.measure(cases, DEVICE, replays=10, rounds=3), key=lambda r: r["us"])
    for place, row in enumerate(found):
        own = row["launch"] == default
        if place < 6 or own:
            figures = f"{row['us']:7.1f} us {row['tb_per_s']:5.2f} TB/s"
            alike = f"least share of pages alike {row['same']:.3f}"
            print(f"{flow.name:16} {tuple(row['launch'])!s:16} {figures}, {alike}{' *' * own}")
    sys.stdout.flush()


if __name__ == "__main__":
    texts = sys.argv[1:] or FLOWS
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(compile_one, text, launch)
            for text in texts
            for launch in cuts(trace(load_flow(text), PAGE, SIZE, GROUP))
        ]
        for job in jobs:
            job.result()
    for each in texts:
        tune(each)
