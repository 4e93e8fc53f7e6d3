"""The learner: dense log-probs of samples, then optimiser steps on them.

    learner = Learner(policy, RateConfig(), steps=100, tokens=16384)
    scores = learner.score(samples)                   # pi_old of every learnt token
    stats = learner.update(samples, weights, objective)

The loss is a sum over tokens, each with its own coefficient, so a step does not depend on the split
into micro-batches and ranks beyond rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.schema.base import Float32Array, Float32Matrix, Int32Array
from sparrow.schema.episode import TrainSample
from sparrow.schema.train import OptimiserConfig
from sparrow.training.batching import MicroBatch, rank_batches
from sparrow.training.objectives.surrogates import Objective
from sparrow.training.optimiser import adamw, moments, rate_at
from sparrow.training.packing import by_token, join, pack_samples
from sparrow.training.policy import (
    ActorStates,
    Policy,
    Scores,
    TeacherStates,
    full_tensor,
    reshard,
)
from sparrow.training.sparse_attention import SparseDecoding
from sparrow.training.update import SUMS, UpdateStats, apply_gradients, token_loss
from sparrow.training.world import World

OnBatch = Callable[[int, int], None]  # sequences done, of how many


class PolicySnapshot(NamedTuple):
    """The policy at one moment on some samples, in host memory.

    weights: by sample, of each of its learnt tokens in the mean.
    """

    samples: Sequence[TrainSample]
    weights: Sequence[float]
    states: TeacherStates


class SampleScores(NamedTuple):
    """Scores of a sample by learnt token; alpha (acceptance) if the actor's states are known."""

    logprob: Float32Array
    entropy: Float32Array
    alpha: Float32Array | None


