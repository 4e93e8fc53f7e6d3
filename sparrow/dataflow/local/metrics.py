"""Metrics of a step, under the names of common dashboards (verl's) and our own."""

from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from sparrow.dataflow.local.messages import LearnerBatch, RolloutBatch
from sparrow.schema.agents import AgentNode, AgentStatus, trees
from sparrow.schema.base import Float32Array
from sparrow.schema.episode import Group, Trajectory
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.gate import AcceptanceReading, GateCheck
from sparrow.schema.gate import metrics as gate_metrics
from sparrow.schema.run_folder import POLICY
from sparrow.schema.sampling import SpeculationStats
from sparrow.stats import FAR_TAIL, TAIL, UNCERTAIN, hard_misses
from sparrow.training.distillation import DistillUpdate
from sparrow.training.update import UpdateStats

Metrics = dict[str, float]
FloatArray = npt.NDArray[np.float64]

LEAST = 100  # tokens of a step in a bin before its tail is reported


def step_metrics(
    rollouts: RolloutBatch,
    batch: LearnerBatch,
    updates: Sequence[UpdateStats],
    look: GateCheck,
    seconds: Mapping[str, float],
    distilled: DistillUpdate | None = None,
    *,
    kl: float | None = None,
) -> Metrics:
    """All metrics of a step; unknown ones are left out. kl: KL(new || old) of its updates."""
    trajectories = rollouts.trajectories
    tokens = sum(map(len, trajectories))
    return (
        rollout_metrics(rollouts)
        | rollouts.metrics
        | _advantages(batch)
        | _updates(updates)
        | ({} if kl is None else {"actor/kl_new_old": kl})
        | batch.mismatch
        | gate_metrics(look)
        | {"sparse/accept_tokens": float(look.overall.tokens)}
        | _tail_of_step(batch.readings, look)
        | _density(trajectories)
        | _speculation(trajectories)
        | _distilled(distilled)
        | {f"timing_s/{part}": value for part, value in seconds.items()}
        | {"perf/total_num_tokens": float(tokens), "perf/throughput": tokens / seconds["step"]}
    )


def rollout_metrics(rollouts: RolloutBatch) -> Metrics:
    """Metrics of the answers alone."""
    trajectories = rollouts.trajectories
    metrics: Metrics = {
        "data/groups": float(len(rollouts.groups)),
        "data/overlong_prompts": float(len(rollouts.overlong)),
        "data/uninformative_groups": float(rollouts.uninformative),
        "data/rounds": float(rollouts.rounds),
    }
    if rollouts.acc is not None:
        metrics["critic/acc/played"] = rollouts.acc
    metrics |= {f"critic/outcome/{name}": share for name, share in rollouts.outcomes.items()}
    if not trajectories:
        return metrics
    rewards = np.array([t.reward for t in trajectories], dtype=float)
    lengths = np.array([(t.weight_version >= 0).sum() for t in trajectories])
    prompts = np.array([len(t) for t in trajectories]) - lengths
    metrics |= {
        **_range("critic/score", rewards),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": float(np.mean([t.truncated for t in trajectories])),
        "prompt_length/mean": float(prompts.mean()),
    }
    accs = [t.acc for t in trajectories if t.acc is not None]
    metrics |= {"critic/acc/mean": float(np.mean(accs))} if accs else {}
    return metrics | agent_metrics([tree for t in trajectories for tree in trees(t.agents)])


def agent_metrics(played: Sequence[Sequence[AgentNode]]) -> Metrics:
    """Trees of agents: their size, how agents ended, and what plays with and without them reach."""
    if not played:
        return {}
    nodes = [node for tree in played for node in tree]
    found: dict[str, list[float]] = {
        "count/mean": [len(tree) for tree in played],
        "spawned": [len(tree) > 1 for tree in played],
        "tokens/mean": [sum(node.tokens for node in tree) for tree in played],
        "context/mean": [max(node.context for node in tree) for tree in played],
        "acc/mean": [tree[0].acc or 0.0 for tree in played],
        "acc/spawned": [tree[0].acc or 0.0 for tree in played if len(tree) > 1],
        "acc/alone": [tree[0].acc or 0.0 for tree in played if len(tree) == 1],
    }
    for status in get_args(AgentStatus):
        found[f"status/{status}"] = [node.status == status for node in nodes]
    for depth in sorted({node.depth for node in nodes}):
        level = [node for node in nodes if node.depth == depth]
        found[f"level_{depth}/acc"] = [node.acc or 0.0 for node in level]
        found[f"level_{depth}/tokens"] = [node.tokens for node in level]
    means = {f"agents/{name}": float(np.mean(values)) for name, values in found.items() if values}
    return means | {"agents/depth/max": float(max(node.depth for node in nodes))}


