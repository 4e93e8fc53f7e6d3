"""Supervised training against plain torch, one document at a time; packs, and the rate."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.leftovers import marked, marking
from support.samples import small_model
from torch import Tensor
from torch.nn import functional

from sparrow import models
from sparrow.models.attention import Packed
from sparrow.schema.episode import Document
from sparrow.schema.train import OptimiserConfig
from sparrow.training.optimiser import rate_at
from sparrow.training.packing import Pack, pack
from sparrow_recipes.warmup.config import DataConfig, StageConfig
from sparrow_recipes.warmup.documents import PuzzleDocuments
from sparrow_recipes.warmup.supervised import Supervised, packs

VOCABULARY = 61
STEPS = 40


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


def test_gradients_are_those_of_the_plain_computation() -> None:
    """The loss is the cross entropy of the learnt tokens."""
    model = small_model()
    loss, wanted = trainer_of(model).loss(pack(DOCUMENTS))[0], plain_loss(model, DOCUMENTS)
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
    ours, plain = gradients(model, loss), gradients(model, wanted)
    assert ours.keys() == plain.keys() == dict(model.named_parameters()).keys()
    for name, grad in plain.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(ours[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_a_step_by_hand() -> None:
    """Clipped gradients through AdamW at the step's own rate."""
    model, twin = small_model(), small_model()
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


def test_products_in_bf16_are_near() -> None:
    """Weights, loss and gradients stay float32; 16-bit weights are refused."""
    with pytest.raises(ValueError, match="float32"):
        Supervised(small_model().to(torch.bfloat16), OptimiserConfig(), steps=1)
    model = small_model()
    exact = trainer_of(model).loss(pack(DOCUMENTS))[0]
    near = Supervised(model, OptimiserConfig(), steps=1, dtype=torch.bfloat16).loss(
        pack(DOCUMENTS)
    )[0]
    assert near.dtype == torch.float32
    assert 0 < (near - exact).abs() < 0.02 * exact
    assert {grad.dtype for grad in gradients(model, near).values()} == {torch.float32}


# Packs: where documents begin and end, positions, and which token each place predicts.


FIRST = Document(ids=[10, 11, 12, 13, 14], prompt=2)
SECOND = Document(ids=[20, 21], prompt=1)
THIRD = Document(ids=[30, 31, 32, 33], prompt=3)


def test_three_documents_by_hand() -> None:
    with pytest.raises(ValueError, match="no documents"):
        pack([])
    packed = pack([FIRST, SECOND, THIRD])
    assert packed.ids_T.tolist() == [10, 11, 12, 13, 14, 20, 21, 30, 31, 32, 33]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3]
    assert packed.bounds.tolist() == [0, 5, 7, 11]
    assert packed.longest == 5
    assert packed.sources_R.tolist() == [1, 2, 3, 5, 9]
    assert packed.targets_R.tolist() == [12, 13, 14, 21, 33]
    # The flash kernel wants int32 bounds, indexing wants int64.
    assert packed.bounds.dtype == torch.int32
    indices = (packed.ids_T, packed.positions_T, packed.sources_R, packed.targets_R)
    assert {tensor.dtype for tensor in indices} == {torch.int64}


# The rate along its three lines.


RATE = 0.5  # exact in binary, as are the powers of two below


def config(**changes: Any) -> OptimiserConfig:
    return OptimiserConfig(**{"rate": RATE, "warm_up": 4, "decay": 8, "final": 0.5, **changes})


def rates(steps: int, **changes: Any) -> list[float]:
    return [rate_at(config(**changes), step, steps) / RATE for step in range(steps)]


def test_up_level_and_down() -> None:
    """Where the lines cross the lower one counts; a decay ends at the last step, wherever it
    begins."""
    up, down = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1], [1 - eighths / 16 for eighths in range(1, 9)]
    assert rates(16) == up + down
    assert rates(16, warm_up=0)[:9] == [1.0] * 8 + [1 - 1 / 16]
    assert rates(8, decay=0) == up
    assert rates(5, warm_up=0, decay=0) == [1.0] * 5
    assert rates(4, warm_up=0, decay=8, final=0.0) == [3 / 8, 2 / 8, 1 / 8, 0]
    assert rates(1, warm_up=0, decay=8, final=0.25) == [0.25]
    crossing = [eighths / 8 for eighths in (1, 2, 3, 4, 3, 2, 1, 0)]
    assert rates(8, warm_up=8, decay=8, final=0.0) == crossing
    assert rates(4, warm_up=16, decay=0) == [1 / 16, 2 / 16, 3 / 16, 4 / 16]


# Packs made ahead: the same ones in the same order, errors, and an early end.


# A maker of the package itself: other processes can import it wherever the tests run.
STAGE = StageConfig(steps=30, tokens=1024, longest=150)
MAKE = PuzzleDocuments(data=DataConfig(assignments=0.0), stages=(STAGE,), context=1024)


def same(left: Pack, right: Pack) -> bool:
    names = ("ids_T", "positions_T", "bounds", "sources_R", "targets_R")
    return left.longest == right.longest and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in names
    )


def test_workers_give_the_same_packs_in_order() -> None:
    """More steps than are in the making at once, and fewer than workers could take."""
    for start, stop in ((0, 16), (29, 30), (5, 5)):
        alone = [pack(MAKE(step)) for step in range(start, stop)]
        assert all(map(same, alone, packs(MAKE, start, stop)))
        with marking():
            together = list(packs(MAKE, start, stop, workers=2))
        assert len(alone) == len(together) == stop - start
        assert all(map(same, alone, together))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_error_of_a_maker_comes_through(workers: int) -> None:
    """After the packs of the steps before it; a step behind the last stage has no documents."""
    short = MAKE.replace(stages=(STAGE.model_copy(update={"steps": 2}),))
    with marking():
        found = packs(short, 0, 9, workers=workers)
        assert same(next(found), pack(short(0)))
        assert same(next(found), pack(short(1)))
        with pytest.raises(ValueError, match="step 2"):
            next(found)


def test_stopping_early_leaves_no_process() -> None:
    with marking() as mark:
        found = packs(MAKE, 0, 30, workers=2)
        assert same(next(found), pack(MAKE(0)))
        assert marked(mark)
        found.close()  # type: ignore[attr-defined]
