"""Tune launches of the matrix products of Qwen3-1.7B in a decode step on this GPU.

    python3 bench/tune_linear.py [--tokens 16] [--workers 14]

Launches overlap, so what is fastest alone is not what is fastest in the chain: only the whole step
is timed. Processes first compile all candidates into Triton's cache on disk. Then one product after
the other takes the launch with the fastest step, the others staying as they are. The last lines are
entries for `LAUNCHES` in sparrow/ops/kernels/layers.py.
"""

import argparse
from collections.abc import Iterator
from itertools import product

import torch
from tuning import DEVICE, PAGE, compile_all, microseconds

from sparrow import models, ops
from sparrow.engine.memory import page_cache
from sparrow.models.attention import PagedDecode
from sparrow.ops.kernels.layers import LAUNCHES, PROCESSORS, LinearLaunch, launch_for, tile
from sparrow.sparse.rule import Rule

SHAPE, CONTEXT = "qwen3-1.7b", 128
SHARED_BYTES = 227 << 10
# product -> op, width of the result, depth
PRODUCTS = {
    "qkv": ("norm_linear", 4096, 2048),
    "out": ("linear_add", 2048, 2048),
    "gate_up": ("norm_gated", 6144, 2048),
    "down": ("linear_add", 2048, 6144),
    "head": ("logits", 151_936, 2048),
}


class Step:
    """A decode step of random tokens over a random cache."""

    def __init__(self, batch: int, layers: int | None = None) -> None:
        given = {} if layers is None else {"layers": layers}
        self.model = models.random(SHAPE, dtype=torch.bfloat16, device="cuda", **given)
        spec, self.rule, width = self.model.spec, Rule(), -(-CONTEXT // PAGE)
        self.cache = page_cache(self.model, self.rule, pages=batch * width, slots=0, width=width)
        torch.manual_seed(batch)
        for layer in range(spec.layers):
            for field in self.cache.page_fields:
                self.cache.field(field.name, layer).normal_()
        self.table_BM = torch.randperm(batch * width, device=DEVICE).view(batch, width).int()
        self.lengths_B = torch.full((batch,), CONTEXT, device=DEVICE)
        self.positions_B = self.lengths_B - 1
        self.ids_B = torch.randint(spec.vocabulary, (batch,), device=DEVICE)
        self.seeds_B = torch.arange(batch, device=DEVICE)
        self.temperature_B = torch.ones(batch, device=DEVICE)

    def run(self) -> ops.Draws:
        last = self.table_BM[:, -1].long()
        attention = PagedDecode(
            cache=self.cache,
            table_BM=self.table_BM,
            lengths_B=self.lengths_B,
            slots_B=last * PAGE + self.positions_B % PAGE,
            rule=self.rule,
        )
        logits_BV = self.model.logits(self.model(self.ids_B, self.positions_B, attention))
        return ops.sample(logits_BV, self.seeds_B, self.seeds_B, self.temperature_B)

    def milliseconds(self, rounds: int = 30) -> float:
        """Two steps are in a graph, so that its own launch hides."""
        return microseconds(self.run, self.run, rounds=rounds) / 1e3


def key_of(name: str, tokens: int) -> tuple[str, int, int, int]:
    op, width, depth = PRODUCTS[name]
    return op, tile(tokens), width, depth


def sweep(name: str, tokens: int) -> Iterator[LinearLaunch]:
    """Launches that fit, and fill the processors; their step is not too small to be worth one."""
    op, width, depth = PRODUCTS[name]
    for columns, step, splits, warps in product((32, 64, 128), (64, 128, 256), (1, 2, 4), (4, 8)):
        rows = columns * (2 if op == "norm_gated" else 1)
        programs, stage_bytes = width // columns * splits, 2 * step * (rows + tile(tokens))
        if rows < 64 or programs < 90 or (splits > 1 and programs > 2 * PROCESSORS):
            continue
        for stages in range(3, min(8, depth // splits // step) + 1):
            if 70 << 10 <= stages * stage_bytes <= SHARED_BYTES and (warps == 4 or step == 256):
                yield LinearLaunch(
                    columns=columns, depth=step, splits=splits, warps=warps, stages=stages
                )


def compile_share(tokens: int, share: slice) -> None:
    """In a process of its own: compile candidates by running them, in a model of one layer."""
    step = Step(tokens, layers=1)
    candidates = [(name, launch) for name in PRODUCTS for launch in sweep(name, tokens)]
    with torch.inference_mode():
        for name, launch in candidates[share]:
            LAUNCHES[key_of(name, tokens)] = launch
            step.run()
            del LAUNCHES[key_of(name, tokens)]


def tune(step: Step, name: str, tokens: int) -> None:
    """Print the fastest launches of a product; the very fastest stays in LAUNCHES."""
    key = key_of(name, tokens)
    times = {}
    for launch in {launch_for(*key), *sweep(name, tokens)}:
        LAUNCHES[key] = launch
        times[launch] = step.milliseconds(7)
    ranked = sorted(times, key=times.__getitem__)
    for launch in ranked[:5]:
        print(f"{name:8} T={tokens}: {times[launch]:.4f} ms  {launch}", flush=True)
    LAUNCHES[key] = ranked[0]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--workers", type=int, default=14)
    arguments = parser.parse_args()
    shares = [slice(n, None, arguments.workers) for n in range(arguments.workers)]
    compile_all(compile_share, [(arguments.tokens, share) for share in shares], arguments.workers)
    step = Step(arguments.tokens)
    print(f"before: {step.milliseconds():.4f} ms", flush=True)
    for name in PRODUCTS:
        tune(step, name, arguments.tokens)
    print(f"after: {step.milliseconds():.4f} ms")
    for key, launch in LAUNCHES.items():
        print(f"    {key}: {launch},".replace("'", '"'))


if __name__ == "__main__":
    main()
