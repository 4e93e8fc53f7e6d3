"""Distillation: the student is what sparse decoding sees, the policy is not touched, it learns."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.engines import prompt, tiny

from sparrow import models, ops
from sparrow.calibration.replay import read, sparse_hidden
from sparrow.models.actor import base_digest, load_actor, save_actor
from sparrow.models.attention import KernelSparse, PackedSparse
from sparrow.models.lora import Adapter
from sparrow.ops.reference.divergence import Divergence
from sparrow.ops.reference.pages import DENSE
from sparrow.schema.episode import TrainSample
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import DivergenceKind
from sparrow.sparse.flows.library import fine_means, oracle, running_average
from sparrow.sparse.rule import Rule
from sparrow.training import sparse_attention
from sparrow.training.distillation import Distiller
from sparrow.training.objectives.surrogates import Objective, ppo, token_mean
from sparrow.training.packing import pack_samples
from sparrow.training.policy import Policy, TeacherStates

TOP_P = replace(oracle, mass=0.7)
SCHEDULE = Schedule.fixed(48, last=1)
RULE = Rule.of(SCHEDULE)
STEP = 1e-4  # of differences


def sample(length: int, start: int, advantage: float = 0.0, seed: int = 0) -> TrainSample:
    rng = np.random.default_rng(seed)
    return TrainSample(
        ids=np.array(prompt(length, length), np.int32),
        loss_mask=np.arange(length) >= start,
        rollout_logprob=np.log(rng.uniform(0.01, 0.2, length)).astype(np.float32),
        advantage=advantage,
    )


SAMPLES = [sample(150, 50, 1.0), sample(90, 30, -0.5), sample(201, 67, 0.25)]


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny()


def distiller(model: models.Decoder, b_std: float = 0.0, **settings: Any) -> Distiller:
    settings = {"rate": 5e-3, "tokens": 10_000} | settings
    adapter = Adapter.random(model.spec, 4, b_std=b_std, dtype=model.dtype)
    return Distiller(Policy(model), adapter, **settings)


def student(made: Distiller, samples: list[TrainSample]) -> torch.Tensor:
    return made.student(pack_samples(samples), SCHEDULE, RULE)


def test_a_zero_adapter_is_the_sparse_actor_of_every_sample(model) -> None:
    found = student(distiller(model), SAMPLES)
    wanted = []
    for one in SAMPLES:
        dense, start = read(model, one.ids.tolist()), int(np.argmax(one.loss_mask))
        wanted.append(sparse_hidden(model, dense, start, SCHEDULE)[start - 1 : -1])
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-5, rtol=1e-5)
    assert found.requires_grad


def test_tokens_that_were_not_drawn_are_read_densely(model) -> None:
    """The answers of tools are prefilled; tokens after them are sparse again."""
    whole = sample(200, 60)
    mask = whole.loss_mask.copy()
    mask[120:140] = False
    made = distiller(model)
    attention = sparse_attention.sparse_attention(
        pack_samples([whole.replace(loss_mask=mask)]),
        SCHEDULE,
        RULE,
        layers=model.spec.layers,
        kv_heads=model.spec.kv_heads,
        dtype=torch.float32,
    )
    assert isinstance(attention, PackedSparse)
    dense = (attention.budgets[1].reshape(200, -1)[:, 0] == DENSE).tolist()
    assert [n for n in range(60, 200) if dense[n]] == list(range(120, 140))
    assert student(made, [whole.replace(loss_mask=mask)]).isfinite().all()


def test_gradients_are_those_of_differences_with_the_same_pages() -> None:
    """A small step of the adapter changes hardly a choice of pages; rotations are fp32."""
    wide = tiny().double()
    adapter = Adapter.random(wide.spec, 2, dtype=torch.float64)
    policy = Policy(wide.requires_grad_(False), dtype=torch.float64)
    made = Distiller(policy, adapter, rate=1e-3, tokens=1000)
    one = SAMPLES[1:2]
    teacher = policy.hidden(pack_samples(one)).detach()

    def loss() -> torch.Tensor:
        return ops.divergence(teacher, student(made, one), wide.head).value_T.sum()

    loss().backward()
    random = torch.Generator().manual_seed(3)
    for tensor in list(adapter.tensors().values())[::5]:
        direction = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        with torch.no_grad():
            values = []
            for step in (STEP, -STEP):
                tensor += step * direction
                values.append(loss())
                tensor -= step * direction
        slope = (values[0] - values[1]) / (2 * STEP)
        torch.testing.assert_close((tensor.grad * direction).sum(), slope, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize(
    "flow", [None, fine_means(4), running_average(), replace(oracle, mass=0.7)]
)
def test_kernels_of_decoding_are_the_definition_with_its_gradients(model, flow) -> None:
    schedule = SCHEDULE
    if flow is not None:
        schedule = Schedule.fixed(64, last=1, flow=flow.name, flow_digest=flow.digest)
    rule = Rule.of(schedule, flow) if flow is not None else RULE
    samples = [*SAMPLES, sample(300, 10), sample(128, 5)]
    spec = model.spec
    sizes: dict[str, Any] = {"layers": spec.layers, "kv_heads": spec.kv_heads}
    definition = sparse_attention.sparse_attention(
        pack_samples(samples), schedule, rule, **sizes, dtype=torch.float32
    )
    assert isinstance(definition, PackedSparse)
    kernels = KernelSparse.of(definition, definition)
    random, tokens = torch.Generator().manual_seed(0), sum(map(len, samples))
    shapes = [(tokens, heads, spec.head_size) for heads in (spec.heads, spec.kv_heads)]
    q, k, v, weight = (torch.randn(shapes[n], generator=random) for n in (0, 1, 1, 0))
    results = []
    for attention in (definition, kernels, kernels):  # the last chooses no pages of its own
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(1, *inputs, scale=0.2)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for theirs, mine, again in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
        assert torch.equal(mine, again)


@pytest.mark.parametrize("divergence", get_args(DivergenceKind))
def test_it_learns_and_the_policy_keeps_its_bits(divergence) -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = [weight.requires_grad_() for weight in model.parameters()]  # as a trainer has them
    made = distiller(model, divergence=divergence)
    losses = [made.step(SAMPLES, SCHEDULE, RULE) for _ in range(12)]
    assert losses[-1].divergence < 0.8 * losses[0].divergence
    assert losses[0].tokens == sum(one.learnt for one in SAMPLES)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(weight.grad is None for weight in weights)


def test_kinds_are_those_of_the_op_and_k3_of_sampled_tokens() -> None:
    assert {*get_args(DivergenceKind)} == {*get_args(Divergence), "k3"}


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_and_recomputation_change_nothing(model, recompute) -> None:
    objective = Objective(surrogate=ppo, aggregate=token_mean)
    whole, parts = distiller(model), distiller(model, tokens=10)
    parts.policy.recompute = recompute
    first = whole.step(SAMPLES, SCHEDULE, RULE, objective=objective)
    second = parts.step(SAMPLES, SCHEDULE, RULE, objective=objective)
    assert first.loss == pytest.approx(second.loss, rel=1e-4)
    assert first.gradient == pytest.approx(second.gradient, rel=1e-3)


def test_the_objectives_term_is_that_of_the_sparse_actor(model) -> None:
    """By hand: PPO without clipping has the slope advantage x ratio at every token."""
    made = distiller(model, b_std=0.02, weight=0.0)
    objective = Objective(surrogate=ppo, aggregate=token_mean)
    update = made.step(SAMPLES, SCHEDULE, RULE, objective=objective)
    again = distiller(model, b_std=0.02)
    pack = pack_samples(SAMPLES)
    hidden = student(again, SAMPLES)
    logprob = ops.token_stats(hidden, model.head, pack.targets_R).logprob
    old = torch.cat([torch.from_numpy(one.rollout_logprob[one.loss_mask]) for one in SAMPLES])
    advantage = torch.cat([torch.full((one.learnt,), one.advantage) for one in SAMPLES])
    ratio = (logprob - old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    assert update.loss == pytest.approx(loss.item(), rel=1e-4)


def test_an_old_teacher_is_the_policy_before_its_update() -> None:
    """Its states and head are kept, so a change of the weights in between has no influence."""
    model = tiny()
    now, later = distiller(model), distiller(model)
    policy = Policy(model)
    hidden = [policy.hidden(pack_samples([one])).detach() for one in SAMPLES]
    teacher = TeacherStates(model.head.detach().clone(), hidden)
    expected = now.step(SAMPLES, SCHEDULE, RULE)
    same = later.step(SAMPLES, SCHEDULE, RULE, teacher=teacher)
    assert same.divergence == pytest.approx(expected.divergence, rel=1e-4)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1.05
    moved = distiller(model).step(SAMPLES, SCHEDULE, RULE, teacher=teacher)
    anew = distiller(model).step(SAMPLES, SCHEDULE, RULE)
    assert abs(moved.divergence - anew.divergence) > 1e-3


def test_dense_attention_leaves_nothing_to_learn(model) -> None:
    """The control: under a budget of the whole length, loss and gradient are rounding."""
    whole = Schedule.fixed(4096, last=1)
    update = distiller(model, b_std=0.0).step(SAMPLES, whole, Rule.of(whole))
    assert abs(update.divergence) < 1e-6
    assert update.gradient < 1e-3


def test_acceptance_rises(model) -> None:
    made = distiller(model, divergence="total_variation")
    teacher = made.policy.hidden(pack_samples(SAMPLES)).detach()

    def acceptance() -> float:
        with torch.no_grad():
            return float(ops.acceptance(teacher, student(made, SAMPLES), model.head).mean())

    before = acceptance()
    for _ in range(12):
        made.step(SAMPLES, SCHEDULE, RULE)
    assert acceptance() > before


def test_state_goes_on_bit_for_bit(model) -> None:
    straight, begun, resumed = (distiller(model) for _ in range(3))
    for _ in range(4):
        straight.step(SAMPLES, SCHEDULE, RULE)
    for _ in range(2):
        begun.step(SAMPLES, SCHEDULE, RULE)
    resumed.restore(begun.state())
    for _ in range(2):
        resumed.step(SAMPLES, SCHEDULE, RULE)
    for mine, other in zip(straight.leaves, resumed.leaves, strict=True):
        assert torch.equal(mine, other)


def test_a_folder_belongs_to_one_base(tmp_path: Path) -> None:
    model = tiny()
    adapter = Adapter.random(model.spec, 4)
    folder = save_actor(tmp_path / "actor", adapter, SCHEDULE, model, name="mine")
    for place in (folder, tmp_path):  # itself, or the run that has it
        loaded = load_actor(place, model)
        assert loaded.schedule == SCHEDULE
        for name, tensor in loaded.adapter.tensors().items():
            assert torch.equal(tensor, adapter.tensors()[name])
    assert base_digest(tiny()) == base_digest(model) != base_digest(tiny(seed=1))
    assert base_digest(model) == base_digest(tiny().to(torch.bfloat16).float())
    with pytest.raises(ValueError, match="other weights"):
        load_actor(folder, tiny(seed=1))
    text = (folder / "actor.json").read_text().replace("mine", "yours")
    (folder / "actor.json").write_text(text)
    with pytest.raises(ValueError, match="digest"):
        load_actor(folder, model)
    (tmp_path / "empty").mkdir()
    for name, reason in (("empty", r"no actor\.json"), ("elsewhere", "no such folder")):
        with pytest.raises(ValueError, match=reason):
            load_actor(tmp_path / name, model)
