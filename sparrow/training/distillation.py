"""Distils the dense policy into a LoRA adapter of the sparse actor; the policy is never touched.

The adapter is on in sparse requests alone. Teacher and student read the same sequences: the
teacher densely and without the adapter, the student as sparse decoding would, pages chosen by the
same rule, with the adapter and with gradients to it. The loss of a token is a divergence of the two
next-token distributions (`ops.divergence`, or k3 of the sampled tokens), in RL beside the
objective's own term on the sparse actor. Legend: sparrow/ops/types.py; R learnt tokens.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed

from sparrow import ops
from sparrow.models.lora import Adapter
from sparrow.schema.episode import TrainSample
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import DivergenceKind
from sparrow.sparse.rule import Rule
from sparrow.training.batching import rank_batches
from sparrow.training.objectives.surrogates import Objective, Terms, reference_kl, token_mean
from sparrow.training.optimiser import moments
from sparrow.training.packing import Pack, by_token, join, pack_samples
from sparrow.training.policy import Policy, TeacherStates, reshard
from sparrow.training.sparse_attention import SparseDecoding
from sparrow.training.world import World

CLIP = 1.0  # norm of a gradient


class DistillUpdate(NamedTuple):
    """One step of the adapter, as means over tokens."""

    loss: float
    divergence: float
    tokens: int
    gradient: float
    skipped: bool  # loss or gradient is not finite


class Distiller:
    """An adapter in training, with its optimiser.

    tokens: of a micro-batch. weight: of the divergence beside the objective's term, if there is
    one.
    """

    def __init__(
        self,
        policy: Policy,
        adapter: Adapter,
        *,
        rate: float,
        tokens: int,
        divergence: DivergenceKind = "total_variation",
        weight: float = 1.0,
        temperature: float = 1.0,
        world: World | None = None,
    ) -> None:
        self.policy, self.adapter, self.tokens = policy, adapter, tokens
        self.divergence, self.weight, self.temperature = divergence, weight, temperature
        self.world = world or World()
        self.leaves = [tensor.requires_grad_() for tensor in adapter.tensors().values()]
        fused = self.leaves[0].is_cuda
        self.optimiser = torch.optim.AdamW(self.leaves, lr=rate, weight_decay=0.0, fused=fused)

    def student(self, pack: Pack, schedule: Schedule, rule: Rule) -> Tensor:
        """Hidden states of the sparse actor at the learnt positions, [R, C], with gradients."""
        attention = self.policy.sparse_attention(pack, SparseDecoding(schedule, rule))
        return self.policy.hidden(pack, attention, self.adapter.to(self.policy.dtype))

    def step(
        self,
        samples: Sequence[TrainSample],
        schedule: Schedule,
        rule: Rule,
        *,
        objective: Objective | None = None,
        teacher: TeacherStates | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> DistillUpdate:
        """Update the adapter once, on all these samples.

        objective: its term on the sparse actor is added, with the actor's log-probs of the rollout
        as the old ones. teacher: None: the policy as it is. Gradients are made for the adapter
        alone; those of the policy's weights stay as they are.
        """
        aggregate = token_mean if objective is None else objective.aggregate
        coefficients = aggregate(np.array([sample.learnt for sample in samples]))
        owners = None if teacher is None else self._owners(teacher)
        lengths = [len(sample) for sample in samples]
        batches = rank_batches(lengths, self.tokens, self.world.size, owners)[self.world.rank]
        self.optimiser.zero_grad(set_to_none=True)
        sums = torch.zeros(2, dtype=torch.float64)
        for done, (numbers, filler) in enumerate(batches, 1):
            chosen = [samples[number] for number in numbers]
            shares = [0.0 if filler else float(coefficients[number]) for number in numbers]
            part = self._teacher_part(teacher, numbers, filler=filler)
            losses = self._backward(chosen, shares, schedule, rule, objective, part)
            sums += 0.0 if filler else losses
            if on_batch is not None:
                on_batch(done, len(batches))
        reshard(self.policy)
        sums = torch.stack(self.world.all_gather(sums)).sum(0)
        self._reduce_gradients()
        gradient = float(torch.nn.utils.clip_grad_norm_(self.leaves, CLIP))
        skipped = not math.isfinite(float(sums.sum()) + gradient)
        if not skipped and gradient > 0:
            self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        loss, divergence = sums.tolist()
        tokens = sum(sample.learnt for sample in samples)
        return DistillUpdate(loss, divergence / max(1, tokens), tokens, gradient, skipped)

    def _backward(
        self,
        samples: Sequence[TrainSample],
        shares: Sequence[float],
        schedule: Schedule,
        rule: Rule,
        objective: Objective | None,
        teacher: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Add the gradient of a micro-batch; return its loss and its sum of divergences."""
        policy, device = self.policy, self.policy.model.device
        pack = pack_samples(samples).to(device)
        if teacher is None:
            with torch.no_grad():
                teacher_RC, teacher_VC = policy.hidden(pack), policy.head.detach()
        else:
            teacher_RC, teacher_VC = teacher
        student_RC = self.student(pack, schedule, rule)
        head_VC, targets_R = policy.head.detach(), pack.targets_R
        options: dict[str, Any] = {"chunk": policy.chunk, "temperature": self.temperature}
        logprob_R: Tensor | None
        with policy.gradient_ops():
            if self.divergence == "k3":
                logprob_R = ops.token_stats(student_RC, head_VC, targets_R, **options).logprob
                with torch.no_grad():
                    wanted = ops.token_stats(teacher_RC, teacher_VC, targets_R, **options)
                divergence_R = reference_kl(logprob_R, wanted.logprob)
            else:
                divergence_R, logprob_R = ops.divergence(
                    *(teacher_RC, student_RC, head_VC),
                    kind=self.divergence,
                    p_head_VC=teacher_VC,
                    targets_T=None if objective is None else targets_R,
                    **options,
                )
        share_R = by_token(shares, samples).to(device)
        loss = self.weight * (divergence_R * share_R).sum()
        if objective is not None and logprob_R is not None:
            loss = loss + (objective.surrogate(_terms(samples, logprob_R)).loss_T * share_R).sum()
        loss.backward(inputs=self.leaves)
        return torch.stack([loss.detach(), divergence_R.detach().sum()]).double().cpu()

    # Several ranks.

    def _owners(self, teacher: TeacherStates) -> dict[int, int]:
        """Which rank has the teacher's states of a sample."""
        held = [number for number, states in enumerate(teacher.hidden) if states is not None]
        ranks = self.world.all_gather(held)
        return {number: rank for rank, numbers in enumerate(ranks) for number in numbers}

    def _teacher_part(
        self, teacher: TeacherStates | None, numbers: Sequence[int], *, filler: bool
    ) -> tuple[Tensor, Tensor] | None:
        if teacher is None or filler:
            return None
        states = [teacher.hidden[number] for number in numbers]
        move = partial(Tensor.to, device=self.policy.model.device, non_blocking=True)
        hidden_RC = torch.cat([move(state) for state in states if state is not None])
        return hidden_RC, teacher.head_VC

    def _reduce_gradients(self) -> None:
        if self.world.size == 1:
            return
        for leaf in self.leaves:
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            distributed.all_reduce(leaf.grad)

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Copies of adapter and moments, in host memory; equal on all ranks."""
        named = self.adapter.tensors().items()
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
        return {"adapter": tensors, "moments": moments(self.optimiser)}

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in self.adapter.tensors().items():
                tensor.copy_(state["adapter"][name])
        whole = self.optimiser.state_dict()
        self.optimiser.load_state_dict(whole | {"state": state["moments"]})


def _terms(samples: Sequence[TrainSample], logprob_R: Tensor) -> Terms:
    """Terms of the objective on the sparse actor, whose old log-probs are those of the rollout."""
    device = logprob_R.device
    rollout_R = join([s.rollout_logprob[s.loss_mask] for s in samples]).to(device)
    return Terms(
        logprob_T=logprob_R,
        old_T=rollout_R,
        rollout_T=rollout_R,
        advantage_T=by_token([sample.advantage for sample in samples], samples).to(device),
        sequence_T=join([np.full(s.learnt, n, np.int64) for n, s in enumerate(samples)]).to(device),
    )
