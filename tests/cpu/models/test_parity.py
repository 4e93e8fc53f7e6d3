"""Our decoder == transformers, for each family and each variation inside a family."""

from pathlib import Path
from typing import Any

import torch

from sparrow import models
from sparrow.models.attention import Packed

LENGTH = 100


def ids_of(vocabulary: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def our_logits(model: models.Decoder, ids: torch.Tensor) -> torch.Tensor:
    attention = Packed(bounds=torch.tensor([0, len(ids)]))
    return model.logits(model(ids, torch.arange(len(ids)), attention))


@torch.no_grad()
def their_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None]).logits[0].float()


def test_fp32_logits_equal(reference: Any, folder: Path) -> None:
    ids = ids_of(reference.config.vocab_size)
    ours = our_logits(models.load(folder, dtype="float32", device="cpu"), ids)
    theirs = their_logits(reference, ids)
    assert theirs.abs().max() > 1  # the comparison has something to compare
    assert (ours - theirs).abs().max() < 1e-4


def test_bf16_error_is_at_most_twice_theirs(reference: Any, folder: Path) -> None:
    ids = ids_of(reference.config.vocab_size)
    exact = their_logits(reference, ids)
    # Both round the same fp32 weights; the error is against the fp32 model.
    ours = our_logits(models.load(folder, dtype="bfloat16", device="cpu"), ids)
    theirs = their_logits(reference.bfloat16(), ids)
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_packed_sequences_do_not_see_each_other(folder: Path) -> None:
    model = models.load(folder, device="cpu")
    first, second = ids_of(199, 33), ids_of(199, 50)
    packed = torch.cat([first, second])
    positions = torch.cat([torch.arange(33), torch.arange(50)])
    with torch.no_grad():
        hidden = model(packed, positions, Packed(bounds=torch.tensor([0, 33, 83])))
    alone = torch.cat([our_logits(model, first), our_logits(model, second)])
    torch.testing.assert_close(model.logits(hidden), alone, atol=1e-4, rtol=1e-4)


def test_gradients_equal(reference: Any, folder: Path) -> None:
    """Training uses the same module: the loss's gradient is theirs, tensor by tensor."""
    from sparrow import ops

    ids = ids_of(reference.config.vocab_size, 40)
    model = models.load(folder, dtype="float32", device="cpu")
    hidden = model(ids, torch.arange(40), Packed(bounds=torch.tensor([0, 40])))
    stats = ops.token_stats(hidden[:-1], model.head, ids[1:])
    (-stats.logprob.mean()).backward()
    reference(ids[None], labels=ids[None]).loss.backward()

    theirs = {name: weight.grad for name, weight in reference.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.grad  # so that the Hugging Face views show gradients
    ours = models.hf_views(model)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, atol=1e-5, rtol=1e-3, msg=name)
