"""All conclusions as plain JSON: what is not a number, or not there, is null."""

import math
from dataclasses import asdict
from typing import Any

from sparrow.report.study.cells import mean
from sparrow.report.study.outcome import PUBLISHED, ArmOutcome, StudyOutcome
from sparrow.report.study.threshold import ABOVE, BELOW, Threshold
from sparrow.report.study.verdicts import inconclusive, verdicts

FORMAT = 1


def results(found: StudyOutcome) -> dict[str, Any]:
    """The content of results.json, the same for the same study."""
    content = {
        "format": FORMAT,
        "design": asdict(found.design),
        "verdicts": verdicts(found),
        "inconclusive": inconclusive(found),
        "arms": [_arm(arm) for arm in found.arms],
        "common_variance": found.common,
        "threshold": None if found.threshold is None else _threshold(found.threshold),
        "points": [asdict(point) for point in found.points],
        "points_beside": [asdict(point) for point in found.aside],
        "left_out_of_fit": [{"cell": cell, "why": why} for cell, why in found.left_out],
        "schedule_against_fixed": [asdict(pair) for pair in found.fixed],
        "negative_control": None
        if found.flat is None
        else {**asdict(found.flat), "moved": found.flat.moved},
        "folders_of_no_arm": list(found.strangers),
    }
    return {key: _finite(value) for key, value in content.items()}


def _arm(arm: ArmOutcome) -> dict[str, Any]:
    sample = None
    if arm.sample is not None:
        sample = {**asdict(arm.sample), "mean": arm.sample.mean, "variance": arm.sample.spread}
    gap = None if arm.gap is None else {**asdict(arm.gap), "errors": arm.gap.errors}
    return {
        "name": arm.arm.name,
        "role": arm.arm.role,
        "finals": sample,
        "gap": gap,
        "lags": arm.lags,
        "collapsed": list(arm.collapsed),
        "without_result": [cell.name for cell in arm.missing],
        "p05": {
            "mean": mean(arm.p05),
            "low": min(arm.p05, default=None),
            "high": max(arm.p05, default=None),
        },
        "rollout": asdict(arm.spent),
        "start_against_end": asdict(arm.drifts),
        "cells": [asdict(cell) for cell in arm.cells],
    }


def _threshold(found: Threshold) -> dict[str, Any]:
    """Open ends are null and named."""
    kinds = {BELOW: "open below", ABOVE: "open above"}
    return {
        **asdict(found),
        "kind": kinds.get(found.at.value, "closed"),
        "low_kind": kinds.get(found.low, "closed"),
        "high_kind": kinds.get(found.high, "closed"),
        "published": PUBLISHED,
        "holds_published": found.holds(PUBLISHED),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
