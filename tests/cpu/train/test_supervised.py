"""Supervised training against plain torch, one document at a time; packs; going on after a stop."""

import copy
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("pydantic")

from sparrow import models
from sparrow.models.attention import Packed
from sparrow.schema.episode import Document
from sparrow.schema.train import OptimiserConfig
from sparrow.train.packing import pack
from sparrow.train.supervised import Supervised

VOCABULARY = 61
STEPS = 40


def tiny(seed: int = 0, **changes: Any) -> models.Decoder:
    sizes = {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2}
    sizes |= {"head_size": 8, "vocabulary": VOCABULARY, "max_positions": 256}
    model = models.random("qwen3-0.6b", seed=seed, **sizes, tied=True, **changes)
    with torch.no_grad():
        for name, view in models.hf_views(model).items():
            if "norm" not in name:
                view.mul_(4)  # so that logits have a spread
    return model


def trainer_of(model: models.Decoder, **changes: Any) -> Supervised:
    config = OptimiserConfig(**{"rate": 3e-3, "warm_up": 2, "decay": 5, **changes})
    return Supervised(model, config, steps=STEPS)


def document(length: int, prompt: int, seed: int = 0) -> Document:
    ids = np.random.default_rng(seed).integers(VOCABULARY, size=length)
    return Document(ids=ids, prompt=prompt)


DOCUMENTS = [document(40, 10, 1), document(7, 6, 2), document(150, 1, 3), document(2, 1, 4)]


def plain_loss(model: models.Decoder, documents: Sequence[Document]) -> Tensor:
    """Documents one by one, every logit, torch's cross entropy on the learnt tokens."""
    losses, learnt = [], 0
    for each in documents:
        ids = torch.tensor(each.ids.tolist())
        whole = Packed(bounds=torch.tensor([0, len(ids)]))
        hidden = model(ids, torch.arange(len(ids)), whole)
        logits = (hidden @ model.head.T)[each.prompt - 1 : -1]
        losses.append(functional.cross_entropy(logits, ids[each.prompt :], reduction="sum"))
        learnt += len(ids) - each.prompt
    return torch.stack(losses).sum() / learnt


