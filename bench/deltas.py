"""Weight deltas of real RL updates: density, bytes, times; every version is checked to be equal.

    python bench/deltas.py tiny --steps=50 --out=runs/deltas           # words of `sparrow train`
    python bench/deltas.py --model=/tmp/q17/model --data.rows=/tmp/q17/rows.jsonl \
        --data.reward=bench/random_model.py:coin ...                    # bench/random_model.py

    python bench/deltas.py --model=smollm2-135m --data.rows=sums.jsonl \
        --data.reward=bench/deltas.py:last_number ...        # rows: {"prompt": ..., "answer": "7"}

Trains, and at every version makes the delta of the bf16 weights, encodes and decodes it, and
applies it to a copy that has only ever seen deltas, on the device of the learner; for the first
versions the same with all values. Prints a JSON line a version, then means.
"""

import json
import re
import sys
import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch

from sparrow.dataflow.local.loop import train
from sparrow.dataflow.local.run import open_run
from sparrow.models.deltas import Delta, digest
from sparrow.schema.loading import load_config
from sparrow.schema.train import TrainConfig

Weights = dict[str, torch.Tensor]
WHOLE = 2  # versions that are also sent with all values


def last_number(text: str, answer: str) -> float:
    """A reward: whether the last number of an answer is the right one."""
    return float(re.findall(r"\d+", text)[-1:] == [answer])


class Measured:
    """The versions of a run, and a copy that follows them by deltas."""

    def __init__(self, weights: Weights) -> None:
        self.base = weights
        self.copy = {name: weight.clone() for name, weight in weights.items()}
        self.digest, self.lines = digest(weights), list[dict[str, float]]()

    def follow(self, new: Weights, version: int) -> None:
        elements = sum(weight.numel() for weight in new.values())
        times = [time.perf_counter()]
        delta = Delta.between(
            self.base, new, base_version=version - 1, version=version, base_digest=self.digest
        )
        times.append(time.perf_counter())
        data = delta.encode()
        times.append(time.perf_counter())
        self.digest = Delta.decode(data).apply(self.copy, known=self.digest)
        times.append(time.perf_counter())
        assert all(torch.equal(self.copy[name], new[name]) for name in new)
        full = sum(weight.nbytes for weight in new.values())
        line = {
            "version": version,
            "density": delta.changed / elements,
            "bytes": len(data),
            "bytes_per_changed": len(data) / max(1, delta.changed),
            "share_of_full": len(data) / full,
            "compare_s": times[1] - times[0],
            "encode_s": times[2] - times[1],
            "decode_and_apply_s": times[3] - times[2],
        }
        if len(self.lines) < WHOLE:
            line |= self.whole(new, version)
        self.lines.append(line)
        print(json.dumps({name: round(value, 6) for name, value in line.items()}), flush=True)
        self.base = new

    def whole(self, new: Weights, version: int) -> dict[str, float]:
        times = [time.perf_counter()]
        data = Delta.whole(new, version=version).encode()
        times.append(time.perf_counter())
        Delta.decode(data).apply(self.copy)
        times.append(time.perf_counter())
        return {
            "whole_bytes": len(data),
            "whole_encode_s": times[1] - times[0],
            "whole_decode_and_apply_s": times[2] - times[1],
        }


def main() -> None:
    config = load_config(TrainConfig, [], sys.argv[1:])
    with open_run(config) as run:
        measured = Measured(_half(run.learner.weights()))
        sync = run.rollout.sync_weights

        def watched(weights: Mapping[str, torch.Tensor], *, version: int, **rest: Any) -> None:
            sync(weights, version=version, **rest)
            measured.follow(_half(weights), version)

        run.rollout.sync_weights = watched  # type: ignore[method-assign]
        train(run)
    names = measured.lines[0]
    means = {n: fmean(line[n] for line in measured.lines if n in line) for n in names}
    print(json.dumps({"means": {name: round(value, 6) for name, value in means.items()}}))


def _half(weights: Mapping[str, torch.Tensor]) -> Weights:
    return {name: weight.detach().to(torch.bfloat16, copy=True) for name, weight in weights.items()}


if __name__ == "__main__":
    main()
