"""What training costs: operations by hand; memory by hand and against what autograd keeps."""

from dataclasses import replace

import pytest
import torch
from support.specs import TINY
from torch.autograd.graph import saved_tensors_hooks

from sparrow import ops, random
from sparrow.models.attention import Packed
from sparrow.models.spec import ModelSpec, shape
from sparrow.training.costs import (
    forward_flops,
    layer_bytes,
    product_weights,
    trainer_memory,
    training_flops,
)

GIB = 2**30


def test_sixteen_bytes_a_parameter_and_twelve_while_the_engine_runs() -> None:
    found = trainer_memory(TINY, tokens=512, longest=256, item=4, recompute=True, gpu=False)
    assert found.weights + found.gradients + found.moments == 16 * TINY.parameters()
    assert found.resident == 12 * TINY.parameters()
    assert found.copies == 0
    passing = found.activations + found.logits
    assert passing > found.gradients
    assert found.total == 12 * TINY.parameters() + passing


def test_a_layer_by_hand() -> None:
    """Hidden 32, 4 and 2 heads of 16, MLP 48: q 64, k and v 32."""
    norms_and_stream, qkv, mlp = 3 * 32, 64 + 32 + 32, 2 * 48 + 48 + 48
    flash = 64 + 2 * 64 + 64  # q, repeated k and v, out
    plain = 64 + 32 + 64  # q, k, out
    scales = 2 + 4 + 2  # of norms: two of the stream, six of heads
    expected = 2 * (norms_and_stream + qkv + flash + mlp) + 4 * (scales + 4)
    assert layer_bytes(TINY, item=2, gpu=True) == expected
    assert layer_bytes(replace(TINY, family="llama"), item=2, gpu=True) == (
        expected - 2 * qkv - 4 * 6  # without a QK-norm
    )
    scaled = 2 * 32 + 64 + 32
    assert layer_bytes(TINY, item=4, gpu=False) == 4 * (
        norms_and_stream + qkv + plain + mlp + scaled + scales
    )


def test_recompute_keeps_one_layer_instead_of_all() -> None:
    kept, again = (
        trainer_memory(TINY, tokens=512, longest=256, item=2, recompute=recompute, gpu=True)
        for recompute in (False, True)
    )
    two_layers = 512 * 2 * layer_bytes(TINY, item=2, gpu=True)
    assert kept.activations - again.activations == two_layers
    assert kept.copies == 2 * TINY.parameters()
    layer = (TINY.parameters() - 64 * 32) // 3
    assert again.copies == 2 * (64 * 32 + layer)


def test_logits_are_a_chunk_and_the_head() -> None:
    """Few tokens do not fill a chunk."""
    few = trainer_memory(TINY, tokens=10, longest=10, item=2, recompute=True, gpu=True)
    assert few.logits == 3 * 10 * 64 * 4 + 2 * 64 * 32 * 4
    wide = replace(TINY, vocabulary=151_936)
    many = trainer_memory(wide, tokens=32_768, longest=32_768, item=2, recompute=True, gpu=True)
    assert many.logits == 3 * GIB + 2 * 151_936 * 32 * 4


def test_a_long_sequence_of_qwen_needs_less_than_a_card() -> None:
    spec = shape("qwen3-1.7b")
    found = trainer_memory(spec, tokens=32_768, longest=32_768, item=2, recompute=True, gpu=True)
    assert 28.9 * GIB < found.total < 40 * GIB  # measured: 28.9


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_count_is_what_autograd_keeps(family: str) -> None:
    """Of one layer more, in float32 on a CPU: bytes that the way back holds on to."""
    tokens, spec = 256, replace(TINY, family=family)
    deep, flat = (_kept_bytes(replace(spec, layers=layers), tokens) for layers in (3, 2))
    stream = 4 * spec.hidden
    assert deep - flat == tokens * (layer_bytes(spec, item=4, gpu=False) + stream)


def _kept_bytes(spec: ModelSpec, tokens: int) -> int:
    model = random(spec)
    kept: dict[int, int] = {}
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    alive = []  # else an address could be given out twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    ids, bounds = torch.zeros(tokens, dtype=torch.long), torch.tensor([0, tokens])
    with saved_tensors_hooks(keep, lambda tensor: tensor), ops.using("reference"):
        model(ids, torch.arange(tokens), Packed(bounds=bounds))
    return sum(kept.values())


# Operations.

TWO_BY_TWO = replace(TINY, layers=2, hidden=6, intermediate=10, head_size=2, vocabulary=7)
# q 6 x 8, k and v 6 x 4 each, out 8 x 6; gate, up, down 6 x 10 each: 324 a layer. Head: 7 x 6.
WEIGHTS = 2 * (48 + 24 + 24 + 48 + 60 + 60 + 60) + 42


def test_training_by_hand() -> None:
    """Sequences of 3 and 5 tokens: 8 tokens, squares 9 + 25 = 34."""
    for changes in ({}, {"tied": False}, {"family": "qwen2"}):  # no bias, no norm counts
        assert product_weights(replace(TWO_BY_TWO, **changes)) == WEIGHTS == 690
    attention = 2 * 2 * 4 * 2 * 34 / 2  # a layer: 544
    assert forward_flops(TWO_BY_TWO, [3, 5]) == 2 * 690 * 8 + 2 * attention == 12128
    assert training_flops(TWO_BY_TWO, [3, 5]) == 6 * 690 * 8 + 3 * 2 * attention == 36384