def policy_metrics(name: str, values: Mapping[str, float]) -> Metrics:
    """Metrics of one of several policies, under its name."""
    return {f"{POLICY}{name}/{key}": float(value) for key, value in values.items()}


def sampled_tokens(groups: Sequence[Group], policy: int) -> int:
    """Tokens that one of several policies sampled."""
    return sum(int((t.policy_id == policy).sum()) for g in groups for t in g.trajectories)


def learnt_tokens(groups: Sequence[Group]) -> int:
    """Tokens in the loss."""
    return sum(int(t.loss_mask.sum()) for group in groups for t in group.trajectories)


def _advantages(batch: LearnerBatch) -> Metrics:
    if not batch.samples:
        return {}
    values = np.array([sample.advantage for sample in batch.samples])
    return {
        **_range("critic/advantages", values),
        "critic/advantages/zero_frac": float((values == 0).mean()),
        "actor/entropy": batch.entropy or 0.0,
    }


def _range(name: str, values: FloatArray) -> Metrics:
    ends = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{end}": float(value) for end, value in ends.items()}


def _updates(updates: Sequence[UpdateStats]) -> Metrics:
    if not updates:
        return {"actor/updates": 0.0}
    means = {"pg_loss": "loss", "pg_clipfrac": "clipped", "ppo_kl": "kl", "grad_norm": "gradient"}
    kls = [update.kl_reference for update in updates if update.kl_reference is not None]
    return {
        "actor/updates": float(len(updates)),
        **{
            f"actor/{name}": float(np.mean([getattr(update, figure) for update in updates]))
            for name, figure in means.items()
        },
        **({"actor/kl_reference": float(np.mean(kls))} if kls else {}),
        "actor/lr": updates[-1].rate,
        "actor/skipped": float(sum(update.skipped for update in updates)),
        "actor/no_signal_updates": float(sum(update.no_signal for update in updates)),
    }


def _tail_of_step(readings: Sequence[AcceptanceReading], look: GateCheck) -> Metrics:
    """p05 over this step's measured tokens alone, also by bin and over uncertain tokens; p0.1, and
    hard misses per 1000 tokens; by bin, the share of answers that reach it.
    """
    if not sum(len(reading.alpha) for reading in readings):
        return {}
    alpha = np.concatenate([reading.alpha for reading in readings])
    lengths = np.concatenate([reading.lengths for reading in readings])
    metrics = {"p05": p05(alpha), "p0_1": float(np.quantile(alpha, FAR_TAIL))}
    entropies = [reading.entropy for reading in readings if reading.entropy is not None]
    if len(entropies) == len(readings):
        entropy = np.concatenate(entropies)
        metrics["hard_misses"] = 1000 * float(hard_misses(alpha, entropy).mean())
        uncertain = alpha[entropy > UNCERTAIN]
        metrics["uncertain"] = len(uncertain) / len(alpha)
        if len(uncertain):
            metrics["p05_uncertain"] = p05(uncertain)
    for bin in look.bins:
        reached = [len(r.lengths) > 0 and r.lengths[-1] >= bin.start for r in readings]
        metrics[f"survivors/bin_{bin.start}"] = float(np.mean(reached))
        inside = alpha[(lengths >= bin.start) & (lengths < (bin.stop or np.inf))]
        if len(inside) >= LEAST:
            metrics[f"p05/bin_{bin.start}"] = p05(inside)
    return {f"sparse/step/{name}": value for name, value in metrics.items()}


def p05(alpha: Float32Array) -> float:
    """The 5th percentile of acceptance."""
    return float(np.quantile(alpha, TAIL))


def _speculation(trajectories: Sequence[Trajectory]) -> Metrics:
    """Drafts of exact decoding and how many were accepted, also by position in a round."""
    parts = [t.speculation for t in trajectories if t.speculation is not None]
    spec = SpeculationStats.total(parts)
    if not spec.rounds:
        return {}
    metrics = {
        "draft_tokens": float(spec.draft_tokens),
        "accepted_tokens": float(spec.accepted_tokens),
        "tokens_per_round": 1 + spec.accepted_tokens / spec.rounds,
    }
    counts = zip(spec.drafted_by_position, spec.accepted_by_position, strict=True)
    for position, (drafted, accepted) in enumerate(counts, start=1):
        metrics[f"acceptance_by_position/{position}"] = accepted / drafted
    return {f"spec/{name}": value for name, value in metrics.items()}


def _distilled(update: DistillUpdate | None) -> Metrics:
    """The step of the actor's adapter."""
    if update is None:
        return {}
    return {f"distill/{name}": float(value) for name, value in update._asdict().items()}


def _density(trajectories: Sequence[Trajectory]) -> Metrics:
    """Share of keys and values that decode steps read, over all sampled tokens."""
    kept = [t.kept[t.weight_version >= 0] for t in trajectories if t.kept is not None]
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
