"""Surfaces and plans as their files hold them, made up but of the shape that real ones have."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparrow.schema.base import to_dict
from sparrow.schema.schedule import Schedule

Plain = dict[str, Any]


def cell(variant: str, budget: int | None, start: int, stop: int, **changes: Any) -> Plain:
    """One cell, whose p05 falls with length and rises with the budget.

    `quality` makes the flow better, `noise` moves p05.
    """
    quality, noise = changes.pop("quality", 1.0), changes.pop("noise", 0.0)
    length, p05 = (start + stop) / 2, 0.9985
    if budget is not None and budget < length:
        lost = (length / budget - 1) ** 0.75 * (1 + length / 40_000)
        p05 = 1 / (1 + 0.055 / quality * lost)
    p05 = float(np.clip(p05 + noise * (1 - p05), 0.02, 0.9995))
    loss = 1 - p05
    tokens = int(60 * (stop - start) * math.exp(-length / 15_000)) + 40
    wide = loss * 0.1 + 0.001
    estimators = {"top_k": 20, "lower_mean": 0.95, "upper_mean": 0.99, "widest": 0.2}
    estimators |= {"lower_p05": p05 - 0.35 * loss, "upper_p05": min(1.0, p05 + 0.2 * loss)}
    estimators |= {"ratio_mean": 0.97, "ratio_error": 0.001, "ratio_p05": max(0, p05 - 1.1 * loss)}
    made = {"variant": variant, "budget": budget, "start": start, "stop": stop}
    made |= {"tokens": tokens, "sequences": 240, "prompts": 60, "uncertain": tokens // 3}
    made |= {"mean": 1 - 0.15 * loss, "p01": p05 - 0.6 * loss * p05, "p50": 1 - 0.01 * loss}
    made |= {"p05": p05, "low": p05 - wide, "high": min(1.0, p05 + 0.8 * wide)}
    made |= {"above": 0.97 - 0.9 * loss, "beta": [1.2 + 6 * p05, 0.5 + 2.5 * loss, 0.021]}
    return made | {"uncertain_p05": p05 - 0.1 * loss, "estimators": estimators} | changes


def surface(
    bins: Sequence[int] = (0, 500, 1000, 2000),
    budgets: Sequence[int] = (128, 256, 512),
    names: Sequence[str] = ("block_mean",),
    missing: float = 0.0,
    layers: int = 24,
    **changes: Any,
) -> Plain:
    """A surface; a share of its cells is missing."""
    rng = np.random.default_rng(7)
    edges = list(itertools.pairwise(bins))
    cells = [
        cell(name, budget, *edge, quality=1 + 0.6 * rank, noise=float(rng.normal(0, 0.04)))
        for rank, name in enumerate(names)
        for budget in budgets
        for edge in edges
        if rng.random() >= missing
    ]
    groups = range(0, layers, 4)
    made = {"format": 1, "model": "qwen3-1.7b", "family": "qwen3", "fingerprint": "ab12"}
    made |= {"shape": "{}", "dtype": "bfloat16", "device": "NVIDIA H200", "mode": "generated"}
    made |= {"prompts": "countdown, length 4000", "prompts_digest": "cd34", "seed": 0}
    made |= {"temperature": 1.0, "max_tokens": bins[-1], "targets": [0.86], "bins": list(bins)}
    made |= {"variants": [variant(name) for name in names], "budgets": list(budgets)}
    made |= {"cells": cells, "positions": cells, "lengths": [900, 1500], "undecided": []}
    made["floor"] = [cell("dense", None, *edge, estimators=None) for edge in edges]
    made["layers"] = [layer_loss(names[0], budgets[0], first, layers) for first in groups]
    made |= {
        "drafts": [],
        "warnings": [],
        "versions": ["torch 2.13"],
        "command": "sparrow calibrate",
    }
    return made | {"created": "2026-07-01"} | changes


def variant(name: str) -> Plain:
    made = {"name": name, "flow": name, "source": name, "digest": "ef56", "field_bytes": 256}
    return made | {"page": 16, "first": 1, "last": 2, "dense_layers": [0, 1], "shares": []}


def layer_loss(name: str, budget: int, first: int, layers: int) -> Plain:
    loss = 0.02 + 0.15 * math.exp(-(((first - layers / 3) / 4) ** 2))
    group = list(range(first, min(first + 4, layers)))
    made = {"variant": name, "budget": budget, "layers": group, "tokens": 40_000, "prompts": 60}
    return made | {"p05": 1 - loss, "low": 1 - 1.15 * loss, "high": 1 - 0.9 * loss, "mean": 0.99}


def plan(count: int = 3, width: int = 1000, dense_from: int | None = None, **changes: Any) -> Plain:
    """A plan of so many bins, the last without an end; bins from `dense_from` on are dense."""
    ladder = [128 * round(2 + 2.2 * i**0.9) for i in range(count)]
    dense = range(count) if dense_from is None else range(dense_from)
    budgets = [budget if i in dense else None for i, budget in enumerate(ladder)]
    bins = [plan_bin(i, width, count, budget) for i, budget in enumerate(budgets)]
    ratio = sum(b["dense_seconds"] for b in bins) / sum(b["seconds"] for b in bins)
    moved = ((0.84, 0.8, 1.1), (0.86, 1.0, 1.0), (0.88, 1.3, 0.9))
    made = {"format": 1, "model": "qwen3-1.7b", "variant": "block_mean", "target": 0.86}
    made |= {
        "by": "low",
        "hard_misses": None,
        "bins": bins,
        "speed_up": ratio,
        "limit": 1.3 * ratio,
    }
    aside = {"reached": True, "variant": "block_mean", "nearest": None}
    made["sensitivity"] = [
        {"target": target, "budgets": [b and int(b * share) for b in budgets]}
        | {"speed_up": gain * ratio, **aside}
        for target, share, gain in moved
    ]
    made |= {"eflops": 1.7 * ratio, "eflops_printed": 1.5 * ratio, "hardware": "NVIDIA H200"}
    made |= {"workload": "60 requests, lognormal lengths of mean 16.7K, cut at 32K"}
    made |= {f"{kind}seconds": sum(b[f"{kind}seconds"] for b in bins) for kind in ("", "dense_")}
    made |= {"steps": 100, "ms_step": 1.0, "dense_ms_step": 2.0, "tokens": 1000, "capacity": 60}
    made |= {"bytes": 10**9, "dense_bytes": 2 * 10**9, "hardware_note": "", "variants": []}
    made |= {"compare": None, "check": None, "notes": []}
    return made | {"schedule": to_dict(Schedule.fixed(256))} | changes


def plan_bin(index: int, width: int, count: int, budget: int | None) -> Plain:
    start, stop = index * width, None if index == count - 1 else (index + 1) * width
    p05 = None if budget is None else 0.878 + 0.008 * math.sin(index)
    low, high = (None, None) if p05 is None else (p05 - 0.009, p05 + 0.008)
    dense_seconds = 90 * (index + 1) * math.exp(-index / count * 2)
    share = 1.0 if budget is None else min(1.0, budget / (start + width / 2) + 0.06)
    made = {"start": start, "stop": stop, "budget": budget, "p05": p05, "low": low, "high": high}
    made |= {"mean": p05, "prompts": 60, "kept_share": share, "dense_seconds": dense_seconds}
    return made | {"seconds": dense_seconds * (0.25 + 0.75 * share)}
