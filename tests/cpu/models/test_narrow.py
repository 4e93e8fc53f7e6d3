"""Narrower models: what stays, in which order, and what cannot become another."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparrow import models
from sparrow.models import Decoder
from sparrow.models.attention import Packed
from sparrow.models.checkpoint import narrowed

IDS = torch.arange(30) % 50
WIDTH = 48


def tiny(**changes: Any) -> Decoder:
    small = {"layers": 2, "hidden": 32, "intermediate": WIDTH, "heads": 4, "kv_heads": 2}
    sizes = {**small, "head_size": 8, "vocabulary": 64, "max_positions": 128, "tied": True}
    return models.random("qwen3-0.6b", seed=1, **(sizes | changes))


@torch.no_grad()
def logits_of(model: Decoder) -> torch.Tensor:
    return model.logits(model(IDS, torch.arange(30), Packed(bounds=torch.tensor([0, 30]))))


def own_weights(model: Decoder, layer: int) -> tuple[torch.Tensor, ...]:
    """Gate, up and down of a layer, channels first."""
    views = models.hf_views(model)
    gate, up, down = (
        views[f"model.layers.{layer}.mlp.{name}_proj.weight"].detach()
        for name in ("gate", "up", "down")
    )
    return gate, up, down.T


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_width_is_the_identity(tied: bool) -> None:
    model = tiny(tied=tied)
    same = narrowed(model, model.spec)
    assert same is not model
    assert torch.equal(logits_of(same), logits_of(model))
    for name, view in models.hf_views(model).items():
        assert torch.equal(models.hf_views(same)[name], view), name


def test_another_context_changes_no_weight() -> None:
    model = tiny()
    longer = narrowed(model, replace(model.spec, max_positions=512))
    assert longer.spec.max_positions == 512
    assert torch.equal(logits_of(longer), logits_of(model))


def test_the_heaviest_channels_stay_in_their_order() -> None:
    """By the product of the three norms; every layer for itself, all else untouched."""
    model = tiny()
    small = narrowed(model, replace(model.spec, intermediate=20))
    assert small.spec == replace(model.spec, intermediate=20)
    for layer in range(2):
        whole = own_weights(model, layer)
        weight = torch.stack([part.double().norm(dim=1) for part in whole]).prod(0)
        keep = sorted(range(WIDTH), key=lambda channel: -float(weight[channel]))[:20]
        for ours, theirs in zip(own_weights(small, layer), whole, strict=True):
            assert torch.equal(ours, theirs[sorted(keep)])
    for name, view in models.hf_views(model).items():
        if "mlp" not in name:
            assert torch.equal(models.hf_views(small)[name], view), name


def test_channels_that_do_nothing_go_first() -> None:
    """Where the rest is 0, the narrow model computes what the wide one did."""
    model = tiny()
    silent = torch.tensor([0, 5, 17, 30, 46])
    with torch.no_grad():
        for layer in range(2):
            own_weights(model, layer)[layer][silent] = 0
            own_weights(model, layer)[2][silent] = 0
    small = narrowed(model, replace(model.spec, intermediate=WIDTH - 5))
    torch.testing.assert_close(logits_of(small), logits_of(model), atol=1e-5, rtol=1e-5)


def test_the_original_is_left_alone() -> None:
    model = tiny()
    before = logits_of(model)
    small = narrowed(model, replace(model.spec, intermediate=20))
    with torch.no_grad():
        for weight in small.parameters():
            weight.zero_()
    assert torch.equal(logits_of(model), before)


def test_dtype_stays() -> None:
    model = tiny(dtype=torch.bfloat16)
    assert narrowed(model, replace(model.spec, intermediate=20)).dtype == torch.bfloat16


def test_refuses_what_differs_otherwise() -> None:
    model = tiny()
    changes: list[dict[str, Any]] = [
        *({"intermediate": 49}, {"layers": 1}, {"hidden": 64}, {"heads": 2}, {"kv_heads": 4}),
        *({"head_size": 16}, {"vocabulary": 65}, {"tied": False}, {"norm_eps": 1e-5}),
        *({"family": "llama"}, {"eos_ids": (3,)}),
    ]
    for change in changes:
        with pytest.raises(ValueError, match=r"MLPs|differ"):
            narrowed(model, replace(model.spec, **({"intermediate": 20} | change)))