class Learner:
    """A policy, its optimiser, and the number of optimiser steps taken."""

    def __init__(
        self,
        policy: Policy,
        config: OptimiserConfig,
        *,
        steps: int,
        tokens: int,
        world: World | None = None,
        reference: Policy | None = None,
    ) -> None:
        self.policy, self.config, self.steps, self.tokens = policy, config, steps, tokens
        self.reference = reference  # frozen, and whole on every rank
        self.world = world or World()
        self.optimiser = adamw(policy.trained().values(), config)
        self.taken = 0
        self.heads: dict[int, Tensor] = {}  # LM heads of earlier versions

    @property
    def device(self) -> torch.device:
        return self.policy.model.device

    # Scoring.

    @torch.no_grad()
    def score(
        self,
        samples: Sequence[TrainSample],
        actors: Sequence[Float32Matrix | None] | None = None,
        *,
        versions: Sequence[Int32Array] | None = None,
        policy: Policy | None = None,
        teacher: list[TeacherStates] | None = None,
        sparse: SparseDecoding | None = None,
        on_batch: OnBatch | None = None,
    ) -> list[SampleScores]:
        """Log-prob and entropy of every learnt token, in the order of the samples.

        actors: for some samples the actor's final hidden states of their learnt tokens; these get
        exact acceptance. The states may be on one rank alone, which then scores them.
        versions: of those tokens; where an earlier one is in `heads`, its LM head is the actor's.
        policy: the model to score with, such as the reference; None: the trained policy.
        teacher: gets the hidden states and the LM head of this pass, for distillation.
        sparse: score as sparse decoding would; None: densely.
        """
        policy = policy or self.policy
        actors = [None] * len(samples) if actors is None else actors
        scored: dict[int, SampleScores] = {}
        batches = self._batches(samples, self.owners(actors))
        total = sum(len(batch.numbers) for batch in batches if not batch.filler)
        hidden: list[Tensor | None] = [None] * len(samples)
        for numbers, filler in batches:
            chosen = [samples[number] for number in numbers]
            states = [None if filler else actors[number] for number in numbers]
            pack = pack_samples(chosen).to(self.device)
            drawn_by = None if versions is None else [versions[number] for number in numbers]
            scores = policy(pack, self._actor(chosen, states, drawn_by), sparse)
            if filler:
                continue
            scored |= zip(numbers, _split(scores, chosen, states), strict=True)
            if teacher is not None:
                parts = _to_host(scores.hidden_RC).split([sample.learnt for sample in chosen])
                for number, part in zip(numbers, parts, strict=True):
                    hidden[number] = part
            if on_batch is not None:
                on_batch(len(scored), total)
        if teacher is not None:
            teacher.append(TeacherStates(policy.head.detach().clone(), hidden))
        reshard(policy)
        gathered = [item for share in self.world.all_gather(scored) for item in share.items()]
        return [scores for _, scores in sorted(dict(gathered).items())]

    def owners(self, actors: Sequence[Float32Matrix | None]) -> dict[int, int]:
        """Which rank has the states of a sample: the first of several."""
        held = self.world.all_gather([n for n, states in enumerate(actors) if states is not None])
        return {n: rank for rank, numbers in reversed(list(enumerate(held))) for n in numbers}

    def _actor(
        self,
        samples: Sequence[TrainSample],
        states: Sequence[Float32Matrix | None],
        versions: Sequence[Int32Array] | None,
    ) -> ActorStates | None:
        starts = np.cumsum([0, *(sample.learnt for sample in samples)])
        pairs = [(number, state) for number, state in enumerate(states) if state is not None]
        if not pairs:
            return None
        places = np.concatenate([np.arange(starts[n], starts[n + 1]) for n, _ in pairs])
        hidden = torch.from_numpy(np.concatenate([state for _, state in pairs]))
        older = []
        if versions is not None and self.heads:
            version_A = np.concatenate([versions[n] for n, _ in pairs])
            for version in {*version_A.tolist()} & self.heads.keys():
                at = torch.from_numpy(np.flatnonzero(version_A == version)).to(self.device)
                older.append((self.heads[version], at))
        return ActorStates(hidden.to(self.device), torch.from_numpy(places).to(self.device), older)

    def keep_head(self, version: int, staleness: int) -> None:
        """Keep the LM head of this version for tokens that are learnt from later.

        Of the last `staleness` versions, in host memory; LoRA changes none. A collective call on
        all ranks.
        """
        if staleness and self.policy.adapter is None:
            self.heads[version] = full_tensor(self.policy.head.detach()).to("cpu", copy=True)
            self.heads = {v: h for v, h in self.heads.items() if v > version - staleness}

    # Updating.

    def update(
        self,
        samples: Sequence[TrainSample],
        weights: Sequence[Float32Array],
        objective: Objective,
        *,
        references: Sequence[Float32Array] | None = None,
        sparse: SparseDecoding | None = None,
        on_batch: OnBatch | None = None,
    ) -> UpdateStats:
        """One optimiser step on samples that have `old_logprob`.

        weights, and log-probs of the reference model where the objective has a KL term: by learnt
        token. sparse: as in `score`; gradients are those of the sparse forward pass.
        """
        if objective.kl and references is None:
            raise ValueError("update: the objective has a KL term, which needs reference log-probs")
        rate = rate_at(self.config, self.taken, self.steps)
        sums = self._gradients(samples, weights, objective, references, sparse, on_batch)
        self.taken += 1
        return apply_gradients(
            *(self.optimiser, self.policy.trained().values(), objective, sums),
            tokens=sum(sample.learnt for sample in samples),
            rate=rate,
            clip=self.config.clip,
        )

    def _gradients(
        self,
        samples: Sequence[TrainSample],
        weights: Sequence[Float32Array],
        objective: Objective,
        references: Sequence[Float32Array] | None = None,
        sparse: SparseDecoding | None = None,
        on_batch: OnBatch | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradient of all samples; return sums over the tokens of all ranks."""
        coefficients = objective.aggregate(np.array([sample.learnt for sample in samples]))
        total: dict[str, float] = dict.fromkeys(SUMS, 0.0)
        batches = self._batches(samples)
        for done, (numbers, filler) in enumerate(batches, 1):
            chosen = [samples[number] for number in numbers]
            shares = [0.0 if filler else float(coefficients[number]) for number in numbers]
            values = [by_token(shares, chosen), join([weights[n] for n in numbers])]
            if references is not None:
                values.append(join([references[n] for n in numbers]))
            sums = self._backward(chosen, objective, sparse, *(x.to(self.device) for x in values))
            for name, value in sums.items():
                total[name] += 0.0 if filler else value
            if on_batch is not None:
                on_batch(done, len(batches))
        parts = self.world.all_gather(total)
        return {name: sum(part[name] for part in parts) for name in total}

    def _backward(
        self,
        samples: Sequence[TrainSample],
        objective: Objective,
        sparse: SparseDecoding | None,
        share_R: Tensor,
        weight_R: Tensor,
        reference_R: Tensor | None = None,
    ) -> dict[str, float]:
        scores = self.policy(pack_samples(samples).to(self.device), None, sparse)
        loss = token_loss(
            *(objective, samples, scores.logprob_R, scores.entropy_R),
            *(share_R, weight_R, reference_R),
        )
        (loss.total * self.world.size).backward()  # FSDP takes the mean over ranks
        return dict(zip(SUMS, loss.sums.tolist(), strict=True))

    def _batches(
        self, samples: Sequence[TrainSample], owners: Mapping[int, int] | None = None
    ) -> list[MicroBatch]:
        """This rank's micro-batches, as many as on every other rank."""
        lengths = [len(sample) for sample in samples]
        return rank_batches(lengths, self.tokens, self.world.size, owners)[self.world.rank]

    # KL(new || old).

    @torch.no_grad()
    def snapshot(self, samples: Sequence[TrainSample], weights: Sequence[float]) -> PolicySnapshot:
        """The policy as it is, to measure how far updates move it."""
        hidden: list[Tensor | None] = [None] * len(samples)
        for numbers, chosen, hidden_RC in self._hidden(samples):
            parts = hidden_RC.cpu().split([sample.learnt for sample in chosen])
            for number, part in zip(numbers, parts, strict=True):
                hidden[number] = part
        head_VC = self.policy.head.detach().to("cpu", copy=True)
        reshard(self.policy)
        return PolicySnapshot(samples, weights, TeacherStates(head_VC, hidden))

    @torch.no_grad()
    def kl(self, old: PolicySnapshot) -> float:
        """KL(policy || old), both dense: the weighted mean over learnt tokens, each exact.

        In the micro-batches of the snapshot: a policy that did not move gives 0 exactly.
        """
        old_head_VC, total = old.states.head_VC.to(self.device), 0.0
        for numbers, chosen, hidden_RC in self._hidden(old.samples):
            states = [state for n in numbers if (state := old.states.hidden[n]) is not None]
            with self.policy.gradient_ops():
                kl_R = ops.divergence(
                    *(torch.cat(states).to(self.device), hidden_RC, self.policy.head.detach()),
                    kind="reverse_kl",
                    p_head_VC=old_head_VC,
                    chunk=self.policy.chunk,
                ).value_T
            weight_R = by_token([old.weights[n] for n in numbers], chosen).to(kl_R)
            total += float((kl_R * weight_R).sum())
        reshard(self.policy)
        return sum(self.world.all_gather(total))

    def _hidden(
        self, samples: Sequence[TrainSample]
    ) -> Iterator[tuple[list[int], list[TrainSample], Tensor]]:
        """Hidden states of this rank's micro-batches, with the numbers of their samples."""
        for numbers, filler in self._batches(samples):
            chosen = [samples[number] for number in numbers]
            hidden_RC = self.policy.hidden(pack_samples(chosen).to(self.device))
            if not filler:
                yield numbers, chosen, hidden_RC

    # Weights.

    def trained(self) -> dict[str, Tensor]:
        """What the policy trains, in full, by name; a collective call on all ranks."""
        named = self.policy.trained().items()
        return {name: full_tensor(weight.detach()) for name, weight in named}

    def state(self) -> dict[str, Any]:
        """A copy for a checkpoint, in host memory; a collective call on all ranks."""
        named = self.trained().items()
        weights = {name: weight.to("cpu", copy=True) for name, weight in named}
        state = {"taken": self.taken, "weights": weights, "moments": moments(self.optimiser)}
        return state if self._scaling() is None else {**state, "lora": self._scaling()}

    def _scaling(self) -> dict[str, Any] | None:
        """How the adapter that is trained is scaled; None: there is none."""
        adapter = self.policy.adapter
        return None if adapter is None else {"alpha": adapter.alpha, "rslora": adapter.rslora}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("lora") != self._scaling():
            raise ValueError(f"LoRA of {state.get('lora')}, here {self._scaling()}")
        with torch.no_grad():
            for name, weight in self.policy.trained().items():
                weight.copy_(_like(weight, state["weights"][name]))
        optimiser = self.optimiser.state_dict()
        parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        optimiser["state"] = {
            number: {name: _like(parameters[number], value) for name, value in values.items()}
            for number, values in state["moments"].items()
        }
        self.optimiser.load_state_dict(optimiser)
        self.taken = state["taken"]


def _split(
    scores: Scores, samples: Sequence[TrainSample], states: Sequence[Float32Matrix | None]
) -> list[SampleScores]:
    def parts(values: Tensor | None, counts: Sequence[int]) -> list[Float32Array]:
        flat = np.zeros(0, np.float32) if values is None else values.float().cpu().numpy()
        return np.split(flat, np.cumsum(counts)[:-1])

    learnt = [sample.learnt for sample in samples]
    alphas = parts(scores.alpha_A, [0 if state is None else len(state) for state in states])
    exact = [None if state is None else alpha for state, alpha in zip(states, alphas, strict=True)]
    logprobs, entropies = parts(scores.logprob_R, learnt), parts(scores.entropy_R, learnt)
    return [SampleScores(*parts) for parts in zip(logprobs, entropies, exact, strict=True)]


def _like(weight: Tensor, value: Tensor) -> Tensor:
    """Shard a full tensor like a weight; a scalar stays as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if value.ndim == 0:
        return value
    value = value.to(weight.device)
    if not isinstance(weight, DTensor):
        return value
    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, from a GPU without waiting: good for what its stream does next."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
