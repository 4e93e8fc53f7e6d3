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
def test_the_same_width_is_the_identity_in_another_context(tied: bool) -> None:
    model = tiny(tied=tied)
    same = narrowed(model, replace(model.spec, max_positions=512))
    assert same.spec.max_positions == 512
    assert torch.equal(logits_of(same), logits_of(model))
    for name, view in models.hf_views(model).items():
        assert torch.equal(models.hf_views(same)[name], view), name


def test_the_heaviest_channels_stay_in_their_order() -> None:
    """By the product of the three norms; every layer for itself, all else untouched."""
    model = tiny(dtype=torch.bfloat16)
    small = narrowed(model, replace(model.spec, intermediate=20))
    assert (small.spec, small.dtype) == (replace(model.spec, intermediate=20), torch.bfloat16)
    for layer in range(2):
        whole = own_weights(model, layer)
        weight = torch.stack([part.double().norm(dim=1) for part in whole]).prod(0)
        keep = sorted(range(WIDTH), key=lambda channel: -float(weight[channel]))[:20]
        for ours, theirs in zip(own_weights(small, layer), whole, strict=True):
            assert torch.equal(ours, theirs[sorted(keep)])
    for name, view in models.hf_views(model).items():
        if "mlp" not in name:
            assert torch.equal(models.hf_views(small)[name], view), name


def test_refuses_what_differs_otherwise() -> None:
    model = tiny()
    changes: list[dict[str, Any]] = [
        *({"intermediate": 49}, {"layers": 1}, {"hidden": 64}, {"heads": 2}, {"kv_heads": 4}),
        *({"head_size": 16}, {"vocabulary": 65}, {"tied": False}, {"norm_eps": 1e-5}),
        *({"family": "llama"}, {"eos_ids": (3,)}),
    ]
    for change in changes:
        with pytest.raises(ValueError, match="differ"):
            narrowed(model, replace(model.spec, **({"intermediate": 20} | change)))
