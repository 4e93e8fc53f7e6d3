"""The tail before and after a run: answers under its schedule, each measured exactly."""

from dataclasses import replace
from typing import Any

import numpy as np

from sparrow.dataflow.local import learning, playing
from sparrow.dataflow.local.metrics import LEAST, UNCERTAIN, p05
from sparrow.dataflow.local.run import Run
from sparrow.schema.base import Float32Array
from sparrow.schema.gate import Reading
from sparrow.schema.study import ProbeConfig
from sparrow.stats import TAIL, quantile_interval

PLACE = 500_000  # where its rows begin, the same for all runs of a seed; far from those of steps


def probe(run: Run, wanted: ProbeConfig, width: int) -> dict[str, Any]:
    """p05 by bin of `width` tokens with the weights and the schedule of now; nothing is learnt."""
    rollout = run.config.rollout.model_copy(
        update={"prompts": wanted.prompts, "samples": wanted.samples}
    )
    gate = run.config.gate.model_copy(update={"sample": wanted.prompts * wanted.samples})
    config = run.config.model_copy(update={"rollout": rollout, "gate": gate})
    looker = replace(run, config=config, position=PLACE)
    played = playing.play(looker)
    batch = learning.read(looker, played.groups, played.watched)
    schedule = run.gate.schedule
    return {
        "step": run.step,
        "schedule": "dense" if schedule is None else schedule.name,
        "entropy": float(np.concatenate([one.entropy for one in batch.reads]).mean()),
        "length": float(np.mean([len(one.lengths) for one in batch.readings])),
        "bins": bins_of(batch.readings, width),
    }


def bins_of(readings: tuple[Reading, ...], width: int) -> list[dict[str, Any]]:
    """p05 with its interval over prompts in every bin with tokens enough, and of unsure tokens."""
    last = max((int(one.lengths.max()) for one in readings if len(one.lengths)), default=0)
    found = []
    for start in range(0, last + 1, width):
        parts: dict[str, list[Float32Array]] = {}
        unsure: list[Float32Array] = []
        for one in readings:
            inside = (one.lengths >= start) & (one.lengths < start + width)
            if inside.any():
                parts.setdefault(one.prompt, []).append(one.alpha[inside])
                assert one.entropy is not None
                unsure.append(one.alpha[inside & (one.entropy > UNCERTAIN)])
        groups = [np.concatenate(each) for each in parts.values()]
        if sum(map(len, groups)) >= LEAST:
            found.append({"start": start, "stop": start + width} | _figures(groups, unsure))
    return found


def _figures(groups: list[Float32Array], unsure: list[Float32Array]) -> dict[str, Any]:
    tail, doubtful = quantile_interval(groups, TAIL), np.concatenate(unsure)
    return {
        "tokens": sum(map(len, groups)),
        "prompts": len(groups),
        "p05": tail.value,
        "low": tail.low,
        "high": tail.high,
        "uncertain": len(doubtful),
        "p05_uncertain": p05(doubtful) if len(doubtful) else None,
    }
