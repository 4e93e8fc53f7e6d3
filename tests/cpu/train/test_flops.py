"""Operations of training, counted by hand."""

from dataclasses import replace

from support.specs import TINY

from sparrow.models.shapes import shape
from sparrow.models.spec import ModelSpec
from sparrow.train.costs import forward_flops, product_weights, training_flops

TWO_BY_TWO = ModelSpec(
    family="qwen3",
    layers=2,
    hidden=6,
    intermediate=10,
    heads=4,
    kv_heads=2,
    head_size=2,
    vocabulary=7,
    max_positions=32,
    tied=True,
)
# q 6 x 8, k and v 6 x 4 each, out 8 x 6; gate, up, down 6 x 10 each: 324 a layer. Head: 7 x 6.
WEIGHTS = 2 * (48 + 24 + 24 + 48 + 60 + 60 + 60) + 42


def test_weights_of_products_by_hand() -> None:
    assert WEIGHTS == 690
    assert product_weights(TWO_BY_TWO) == WEIGHTS


def test_tied_or_not_the_head_counts_once_and_no_bias_or_norm_does() -> None:
    assert product_weights(replace(TWO_BY_TWO, tied=False)) == WEIGHTS
    assert product_weights(replace(TWO_BY_TWO, family="qwen2")) == WEIGHTS


def test_training_by_hand() -> None:
    """Sequences of 3 and 5 tokens: 8 tokens, squares 9 + 25 = 34."""
    attention = 2 * 2 * 4 * 2 * 34 / 2  # a layer: 544
    assert forward_flops(TWO_BY_TWO, [3, 5]) == 2 * 690 * 8 + 2 * attention == 12128
    assert training_flops(TWO_BY_TWO, [3, 5]) == 6 * 690 * 8 + 3 * 2 * attention == 36384


def test_packing_changes_nothing_but_attention_sees_sequences() -> None:
    one, two = training_flops(TINY, [64]), training_flops(TINY, [32, 32])
    squares = 64**2 - 2 * 32**2
    assert one - two == 6 * TINY.layers * TINY.heads * TINY.head_size * squares
    assert training_flops(TINY, []) == 0


def test_qwen_counts_all_but_norms() -> None:
    spec = shape("qwen3-1.7b")
    norms = spec.layers * (2 * spec.hidden + 2 * spec.head_size) + spec.hidden
    assert product_weights(spec) == spec.parameters() - norms
