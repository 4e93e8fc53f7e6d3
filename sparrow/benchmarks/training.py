"""`sparrow bench train`: seconds, utilisation and memory of optimiser steps.

A step is forward and backward over all sequences, clipping and AdamW. Utilisation is the FLOPs of
`training.costs` (6 N T and causal attention, recomputation not counted) over the peak of the tensor
cores.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from sparrow import models
from sparrow.benchmarks import timing
from sparrow.models.checkpoint import pick_device
from sparrow.schema.bench import TrainBenchmark, TrainRow, TrainWork
from sparrow.schema.episode import TrainSample
from sparrow.schema.train import RateConfig
from sparrow.training.costs import trainer_memory, training_flops
from sparrow.training.learner import Learner
from sparrow.training.objectives.surrogates import Objective, ppo, token_mean
from sparrow.training.policy import Policy

WARM, TIMED = 2, 5  # steps
GIB = 2**30
GPU_CASES = (
    TrainWork(sequences=4, length=4096, recompute=False),
    TrainWork(sequences=4, length=4096, recompute=False, compiled=True),
    TrainWork(sequences=4, length=4096, recompute=True, compiled=True),
    TrainWork(sequences=1, length=32768, recompute=True),
    TrainWork(sequences=1, length=32768, recompute=True, compiled=True),
)
CPU_CASES = (TrainWork(sequences=4, length=256, recompute=False),)


def run(
    *,
    model: str | None = None,
    case: Sequence[TrainWork] = (),
    device: str = "auto",
    steps: int = TIMED,
    progress: Callable[[str], None] = lambda text: None,
) -> TrainBenchmark:
    """Measure every case with a learner of its own; defaults depend on the device."""
    place = pick_device(device)
    on_gpu = place.type == "cuda"
    shape = model or ("qwen3-1.7b" if on_gpu else "qwen3-0.6b")
    small: dict[str, Any] = {} if on_gpu else {"layers": 2, "vocabulary": 2048}
    rows = []
    for work in case or (GPU_CASES if on_gpu else CPU_CASES):
        progress(f"{shape}: {work}")
        rows.append(_measure(shape, small, work, place, steps))
        timing.free_memory(place)
    return TrainBenchmark(
        machine=timing.machine(place), model=shape, changes=small, cases=tuple(rows)
    )


def _measure(
    shape: str, changes: dict[str, Any], case: TrainWork, device: torch.device, steps: int
) -> TrainRow:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = models.random(shape, device=device, **changes)
    most, tokens = decoder.spec.max_positions, case.sequences * case.length
    if case.length > most:
        raise ValueError(f"{case}: length must be at most {most} for {shape}")
    policy = Policy(decoder, dtype=dtype, recompute=case.recompute, compiled=case.compiled)
    learner = Learner(policy, RateConfig(rate=1e-6), steps=1000, tokens=tokens)
    samples = [_sample(case.length, decoder.spec.vocabulary, n) for n in range(case.sequences)]
    seconds, memory = _time(learner, samples, device, steps)
    flops = training_flops(decoder.spec, [case.length] * case.sequences)
    gpu = timing.published(device)
    predicted = trainer_memory(
        decoder.spec,
        tokens=tokens,
        longest=case.length,
        item=dtype.itemsize,
        recompute=case.recompute,
        gpu=device.type == "cuda",
    ).total
    per_second = flops / median(seconds)
    return TrainRow(
        **dict(case),
        seconds=tuple(round(value, 5) for value in seconds),
        tokens_per_second=round(tokens / median(seconds), 1),
        teraflops=round(per_second / 1e12, 2),
        utilisation=None if gpu is None else round(per_second / gpu.flops_per_s, 4),
        memory_gib=None if memory is None else round(memory / GIB, 2),
        predicted_gib=round(predicted / GIB, 2),
    )


def _time(
    learner: Learner, samples: Sequence[TrainSample], device: torch.device, steps: int
) -> tuple[list[float], int | None]:
    """Seconds of every step, and the peak of allocated bytes."""
    weights = [np.ones(sample.learnt, np.float32) for sample in samples]
    objective = Objective(surrogate=ppo, aggregate=token_mean)
    update = partial(learner.update, samples, weights, objective)
    on_gpu, seconds = device.type == "cuda", []
    for _ in range(WARM + steps):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        stats, elapsed = timing.timed(update, device)
        seconds.append(elapsed)
        if stats.skipped:
            raise ArithmeticError("the loss of random weights is not finite")
    return seconds[WARM:], torch.cuda.max_memory_allocated() if on_gpu else None


def _sample(length: int, vocabulary: int, seed: int) -> TrainSample:
    """A sample of random tokens, with a loss on all but the first."""
    rng = np.random.default_rng(seed)
    level = np.full(length, -float(np.log(vocabulary)), np.float32)
    return TrainSample(
        ids=rng.integers(vocabulary, size=length, dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        rollout_logprob=level,
        advantage=1.0 if seed % 2 else -1.0,
        old_logprob=level,
    )