def gradients(model: models.Decoder, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_loss_is_the_cross_entropy_of_the_learnt_tokens(count: int) -> None:
    model = tiny()
    loss, _ = trainer_of(model).loss(pack(DOCUMENTS[:count]))
    torch.testing.assert_close(loss, plain_loss(model, DOCUMENTS[:count]), atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_the_plain_computation() -> None:
    model = tiny()
    ours = gradients(model, trainer_of(model).loss(pack(DOCUMENTS))[0])
    plain = gradients(model, plain_loss(model, DOCUMENTS))
    assert ours.keys() == plain.keys() == dict(model.named_parameters()).keys()
    for name, grad in plain.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(ours[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_the_entropy_is_that_of_the_learnt_places() -> None:
    model = tiny()
    packed = pack(DOCUMENTS[:2])
    entropy = trainer_of(model).loss(packed)[1]
    assert not entropy.requires_grad
    logp = []
    for each in DOCUMENTS[:2]:
        ids = torch.tensor(each.ids.tolist())
        hidden = model(ids, torch.arange(len(ids)), Packed(bounds=torch.tensor([0, len(ids)])))
        logp.append((hidden @ model.head.T).log_softmax(1)[each.prompt - 1 : -1])
    every = torch.cat(logp).detach()
    torch.testing.assert_close(entropy, -(every.exp() * every).sum(1).mean(), atol=1e-5, rtol=1e-5)


def test_packing_changes_nothing() -> None:
    """Two documents side by side are each alone: loss and gradients by their learnt tokens."""
    model = tiny()
    trainer = trainer_of(model)
    two = DOCUMENTS[0], DOCUMENTS[2]
    learnt = [len(each) - each.prompt for each in two]
    together = trainer.loss(pack(two))[0]
    alone = [trainer.loss(pack([each]))[0] for each in two]
    mixed = sum(n * loss for n, loss in zip(learnt, alone, strict=True)) / sum(learnt)
    torch.testing.assert_close(together, mixed, atol=1e-6, rtol=1e-6)
    left, right = gradients(model, together), gradients(model, mixed)
    for name, grad in right.items():
        torch.testing.assert_close(left[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_a_neighbour_changes_nothing() -> None:
    trainer = trainer_of(tiny())
    packs = [pack([DOCUMENTS[0], other]) for other in (document(30, 5, 8), document(30, 5, 9))]
    hidden = []
    for each in packs:
        with torch.no_grad():
            attention = Packed(bounds=each.bounds)
            hidden.append(trainer.model(each.ids_T, each.positions_T, attention)[:40])
    assert torch.equal(*hidden)


def test_prompt_tokens_are_not_learnt() -> None:
    """The loss hangs on the places before learnt tokens, and on no others."""
    model = tiny()
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda _, __, out: seen.append(out))
    packed = pack([document(10, 7, 1), document(12, 3, 2)])
    loss, _ = trainer_of(model).loss(packed)
    (grad_TC,) = torch.autograd.grad(loss, seen)
    assert grad_TC.abs().sum(1).nonzero().flatten().tolist() == [6, 7, 8, *range(12, 21)]


def test_training_raises_the_learnt_tokens_and_not_the_prompt() -> None:
    model = tiny()
    trainer = trainer_of(model, rate=1e-2)
    shown = document(30, 20, 5)
    ids = torch.tensor(shown.ids.tolist())

    def logprobs() -> tuple[float, float]:
        with torch.no_grad():
            hidden = model(ids, torch.arange(30), Packed(bounds=torch.tensor([0, 30])))
            logp = (hidden @ model.head.T).log_softmax(1)[torch.arange(29), ids[1:]]
        return float(logp[:19].mean()), float(logp[19:].mean())

    prompt, answer = logprobs()
    for _ in range(STEPS):
        trainer.step(pack([shown]))
    after = logprobs()
    assert after[1] > max(answer, -0.1)
    assert after[0] < prompt + 1


def test_a_tiny_model_overfits_two_documents() -> None:
    trainer = trainer_of(tiny(), rate=1e-2, weight_decay=0.0)
    packed = pack([document(30, 5, 6), document(40, 8, 7)])
    stats = [trainer.step(packed).plain() for _ in range(STEPS)]
    assert stats[0]["loss"] > 3
    assert stats[-1]["loss"] < 0.05
    assert [line["step"] for line in stats] == list(range(STEPS))
    assert {line["learnt"] for line in stats} == {57}
    assert {line["tokens"] for line in stats} == {70}


def test_a_step_by_hand() -> None:
    """Clipped gradients through AdamW at the step's own rate."""
    model, twin = tiny(), tiny()
    trainer = trainer_of(model, clip=0.5, warm_up=4)
    optimiser = torch.optim.AdamW(
        [
            {"params": [p for p in twin.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=3e-3 / 4,
        betas=(0.9, 0.95),
    )
    stats = trainer.step(pack(DOCUMENTS))
    loss = plain_loss(twin, DOCUMENTS)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    optimiser.step()
    assert stats.rate == 3e-3 / 4
    assert norm > 0.5  # it was clipped
    torch.testing.assert_close(stats.gradient, norm, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stats.loss, loss.detach(), atol=1e-5, rtol=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        # Adam's first step is the sign of a gradient: where that is near 0, rounding decides.
        near = (ours - theirs).abs() < 1e-5
        assert near.float().mean() > 0.99, name
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_refuses_16_bit_weights(dtype: torch.dtype) -> None:
    message = f"training wants float32 weights, the model has {dtype}"
    with pytest.raises(ValueError, match=message):
        Supervised(tiny(dtype=dtype), OptimiserConfig(), steps=1)


def test_products_in_bf16_are_near() -> None:
    """Weights, loss and gradients stay float32."""
    model = tiny()
    exact = trainer_of(model).loss(pack(DOCUMENTS))[0]
    near = Supervised(model, OptimiserConfig(), steps=1, dtype=torch.bfloat16).loss(
        pack(DOCUMENTS)
    )[0]
    assert near.dtype == torch.float32
    assert 0 < (near - exact).abs() < 0.02 * exact
    assert {grad.dtype for grad in gradients(model, near).values()} == {torch.float32}


def test_going_on_from_a_state_continues_bit_for_bit() -> None:
    packs = [pack([document(20, 4, seed), document(33, 9, seed + 50)]) for seed in range(8)]
    whole = trainer_of(tiny())
    curve = [whole.step(each).plain() for each in packs]

    begun = trainer_of(tiny())
    first = [begun.step(each).plain() for each in packs[:4]]
    file = io.BytesIO()
    torch.save(begun.state(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = trainer_of(tiny(seed=9))  # other weights: all come from the state
    resumed.restore(copy.deepcopy(state))
    assert resumed.next == 4
    assert first + [resumed.step(each).plain() for each in packs[4:]] == curve
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
