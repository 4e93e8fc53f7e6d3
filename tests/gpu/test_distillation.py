"""Sparse attention with gradients on a GPU, and distillation through it."""

from typing import Any

import numpy as np
import pytest
import torch

from sparrow import models
from sparrow.models.attention import KernelSparse
from sparrow.models.lora import Adapter
from sparrow.schema.episode import TrainSample
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.library import fine_means
from sparrow.sparse.rule import Rule
from sparrow.training.distillation import Distiller
from sparrow.training.packing import pack_samples
from sparrow.training.policy import Policy
from sparrow.training.sparse_attention import sparse_attention

LENGTHS = (700, 130, 1029, 256)


def samples(vocabulary: int) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    return [
        TrainSample(
            ids=rng.integers(vocabulary, size=length, dtype=np.int32),
            loss_mask=np.arange(length) >= length // 4,
            rollout_logprob=np.zeros(length, np.float32),
            advantage=0.0,
        )
        for length in LENGTHS
    ]


@pytest.mark.parametrize("fine", [False, True])
def test_kernels_are_the_definition_with_its_gradients(fine: bool) -> None:
    flow = fine_means(4)
    about = {"flow": flow.name, "flow_digest": flow.digest} if fine else {}
    schedule = Schedule.fixed(192, **about)
    rule = Rule.of(schedule, flow) if fine else Rule.of(schedule)
    pack = pack_samples(samples(100)).to(torch.device("cuda"))
    sizes: dict[str, Any] = {"layers": 4, "kv_heads": 2, "dtype": torch.bfloat16}
    kernels = sparse_attention(pack, schedule, rule, **sizes)
    assert isinstance(kernels, KernelSparse)
    random = torch.Generator("cuda").manual_seed(0)
    shapes = [(len(pack.ids_T), heads, 64) for heads in (8, 2, 2, 8)]
    draws = [torch.randn(shape, generator=random, device="cuda").bfloat16() for shape in shapes]
    results = []
    for attention in (kernels, kernels.definition):
        inputs = [x.clone().requires_grad_() for x in draws[:3]]
        out = attention(2, *inputs, scale=0.125)
        results.append([out, *torch.autograd.grad((out * draws[3]).float().sum(), inputs)])
    for mine, theirs in zip(*results, strict=True):
        error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < 0.02


@pytest.mark.parametrize("recompute", [False, True])
def test_it_learns_in_sixteen_bits(recompute: bool) -> None:
    model = models.load("small", dtype="float32", device="cuda")
    policy = Policy(model, dtype=torch.bfloat16, recompute=recompute, compiled=True)
    adapter = Adapter.random(model.spec, 8, b_std=0.0, device="cuda")
    made = Distiller(policy, adapter, rate=2e-3, tokens=1500, divergence="forward_kl")
    own, schedule = samples(model.spec.vocabulary), Schedule.fixed(96)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    losses = [made.step(own, schedule, Rule.of(schedule)).divergence for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
