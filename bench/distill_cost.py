"""What a step of distillation costs beside old log-probs and the update.

Every trajectory is distilled. Teacher new: a dense pass more; old: the states of the old log-probs.
"""

import argparse
import json
from statistics import median

import numpy as np
import torch

from sparrow import models
from sparrow.benchmarks import timing
from sparrow.models.lora import Adapter
from sparrow.schema.episode import TrainSample
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RateConfig
from sparrow.sparse.presets import preset
from sparrow.sparse.rule import Rule
from sparrow.training.distillation import Distiller
from sparrow.training.learner import Learner
from sparrow.training.objectives.surrogates import Objective, ppo, token_mean
from sparrow.training.policy import Policy

GIB = 2**30


def sample(length: int, vocabulary: int, seed: int) -> TrainSample:
    level = np.full(length, -float(np.log(vocabulary)), np.float32)
    ids = np.random.default_rng(seed).integers(vocabulary, size=length, dtype=np.int32)
    mask = np.arange(length) >= 128
    return TrainSample(
        ids=ids,
        loss_mask=mask,
        rollout_logprob=level,
        advantage=1.0 - 2 * (seed % 2),
        old_logprob=level,
    )


def measure(args: argparse.Namespace, sequences: int, length: int, *, recompute: bool) -> dict:
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    changes = {} if gpu else {"layers": 2, "vocabulary": 2048}
    model = models.random(args.model, device=device, **changes)
    policy = Policy(model, dtype=dtype, recompute=recompute, compiled=gpu)
    tokens = sequences * length
    learner = Learner(policy, RateConfig(rate=1e-6), steps=1000, tokens=tokens)
    adapter = Adapter.random(model.spec, args.rank, b_std=0.0, device=device)
    distiller = Distiller(policy, adapter, rate=5e-6, tokens=tokens, divergence=args.divergence)
    schedule = preset(args.schedule) if gpu else Schedule.fixed(64)
    rule = Rule.of(schedule)
    samples = [sample(length, model.spec.vocabulary, n) for n in range(sequences)]
    weights = [np.ones(one.learnt, np.float32) for one in samples]
    objective = Objective(surrogate=ppo, aggregate=token_mean)
    teacher: list = []
    parts = {
        "old_log_prob": lambda: learner.score(samples),
        "old_log_prob_kept": lambda: (teacher.clear(), learner.score(samples, teacher=teacher)),
        "update": lambda: learner.update(samples, weights, objective),
        "distill_new": lambda: distiller.step(samples, schedule, rule, objective=objective),
        "distill_old": lambda: distiller.step(
            samples, schedule, rule, objective=objective, teacher=teacher[0]
        ),
    }
    row: dict = {"sequences": sequences, "length": length, "recompute": recompute}
    for name, work in parts.items():
        seconds = []
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        for turn in range(args.warm + args.repeat):
            _, elapsed = timing.timed(work, device)
            seconds += [elapsed] if turn >= args.warm else []
        row[name] = round(median(seconds), 4)
        if gpu:
            row[f"{name}_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    if args.profile:
        with torch.profiler.profile() as profiled:
            parts["distill_old"]()
        key = "self_cuda_time_total" if gpu else "self_cpu_time_total"
        print(profiled.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=70))
    step = row["old_log_prob"] + row["update"]
    row["share_new"] = round(row["distill_new"] / step, 3)
    more = row["old_log_prob_kept"] - row["old_log_prob"]
    row["share_old"] = round((row["distill_old"] + more) / step, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="qwen3-1.7b" if torch.cuda.is_available() else "qwen3-0.6b"
    )
    parser.add_argument("--schedule", default="qwen3-1.7b-0.80")
    parser.add_argument("--divergence", default="total_variation")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="list the kernels of one step")
    parser.add_argument("--case", action="append", help="sequences,length,recompute (0 or 1)")
    args = parser.parse_args()
    for case in args.case or ["4,4096,0", "4,4096,1", "1,16384,1"]:
        sequences, length, recompute = map(int, case.split(","))
        print(json.dumps(measure(args, sequences, length, recompute=bool(recompute))), flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
