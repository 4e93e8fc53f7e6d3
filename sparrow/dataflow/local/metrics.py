"""A step in numbers, under the names that people have dashboards for, and our own."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sparrow.dataflow.local.messages import LearnerBatch, RolloutBatch
from sparrow.schema.base import Float32Array
from sparrow.schema.episode import Trajectory
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.gate import Look, Reading
from sparrow.schema.gate import metrics as gate_metrics
from sparrow.stats import TAIL
from sparrow.training.learner import UpdateStats

Metrics = dict[str, float]
FloatArray = npt.NDArray[np.float64]

UNCERTAIN = 0.1  # nats of the policy's entropy above which a token was a choice
LEAST = 100  # tokens of a step in a bin before their tail is told


def step_metrics(
    played: RolloutBatch,
    batch: LearnerBatch,
    updates: Sequence[UpdateStats],
    look: Look,
    seconds: Mapping[str, float],
) -> Metrics:
    """Everything of a step; what is unknown is left out."""
    trajectories = played.trajectories
    tokens = sum(len(one) for one in trajectories)
    return (
        _rollout(trajectories, played)
        | _advantages(batch)
        | _updates(updates)
        | batch.mismatch
        | gate_metrics(look)
        | _tail_of_step(batch.readings, look)
        | _density(trajectories)
        | {f"timing_s/{part}": value for part, value in seconds.items()}
        | {"perf/total_num_tokens": float(tokens), "perf/throughput": tokens / seconds["step"]}
    )


def _rollout(trajectories: Sequence[Trajectory], played: RolloutBatch) -> Metrics:
    found: Metrics = {
        "data/groups": float(len(played.groups)),
        "data/overlong_prompts": float(len(played.overlong)),
        "data/uninformative_groups": float(played.uninformative),
        "data/rounds": float(played.rounds),
    }
    if played.acc is not None:
        found["critic/acc/played"] = played.acc
    if not trajectories:
        return found
    rewards = np.array([one.reward for one in trajectories], dtype=float)
    lengths = np.array([(one.weight_version >= 0).sum() for one in trajectories])
    prompts = np.array([len(one) for one in trajectories]) - lengths
    found |= {
        **_range("critic/score", rewards),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": float(np.mean([one.truncated for one in trajectories])),
        "prompt_length/mean": float(prompts.mean()),
    }
    accs = [one.acc for one in trajectories if one.acc is not None]
    return found | ({"critic/acc/mean": float(np.mean(accs))} if accs else {})


def _advantages(batch: LearnerBatch) -> Metrics:
    if not batch.samples:
        return {}
    values = np.array([sample.advantage for sample in batch.samples])
    entropy = np.concatenate([found.entropy for found in batch.reads])
    return {
        **_range("critic/advantages", values),
        "critic/advantages/zero_frac": float((values == 0).mean()),
        "actor/entropy": float(entropy.mean()) if len(entropy) else 0.0,
    }


def _range(name: str, values: FloatArray) -> Metrics:
    ends = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{end}": float(value) for end, value in ends.items()}


def _updates(updates: Sequence[UpdateStats]) -> Metrics:
    if not updates:
        return {"actor/updates": 0.0}
    means = {"pg_loss": "loss", "pg_clipfrac": "clipped", "ppo_kl": "kl", "grad_norm": "gradient"}
    return {
        "actor/updates": float(len(updates)),
        **{
            f"actor/{name}": float(np.mean([getattr(one, figure) for one in updates]))
            for name, figure in means.items()
        },
        "actor/lr": updates[-1].rate,
        "actor/skipped": float(sum(one.skipped for one in updates)),
    }


def _tail_of_step(readings: Sequence[Reading], look: Look) -> Metrics:
    """p05 of this step's watched tokens alone, by bin too, and of those that were uncertain."""
    if not sum(len(one.alpha) for one in readings):
        return {}
    alpha = np.concatenate([one.alpha for one in readings])
    lengths = np.concatenate([one.lengths for one in readings])
    found = {"p05": p05(alpha)}
    if all(one.entropy is not None for one in readings):
        entropy = np.concatenate([one.entropy for one in readings if one.entropy is not None])
        unsure = alpha[entropy > UNCERTAIN]
        found["uncertain"] = len(unsure) / len(alpha)
        if len(unsure):
            found["p05_uncertain"] = p05(unsure)
    for each in look.bins:
        own = alpha[(lengths >= each.start) & (lengths < (each.stop or np.inf))]
        if len(own) >= LEAST:
            found[f"p05/bin_{each.start}"] = p05(own)
    return {f"sparse/step/{name}": value for name, value in found.items()}


def p05(alpha: Float32Array) -> float:
    return float(np.quantile(alpha, TAIL))


def _density(trajectories: Sequence[Trajectory]) -> Metrics:
    """Share of keys and values that decode steps read, over all sampled tokens."""
    kept = [one.kept[one.weight_version >= 0] for one in trajectories if one.kept is not None]
    return {"sparse/density": float(np.concatenate(kept).mean())} if kept else {}


def validation_metrics(evaluation: Evaluation) -> Metrics:
    """Held-out accuracy by source; the interval where there is one."""
    found: Metrics = {}
    for cell in evaluation.cells:
        core, aux = f"val-core/{cell.source}/acc", f"val-aux/{cell.source}"
        found[f"{core}/mean@{evaluation.samples}"] = cell.mean.value
        if cell.mean.low is not None and cell.mean.high is not None:
            found |= {f"{core}/low": cell.mean.low, f"{core}/high": cell.mean.high}
        found |= {
            f"{aux}/length/mean": cell.tokens,
            f"{aux}/length/median": cell.median,
            f"{aux}/cut_off": cell.cut_off,
        }
        outcomes = {"right": cell.right, "cut_off": cell.cut_off, "wrong": cell.wrong}
        found |= {f"val-core/{cell.source}/{k}": v for k, v in outcomes.items() if v is not None}
    return found
