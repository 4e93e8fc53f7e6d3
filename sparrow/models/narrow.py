"""A model with narrower MLPs, cut out of another: a small one that begins with what it knows."""

from dataclasses import replace

import torch
from torch import Tensor

from sparrow.models.checkpoint import random
from sparrow.models.decoder import Decoder, Layer
from sparrow.models.spec import ModelSpec


def narrowed(model: Decoder, spec: ModelSpec) -> Decoder:
    """The model in another spec, which may differ from its own in context and MLP width alone.

    Of every MLP the channels whose weights are largest stay, in their order.
    """
    like = replace(model.spec, intermediate=spec.intermediate, max_positions=spec.max_positions)
    if like != spec:
        raise ValueError(
            f"a model of {model.spec} cannot become one of {spec}: only the context and the width "
            "of the MLPs may differ"
        )
    if spec.intermediate > model.spec.intermediate:
        raise ValueError(
            f"MLPs of {model.spec.intermediate} channels cannot give {spec.intermediate}"
        )
    small = random(spec, dtype=model.dtype, device=model.device)
    state = model.state_dict()
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        keep = _heaviest(layer, spec.intermediate)
        gate, up = layer.mlp.gate_up.weight.detach().chunk(2)
        prefix = f"layers.{index}.mlp"
        state[f"{prefix}.gate_up.weight"] = torch.cat((gate[keep], up[keep]))
        state[f"{prefix}.down.weight"] = layer.mlp.down.weight.detach()[:, keep]
    small.load_state_dict(state)
    return small


def _heaviest(layer: Layer, channels: int) -> Tensor:
    gate, up = layer.mlp.gate_up.weight.detach().float().chunk(2)
    down = layer.mlp.down.weight.detach().float()
    weight = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    return weight.topk(channels).indices.sort().values
