"""How the score kernels of flows are best cut, on this GPU.

    python bench/tune_flows.py [flow ...] > bench/DATE-tune-flows-GPU.txt

Every cut is checked against the definition on a small case before it is timed. Batch 32, 32K
tokens, 8 KV heads of 128, pages of 16, 256 pages kept; random fields, several layers of them so
that no cache holds them; CUDA-graph replay.
"""

import sys
from functools import partial

import torch
from tuning import DEVICE, GROUP, KV_HEADS, PAGE, SIZE, compile_all, microseconds, print_best

from sparrow import ops
from sparrow.sparse.compile.launch import Compiled, ScoreLaunch, launch_for
from sparrow.sparse.flows import interpret
from sparrow.sparse.flows.flow import Program, trace
from sparrow.sparse.flows.interpret import ScoreContext
from sparrow.sparse.flows.loading import load_flow
from sparrow.sparse.rule import Rule

BATCH, PAGES, KEPT, LAYERS = 32, 2048, 256, 4
DTYPE = torch.bfloat16
FLOWS = ("block_mean", "softmax_sum", "fine_means(4)", "fine_means(2)", "quest", "sub_means(4)")
CUTS = ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4))  # pages, warps
LOOPS, STAGES = (2, 8), (1, 3)
WORKERS = 12


class Choice:
    """A batch with random fields of a flow, whose pages a kernel, or the definition, chooses."""

    def __init__(self, text: str, batch: int, pages: int, layers: int) -> None:
        rule = Rule(flow=load_flow(text))
        self.program = trace(rule.flow, PAGE, SIZE, GROUP)
        # Keys and values are not needed for a choice, so they are not there.
        keys = ops.Field(name="k", shape=(1, SIZE), dtype=DTYPE)
        fields = rule.fields(page=PAGE, head_size=SIZE, dtype=DTYPE)
        sizes = {"layers": layers, "kv_heads": KV_HEADS, "page": PAGE, "pages": batch * pages}
        self.cache = ops.PageCache(**sizes, page_fields=(keys, *fields), device=DEVICE)
        for layer in range(layers):
            for field in fields:
                block = self.cache.field(field.name, layer)
                if block.dtype == torch.uint8:
                    block.random_(0, 256)
                else:
                    block.copy_(torch.rand_like(block, dtype=torch.float16).add_(0.1))
        self.q_BHD = torch.randn(batch, KV_HEADS * GROUP, SIZE, device=DEVICE).to(DTYPE)
        self.table_BM = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
        self.length_B = torch.full((batch,), pages * PAGE, device=DEVICE)
        self.budget_B = torch.full((batch,), KEPT * PAGE, dtype=torch.int32, device=DEVICE)

    def by(self, kernels: Compiled, layer: int = 0) -> ops.PageLists:
        given = self.q_BHD, self.table_BM, self.length_B, self.budget_B
        return kernels.select(self.cache, layer, *given, None, first=1, last=2)

    def exact(self) -> ops.PageLists:
        where = self.q_BHD, self.table_BM, ScoreContext(lengths=self.length_B)
        score = interpret.score_cache(self.program, self.cache, *where)
        with ops.using("reference"):
            return ops.select_pages(score, self.length_B, self.budget_B, page=PAGE)


def least_alike(wanted: ops.PageLists, got: ops.PageLists) -> float:
    """The least share of pages of a row and head that both keep."""
    assert torch.equal(wanted.counts, got.counts)
    rows = (wanted.pages.flatten(0, 1), got.pages.flatten(0, 1), got.counts.flatten())
    return min(
        len(set(a[:n].tolist()) & set(b[:n].tolist())) / int(n)
        for a, b, n in zip(*rows, strict=True)
    )


def cuts(program: Program) -> list[ScoreLaunch]:
    """The default first."""
    tried = [ScoreLaunch(b, n, w, s) for b, w in CUTS for n in LOOPS for s in STAGES]
    return list(dict.fromkeys([launch_for(program, DTYPE), *tried]))


def compile_one(text: str, launch: ScoreLaunch) -> None:
    """In a process of its own: what it compiles, Triton keeps on disk for all."""
    choice = Choice(text, 1, 512, 1)
    choice.by(Compiled(choice.program, DTYPE, launch))


def tune(text: str) -> None:
    small, whole = Choice(text, 4, 512, 1), Choice(text, BATCH, PAGES, LAYERS)
    small.length_B -= torch.tensor([0, 1, 37, 4000], device=DEVICE)
    times, alike, wanted = {}, [], small.exact()
    for launch in cuts(whole.program):
        kernels = Compiled(whole.program, DTYPE, launch)
        alike.append(least_alike(wanted, small.by(kernels)))
        times[launch] = microseconds(*(partial(whole.by, kernels, n) for n in range(LAYERS)))
    print(f"\n{text}: least share of pages alike {min(alike):.3f}")
    size = BATCH * PAGES * KV_HEADS * whole.program.bytes(DTYPE)
    print_best(times, launch_for(whole.program, DTYPE), size / 1e12, "TB/s")


if __name__ == "__main__":
    texts = sys.argv[1:] or FLOWS
    programs = {text: trace(load_flow(text), PAGE, SIZE, GROUP) for text in texts}
    compile_all(compile_one, [(text, c) for text in texts for c in cuts(programs[text])], WORKERS)
    for text in texts:
        tune(text)
