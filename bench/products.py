"""Matrix products of published shapes at the rows of decode steps: ours, tuned, and cuBLAS.

    python bench/products.py table --model qwen3-1.7b --bits 16 --json OUT
    python bench/products.py tune --model qwen3-8b --rows 32 --rows 64 --seconds 200 --json OUT

Weights are cold: calls go round copies that are larger together than the L2 cache. A table says
microseconds, TB/s of the weights, and the time over its bound: the greater of reading the weights
at the published bandwidth and of the arithmetic. `tune` first compiles candidates in many
processes, then times them, widest matrices first, until the seconds are over; it prints the
fastest and how it compares with the rule of `launch_for`. cuBLAS is F.linear alone, without the
norm, gate or residual that our kernels fuse.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from tuning import DEVICE, compile_all, constants, microseconds

from sparrow import ops
from sparrow.benchmarks import timing
from sparrow.models.spec import shape
from sparrow.ops.kernels import layers
from sparrow.ops.kernels.layers import PROCESSORS, LinearLaunch, launch_for, tile

MODELS = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
ROWS = (1, 8, 16, 32, 41, 60, 64, 96, 128, 192, 288)
COLD_BYTES = 192 << 20  # of the copies of a matrix, at least
SHARED_BYTES = 227 << 10
FLOPS = 989e12
EPS = 1e-6


class Case(NamedTuple):
    """A product: rows, outputs (of a gate those of both halves), depth, bits of a weight."""

    name: str
    op: str
    rows: int
    outputs: int
    depth: int
    bits: int

    @property
    def width(self) -> int:
        return self.outputs // 2 if self.op == "norm_gated" else self.outputs

    @property
    def bytes(self) -> int:
        return self.outputs * self.depth * self.bits // 8

    def bound(self, bandwidth: float) -> float:
        """Microseconds that it must take."""
        arithmetic = 2 * self.rows * self.outputs * self.depth / FLOPS
        return 1e6 * max(self.bytes / bandwidth, arithmetic)


def cases(model: str, rows: tuple[int, ...], bits: int) -> Iterator[Case]:
    spec = shape(model)
    heads, hidden, inner = spec.qkv_sizes[0], spec.hidden, spec.intermediate
    products = (
        ("gate_up", "norm_gated", 2 * inner, hidden),
        ("down", "linear_add", hidden, inner),
        ("qkv", "norm_linear", sum(spec.qkv_sizes), hidden),
        ("out", "linear_add", hidden, heads),
        ("head", "logits", spec.vocabulary, hidden),
    )
    for (name, op, outputs, depth), count in product(products, rows):
        yield Case(name, op, count, outputs, depth, bits)


class Weights:
    """Copies of a random matrix, and tensors of a product with them."""

    def __init__(self, case: Case) -> None:
        count = max(1, -(-COLD_BYTES // case.bytes))
        shape = case.outputs, case.depth
        self.plain = [self._random(*shape) for _ in range(count if case.bits == 16 else 1)]
        self.weights: list[ops.Weight] = [*self.plain]
        if case.bits == 8:
            first = ops.Int8Weight.quantise(self.plain[0])
            copies = (ops.Int8Weight(first.data_EI.clone(), first.scale_E) for _ in range(count))
            self.weights = [*copies]

    @staticmethod
    def _random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * shape[-1] ** -0.5

    def calls(self, case: Case, *, cublas: bool = False) -> list[Callable[[], object]]:
        x, norm = self._random(case.rows, case.depth), self._random(1, case.depth)[0]
        residual = self._random(case.rows, case.outputs)
        if cublas:
            return [partial(F.linear, x, weight) for weight in self.plain]
        run = getattr(ops, case.op)
        if case.op == "logits":
            return [partial(run, x, weight) for weight in self.weights]
        if case.op == "linear_add":
            return [partial(run, x, weight, residual) for weight in self.weights]
        return [partial(run, x, norm, weight, eps=EPS) for weight in self.weights]


def timed(calls: list[Callable[[], object]], rounds: int = 15) -> float:
    with ops.settled_weights():
        return microseconds(*calls, rounds=rounds)


def with_launch(launch: LinearLaunch) -> Any:
    return constants(layers, launch_for=lambda *_, **__: launch)


def candidates(case: Case) -> list[LinearLaunch]:
    """Launches that fill the processors and fit their shared memory."""
    found = [launch_for(case.op, case.rows, case.width, case.depth, eight_bits=case.bits == 8)]
    gated, rows = case.op == "norm_gated", tile(case.rows)
    options = product((32, 64, 128, 256), (64, 128, 256), (1, 2, 3, 4, 6, 8), (4, 8))
    for columns, depth, splits, warps in options:
        wide = columns * (2 if gated else 1)
        programs = -(-case.width // columns) * splits
        if not 64 <= wide <= 256 or (splits > 1 and programs > 2 * PROCESSORS):
            continue
        if programs < 0.7 * PROCESSORS or case.depth // splits < 2 * depth:
            continue
        if wide * rows > 128 * 64 * (warps // 4) or (warps == 8 and wide < 128):
            continue
        stage = depth * (wide * case.bits // 8 + 2 * rows)
        for stages in (3, 4, 6):
            if 48 << 10 <= stages * stage <= SHARED_BYTES:
                launch = LinearLaunch(
                    columns=columns, depth=depth, splits=splits, warps=warps, stages=stages
                )
                found.append(launch)
    return list(dict.fromkeys(found))


def compile_share(todo: list[tuple[Case, LinearLaunch]]) -> None:
    """In a process of its own: compile candidates by running them on small matrices."""
    for case, launch in todo:
        small = case._replace(outputs=max(512, 2 * launch.columns), depth=2048)
        with torch.inference_mode(), ops.settled_weights(), with_launch(launch):
            call = Weights(small).calls(small)[0]
            try:
                call()
            except Exception as error:  # such as out of resources
                print(case, launch, type(error).__name__, flush=True)


def tune(todo: list[Case], seconds: float, workers: int) -> list[dict[str, Any]]:
    """The fastest launch of every case."""
    began = time.monotonic()
    pairs: dict[Any, tuple[Case, LinearLaunch]] = {}
    for case in todo:
        for launch in candidates(case):
            pairs.setdefault((case.op, tile(case.rows), case.bits, launch), (case, launch))
    shares = [[*pairs.values()][number::workers] for number in range(workers)]
    compile_all(compile_share, [(share,) for share in shares], workers)
    print(f"{len(pairs)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    found = []
    for case in sorted(todo, key=lambda case: -case.bytes):
        if time.monotonic() - began > seconds:
            print("out of time before", case, flush=True)
            break
        weights = Weights(case)
        times: dict[LinearLaunch, float] = {}
        for launch in candidates(case):
            with with_launch(launch):
                try:
                    times[launch] = timed(weights.calls(case), 5)
                except Exception as error:  # such as out of resources
                    print(case, launch, type(error).__name__, flush=True)
        ranked = sorted(times, key=times.__getitem__)[:3]
        for launch in ranked:
            with with_launch(launch):
                times[launch] = timed(weights.calls(case))
        best = min(ranked, key=times.__getitem__)
        rule = candidates(case)[0]
        found.append(
            {**case._asdict(), "launch": repr(best), "us": times[best], "us_rule": times.get(rule)}
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def table(todo: list[Case]) -> list[dict[str, Any]]:
    bandwidth = timing.peak_bandwidth(DEVICE) or 4.8e12
    found = []
    for case in todo:
        weights = Weights(case)
        own, bound = timed(weights.calls(case)), case.bound(bandwidth)
        row = {**case._asdict(), "us": own, "tb_per_s": case.bytes / own / 1e6}
        row |= {"over_bound": own / bound}
        if case.bits == 16:
            row["us_cublas"] = timed(weights.calls(case, cublas=True))
        found.append(row)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["table", "tune"])
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--rows", action="append", type=int)
    parser.add_argument("--bits", action="append", type=int, choices=[8, 16])
    parser.add_argument("--product", action="append", help="gate_up, down, qkv, out, head")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = tuple(args.rows or (ROWS if args.step == "table" else (16, 32, 64)))
    todo = [
        case
        for model, bits in product(args.model or MODELS, args.bits or [16])
        for case in cases(model, rows, bits)
        if not args.product or case.name in args.product
    ]
    with torch.inference_mode():
        found = table(todo) if args.step == "table" else tune(todo, args.seconds, args.workers)
    if args.json:
        result = {"machine": timing.machine(DEVICE).model_dump(mode="json"), "rows": found}
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
