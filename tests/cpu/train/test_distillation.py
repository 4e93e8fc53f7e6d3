"""Distillation: the student is what sparse decoding sees, the policy is not touched, it learns."""

import numpy as np
import pytest
import torch
from support.engines import prompt, tiny

from sparrow import models, ops
from sparrow.calibration.replay import read, sparse_hidden
from sparrow.models.lora import Adapter
from sparrow.schema.episode import Document
from sparrow.schema.schedule import Schedule
from sparrow.sparse.rule import Rule
from sparrow.training.distillation import Distiller
from sparrow.training.packing import Pack, pack

SCHEDULE = Schedule.fixed(48, last=1)
STEP = 1e-4  # of differences
DOCUMENTS = [Document(ids=np.array(prompt(n, n), np.int32), prompt=n // 3) for n in (150, 90, 201)]


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny()


def batch(documents: list[Document]) -> tuple[Pack, torch.Tensor]:
    return pack(documents), torch.tensor([document.prompt for document in documents])


def distiller(model: models.Decoder, b_std: float = 0.0, **settings) -> Distiller:
    adapter = Adapter.random(model.spec, 4, b_std=b_std)
    settings = {"rate": 5e-3} | settings
    return Distiller(model, adapter, Rule.of(SCHEDULE), SCHEDULE, **settings)


def test_a_zero_adapter_is_the_sparse_actor_of_every_document(model) -> None:
    made = distiller(model)
    own, prompts = batch(DOCUMENTS)
    found = made.student(own, prompts)
    wanted = []
    for document in DOCUMENTS:
        dense, start = read(model, document.ids.tolist()), document.prompt
        sparse = sparse_hidden(model, dense, start, SCHEDULE)
        wanted.append(sparse[start - 1 : -1])
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-5, rtol=1e-5)
    assert found.requires_grad


def test_gradients_are_those_of_differences_with_the_same_pages(model) -> None:
    """A small step of the adapter changes hardly a choice of pages; rotations are fp32."""
    wide = tiny().double()
    adapter = Adapter.random(wide.spec, 2, dtype=torch.float64)
    made = Distiller(wide, adapter, Rule.of(SCHEDULE), SCHEDULE, rate=0.0)
    own = batch(DOCUMENTS[1:2])
    made.losses(*own).sum().backward()
    random = torch.Generator().manual_seed(3)
    for tensor in list(adapter.tensors().values())[::5]:
        direction = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        with torch.no_grad():
            values = []
            for step in (STEP, -STEP):
                tensor += step * direction
                values.append(made.losses(*own).sum())
                tensor -= step * direction
        slope = (values[0] - values[1]) / (2 * STEP)
        torch.testing.assert_close((tensor.grad * direction).sum(), slope, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("divergence", ["reverse_kl", "total_variation"])
def test_it_learns_and_the_policy_keeps_its_bits(divergence) -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = [weight.requires_grad_() for weight in model.parameters()]  # as a trainer has them
    made = distiller(model, divergence=divergence)
    packs = [batch(DOCUMENTS[:2]), batch(DOCUMENTS[2:])]
    losses = [made.step(packs) for _ in range(12)]
    assert losses[-1].loss < 0.8 * losses[0].loss
    assert losses[0].tokens == sum(len(d.ids) - d.prompt for d in DOCUMENTS)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(weight.grad is None for weight in weights)


def test_splitting_a_batch_changes_nothing(model) -> None:
    whole, parts = distiller(model), distiller(model)
    whole.step([batch(DOCUMENTS)])
    parts.step([batch([document]) for document in DOCUMENTS])
    for mine, other in zip(
        whole.adapter.tensors().values(), parts.adapter.tensors().values(), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-3)


def test_acceptance_rises(model) -> None:
    made = distiller(model, divergence="total_variation")
    own = batch(DOCUMENTS)
    teacher = made.teacher(own[0])

    def acceptance() -> float:
        with torch.no_grad():
            return float(ops.acceptance(teacher, made.student(*own), model.head).mean())

    before = acceptance()
    for _ in range(12):
        made.step([own])
    assert acceptance() > before
