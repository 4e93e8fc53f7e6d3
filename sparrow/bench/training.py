"""Optimiser steps in seconds, share of the peak, and memory: what `sparrow bench train` measures.

A step is a whole one: forward and backward over all sequences, clipping, AdamW. Utilisation counts
the operations of `train.costs` (6 N T and causal attention; what is computed again does not count)
over the peak of the tensor cores.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.table import Table

from sparrow import models
from sparrow.bench.timing import device_name, free_memory, machine
from sparrow.calibrate.tables import figures
from sparrow.models.checkpoint import pick_device
from sparrow.schema.bench import Benchmark
from sparrow.schema.episode import TrainSample
from sparrow.schema.train import RateConfig
from sparrow.train.costs import trainer_memory, training_flops
from sparrow.train.learner import Learner
from sparrow.train.objectives.surrogates import Objective, ppo, token_mean
from sparrow.train.policy import Policy

PEAKS = {"H200": 989e12, "H100": 989e12}  # published 16-bit operations per second, dense
WARM, TIMED = 2, 5  # steps
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sequences of one step, and how it is taken."""

    sequences: int
    length: int
    recompute: bool
    compiled: bool = False

    @property
    def name(self) -> str:
        how = ["recompute"] * self.recompute + ["compiled"] * self.compiled
        return f"{self.sequences} x {self.length}" + (f" ({', '.join(how)})" if how else "")


GPU_CASES = (
    Case(sequences=4, length=4096, recompute=False),
    Case(sequences=4, length=4096, recompute=False, compiled=True),
    Case(sequences=4, length=4096, recompute=True, compiled=True),
    Case(sequences=1, length=32768, recompute=True),
    Case(sequences=1, length=32768, recompute=True, compiled=True),
)
CPU_CASES = (Case(sequences=4, length=256, recompute=False),)


def run(
    *,
    model: str | None = None,
    cases: Sequence[Case] | None = None,
    device: str = "auto",
    steps: int = TIMED,
    progress: Callable[[str], None] = lambda text: None,
) -> Benchmark:
    """Every case after the other, each with a trainer of its own; the fastest device's defaults."""
    place = pick_device(device)
    on_gpu = place.type == "cuda"
    shape = model or ("qwen3-1.7b" if on_gpu else "qwen3-0.6b")
    small: dict[str, Any] = {} if on_gpu else {"layers": 2, "vocabulary": 2048}
    chosen = cases or (GPU_CASES if on_gpu else CPU_CASES)
    rows = []
    for case in chosen:
        progress(f"{shape}: {case.name}")
        rows.append(_measure(shape, small, case, place, steps))
        free_memory(place)
    return Benchmark(machine=machine(place), model=shape, changes=small, cases=rows)


def _measure(
    shape: str, changes: dict[str, Any], case: Case, device: torch.device, steps: int
) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = models.random(shape, device=device, **changes)
    if case.length > decoder.spec.max_positions:
        most = decoder.spec.max_positions
        raise ValueError(f"{case.name}: {shape} has {most} positions, give at most so many tokens")
    policy = Policy(decoder, dtype=dtype, recompute=case.recompute, compiled=case.compiled)
    tokens = case.sequences * case.length
    learner = Learner(policy, RateConfig(rate=1e-6), steps=1000, tokens=tokens)
    samples = [_sample(case.length, decoder.spec.vocabulary, n) for n in range(case.sequences)]
    seconds, memory = _time(learner, samples, device, steps)
    flops = training_flops(decoder.spec, [case.length] * case.sequences)
    peak = _peak(device)
    predicted = trainer_memory(
        decoder.spec,
        tokens=tokens,
        longest=case.length,
        item=dtype.itemsize,
        recompute=case.recompute,
        gpu=device.type == "cuda",
    ).total
    return {
        **asdict(case),
        "seconds": [round(each, 5) for each in seconds],
        "tokens_per_second": round(tokens / median(seconds), 1),
        "teraflops": round(flops / median(seconds) / 1e12, 2),
        "utilisation": None if peak is None else round(flops / median(seconds) / peak, 4),
        "memory_gib": None if memory is None else round(memory / GIB, 2),
        "predicted_gib": round(predicted / GIB, 2),
    }


def _time(
    learner: Learner, samples: Sequence[TrainSample], device: torch.device, steps: int
) -> tuple[list[float], int | None]:
    """Seconds of each step, and the most bytes that were allocated in one."""
    weights = [np.ones(sample.learnt, np.float32) for sample in samples]
    objective = Objective(surrogate=ppo, aggregate=token_mean)
    seconds = []
    on_gpu = device.type == "cuda"
    for number in range(WARM + steps):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        stats = learner.update(samples, weights, objective)
        if on_gpu:
            torch.cuda.synchronize()
        if stats.skipped:
            raise ArithmeticError("the loss of random weights is no number")
        if number >= WARM:
            seconds.append(time.perf_counter() - begun)
    return seconds, torch.cuda.max_memory_allocated() if on_gpu else None


def _sample(length: int, vocabulary: int, seed: int) -> TrainSample:
    """Random tokens, all but the first learnt."""
    rng = np.random.default_rng(seed)
    level = np.full(length, -float(np.log(vocabulary)), np.float32)
    return TrainSample(
        ids=rng.integers(vocabulary, size=length, dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        rollout_logprob=level,
        advantage=1.0 if seed % 2 else -1.0,
        old_logprob=level,
    )


def _peak(device: torch.device) -> float | None:
    name = device_name(device)
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def table(result: Benchmark) -> Table:
    """The model, in what it differs from the one of that name, and every case."""
    cut = ", ".join(f"{name} {value}" for name, value in result["changes"].items())
    shape = f"{result['model']}{f' cut to {cut}' if cut else ''}"
    return figures(
        f"{shape}, one optimiser step | {result.machine.describe()}",
        result["cases"],
        "sequences length recompute compiled seconds tokens_per_second teraflops utilisation "
        "memory_gib predicted_gib",
        seconds=lambda row: median(row["seconds"]),
    )
