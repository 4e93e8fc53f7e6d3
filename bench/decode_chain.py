"""One whole decode step of Qwen3-1.7B under a CUDA graph: checks, time, and where it goes.

    python3 bench/decode_chain.py

The step is the model over a page cache, the logits and the draw. Its logits must be as close to an
fp32 model's as the definitions' are, and its replays equal bit for bit. Times are medians of
replays; the ratio is to the time in which memory delivers every weight once.
"""

import statistics
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from sparrow import models, ops
from sparrow.models.attention import PagedDecode
from sparrow.sparse.rule import Rule

SHAPE, PAGE = "qwen3-1.7b", 16
CASES = ((16, 128), (32, 2048), (1, 128), (64, 128))  # batch, context
PEAK = 4.8e12
REPLAYS = 30


class Step:
    """A decode step of random tokens over a random cache, by itself or as a graph."""

    def __init__(self, model: models.Decoder, batch: int, context: int) -> None:
        spec, device = model.spec, model.device
        rule, width = Rule(), -(-context // PAGE)
        fields = (
            *ops.kv_fields(PAGE, spec.head_size, model.dtype),
            *rule.fields(page=PAGE, head_size=spec.head_size, dtype=model.dtype),
        )
        self.model = model
        self.cache = ops.PageCache(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            page=PAGE,
            pages=batch * width,
            page_fields=fields,
            device=device,
        )
        draw = torch.Generator(device).manual_seed(batch)
        for layer in range(spec.layers):
            for field in fields:
                self.cache.field(field.name, layer).normal_(generator=draw)
        table = torch.randperm(batch * width, generator=draw, device=device)
        self.table_BM = table.view(batch, width).int()
        self.lengths_B = torch.full((batch,), context, device=device)
        self.positions_B = self.lengths_B - 1
        self.rule = rule
        self.ids_B = torch.randint(spec.vocabulary, (batch,), generator=draw, device=device)
        self.seeds_B = torch.arange(batch, device=device)
        self.temperature_B = torch.ones(batch, device=device)

    def run(self) -> tuple[Tensor, ops.Draws]:
        last = self.table_BM[:, -1].long()
        attention = PagedDecode(
            cache=self.cache,
            table_BM=self.table_BM,
            lengths_B=self.lengths_B,
            slots_B=last * PAGE + self.positions_B % PAGE,
            rule=self.rule,
        )
        logits_BV = self.model.logits(self.model(self.ids_B, self.positions_B, attention))
        return logits_BV, ops.sample(logits_BV, self.seeds_B, self.seeds_B, self.temperature_B)

    def capture(self) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ops.Draws]]:
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self.run()
        return graph, result


def milliseconds(graph: torch.cuda.CUDAGraph, replays: int = REPLAYS) -> float:
    """The median replay. Two in a row are timed, so that the graph's own launch hides."""
    graph.replay()
    times = []
    for _ in range(replays):
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        graph.replay()
        middle.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(middle.elapsed_time(end))
    return statistics.median(times)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def check(step: Step, wide: models.Decoder) -> str:
    """The step against the definitions and against fp32; replays against each other."""
    graph, (logits_BV, draws) = step.capture()
    graph.replay()
    first = logits_BV.clone(), draws.tokens.clone()
    for _ in range(5):
        graph.replay()
        assert torch.equal(logits_BV, first[0]), "logits differ between replays"
        assert torch.equal(draws.tokens, first[1]), "tokens differ between replays"
    with ops.using("reference"):
        near_BV, _ = step.run()
        batch, width = step.table_BM.shape
        exact = Step(wide, batch, width * PAGE)
        for layer in range(wide.spec.layers):
            for field in exact.cache.page_fields:
                exact.cache.field(field.name, layer).copy_(step.cache.field(field.name, layer))
        exact.table_BM, exact.ids_B = step.table_BM, step.ids_B
        exact_BV, _ = exact.run()
    ours, theirs = error(logits_BV, exact_BV), error(near_BV, exact_BV)
    assert ours <= 1.2 * theirs, f"error {ours:.2e}, the definitions' {theirs:.2e}"
    return f"error {ours:.1e} (definitions {theirs:.1e})"


def breakdown(graph: torch.cuda.CUDAGraph, replays: int = 3) -> list[str]:
    """Kernels by their time in one replay; overlapped launches count twice where they overlap."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in record.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name[:70]
            times[name] += event.device_time_total / replays
            calls[name] += 1
    return [
        f"    {time:8.1f} us in {calls[name] / replays:3.0f} calls  {name}"
        for name, time in times.most_common(24)
    ]


@torch.inference_mode()
def main() -> None:
    model = models.random(SHAPE, dtype=torch.bfloat16, device="cuda")
    wide = deepcopy(model).float()
    floor = sum(weight.nbytes for weight in model.parameters()) / PEAK * 1e3
    table = []
    for batch, context in CASES:
        step = Step(model, batch, context)
        quality = check(step, wide)
        graph, _ = step.capture()
        time = milliseconds(graph)
        print(f"batch {batch}, context {context}", *breakdown(graph), sep="\n", flush=True)
        table.append(
            f"batch {batch:3} context {context:5}: {time:6.3f} ms {time / floor:5.2f}x, {quality}"
        )
        del step, graph
    print(f"weights in {floor:.3f} ms", *table, sep="\n")


if __name__ == "__main__":
    main()
