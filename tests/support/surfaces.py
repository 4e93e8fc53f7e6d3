"""Surfaces and plans as their files hold them, made up but of the shape that real ones have."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparrow.schema.base import to_dict
from sparrow.schema.schedule import Schedule

Plain = dict[str, Any]


def p05_at(budget: float, length: float, quality: float = 1.0) -> float:
    """Falls with length, rises with the budget, 1 where all is kept."""
    if budget >= length:
        return 0.9985
    return 1 / (1 + 0.055 / quality * (length / budget - 1) ** 0.75 * (1 + length / 40_000))


def cell(variant: str, budget: int | None, start: int, stop: int, **changes: Any) -> Plain:
    """One cell; `quality` makes the flow better, `noise` moves p05."""
    quality, noise = changes.pop("quality", 1.0), changes.pop("noise", 0.0)
    length = (start + stop) / 2
    p05 = p05_at(budget or math.inf, length, quality)
    p05 = float(np.clip(p05 + noise * (1 - p05), 0.02, 0.9995))
    loss = 1 - p05
    tokens = int(60 * (stop - start) * math.exp(-length / 15_000)) + 40
    wide = loss * 0.1 + 0.001
    bounds = {"lower_p05": p05 - 0.35 * loss, "upper_p05": min(1.0, p05 + 0.2 * loss)}
    made = {
        "variant": variant,
        "budget": budget,
        "start": start,
        "stop": stop,
        "tokens": tokens,
        "sequences": 240,
        "prompts": 60,
        "mean": 1 - 0.15 * loss,
        "p01": p05 - 0.6 * loss * p05,
        "p05": p05,
        "low": p05 - wide,
        "high": min(1.0, p05 + 0.8 * wide),
        "p50": 1 - 0.01 * loss,
        "above": 0.97 - 0.9 * loss,
        "beta": [1.2 + 6 * p05, 0.5 + 2.5 * loss, 0.021],
        "uncertain_p05": p05 - 0.1 * loss,
        "uncertain": tokens // 3,
        "estimators": {
            "top_k": 20,
            **bounds,
            "lower_mean": 0.95,
            "upper_mean": 0.99,
            "widest": 0.2,
            "ratio_mean": 0.97,
            "ratio_error": 0.001,
            "ratio_p05": max(0.0, p05 - 1.1 * loss),
        },
    }
    return made | changes


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
    made = {
        "format": 1,
        "model": "qwen3-1.7b",
        "family": "qwen3",
        "fingerprint": "ab12",
        "shape": "{}",
        "dtype": "bfloat16",
        "device": "NVIDIA H200",
        "mode": "generated",
        "prompts": "countdown, length 4000",
        "prompts_digest": "cd34",
        "seed": 0,
        "temperature": 1.0,
        "max_tokens": bins[-1],
        "targets": [0.86],
        "bins": list(bins),
        "variants": [variant(name) for name in names],
        "budgets": list(budgets),
        "cells": cells,
        "positions": cells,
        "floor": [cell("dense", None, *edge, estimators=None) for edge in edges],
        "layers": [
            layer_loss(names[0], budgets[0], first, layers) for first in range(0, layers, 4)
        ],
        "lengths": [900, 1500],
        "undecided": [],
        "warnings": [],
        "versions": ["torch 2.13"],
        "command": "sparrow calibrate",
        "created": "2026-07-01",
    }
    return made | changes


def variant(name: str) -> Plain:
    return {
        "name": name,
        "flow": name,
        "source": name,
        "digest": "ef56",
        "field_bytes": 256,
        "page": 16,
        "first": 1,
        "last": 2,
        "dense_layers": [0, 1],
        "shares": [],
    }


def layer_loss(name: str, budget: int, first: int, layers: int) -> Plain:
    loss = 0.02 + 0.15 * math.exp(-(((first - layers / 3) / 4) ** 2))
    return {
        "variant": name,
        "budget": budget,
        "layers": list(range(first, min(first + 4, layers))),
        "p05": 1 - loss,
        "low": 1 - 1.15 * loss,
        "high": 1 - 0.9 * loss,
        "mean": 0.99,
        "tokens": 40_000,
        "prompts": 60,
    }


def plan(count: int = 3, width: int = 1000, dense_from: int | None = None, **changes: Any) -> Plain:
    """A plan of so many bins, the last without an end; bins from `dense_from` on are dense."""
    ladder = [128 * round(2 + 2.2 * i**0.9) for i in range(count)]
    dense = range(count) if dense_from is None else range(dense_from)
    budgets = [budget if i in dense else None for i, budget in enumerate(ladder)]
    bins = [plan_bin(i, width, count, budget) for i, budget in enumerate(budgets)]
    ratio = sum(b["dense_seconds"] for b in bins) / sum(b["seconds"] for b in bins)
    made = {
        "format": 1,
        "model": "qwen3-1.7b",
        "variant": "block_mean",
        "target": 0.86,
        "by": "low",
        "bins": bins,
        "sensitivity": [
            _moved(0.84, [b and int(b * 0.8) for b in budgets], 1.1 * ratio),
            _moved(0.86, budgets, ratio),
            _moved(0.88, [b and int(b * 1.3) for b in budgets], 0.9 * ratio),
        ],
        "speed_up": ratio,
        "limit": 1.3 * ratio,
        "eflops": 1.7 * ratio,
        "hardware": "NVIDIA H200",
        "workload": "60 requests, lognormal lengths of mean 16.7K, cut at 32K",
        "compare": None,
        "check": None,
        "eflops_printed": 1.5 * ratio,
        "seconds": sum(b["seconds"] for b in bins),
        "dense_seconds": sum(b["dense_seconds"] for b in bins),
        "steps": 100,
        "ms_step": 1.0,
        "dense_ms_step": 2.0,
        "tokens": 1000,
        "capacity": 60,
        "bytes": 10**9,
        "dense_bytes": 2 * 10**9,
        "hardware_note": "",
        "variants": [],
        "notes": [],
        "schedule": to_dict(Schedule.fixed(256)),
    }
    return made | changes


def _moved(target: float, budgets: list[int | None], speed_up: float) -> Plain:
    aside = {"target": target, "budgets": budgets, "speed_up": speed_up, "reached": True}
    return aside | {"variant": "block_mean", "nearest": None}


def plan_bin(index: int, width: int, count: int, budget: int | None) -> Plain:
    start, stop = index * width, None if index == count - 1 else (index + 1) * width
    p05 = None if budget is None else 0.878 + 0.008 * math.sin(index)
    interval = (None, None) if p05 is None else (p05 - 0.009, p05 + 0.008)
    dense_seconds = 90 * (index + 1) * math.exp(-index / count * 2)
    share = 1.0 if budget is None else min(1.0, budget / (start + width / 2) + 0.06)
    return {
        "start": start,
        "stop": stop,
        "budget": budget,
        "p05": p05,
        "low": interval[0],
        "high": interval[1],
        "mean": p05,
        "prompts": 60,
        "kept_share": share,
        "seconds": dense_seconds * (0.25 + 0.75 * share),
        "dense_seconds": dense_seconds,
    }
