"""Sampling in numba and logits of 16-bit heads against their definitions."""

import gc

import numpy as np
import pytest
import torch
from support.rowstates import check_sampler, rows_to_draw_from

from sparrow import ops
from sparrow.ops.cpu import logits as fast
from sparrow.ops.cpu import sampling

SHAPES = [
    *((40, 2048, 3.0), (80, 300, 1.0), (2, 49152, 2.0), (80, 127, 10.0), (80, 129, 30.0)),
    *((40, 1, 1.0), (80, 2, 0.1), (1, 151_936, 1.0)),
]


def test_draws_are_those_of_the_definition() -> None:
    for copies, vocabulary, spread in SHAPES:
        check_sampler(sampling, rows_to_draw_from(vocabulary, spread, copies))
    logits, *others = rows_to_draw_from(400, 3.0)
    for dtype in (torch.float16, torch.bfloat16):
        half = logits.to(dtype)
        check_sampler(sampling, [half, *others])
        draws = [sampling.sample(x, *others) for x in (half, half.float(), half.T.contiguous().T)]
        assert all(torch.equal(*pair) for pair in zip(*draws[:2], strict=True))
        assert all(torch.equal(*pair) for pair in zip(*draws[1:], strict=True))


def test_a_row_has_the_same_bits_on_any_number_of_threads() -> None:
    rows = rows_to_draw_from(3001, 3.0, copies=2)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(sampling.sample(*rows))
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_goals_at_both_ends_stay_on_tokens_with_weight() -> None:
    scaled = np.full(300, -500, np.float32)
    scaled[[5, 140, 141]] = 0
    ladder = np.empty(3)
    assert sampling._climb(scaled, np.float32(0), ladder) == 0
    assert ladder.tolist() == [1, 3, 3]
    for goal, token in ((0.0, 5), (1.0, 140), (2.5, 141), (3.0, 141)):
        assert sampling._invert(scaled, np.float32(0), ladder, goal) == token


def test_what_is_left_to_the_definition() -> None:
    logits, seeds, counters, temperature = (part[:4] for part in rows_to_draw_from(50, 1.0))
    cuts = [torch.full((4,), 3), torch.full((4,), 0.9), torch.full((4, 1), 7)]
    for place in range(3):
        single = [cut if index == place else None for index, cut in enumerate(cuts)]
        assert not sampling.supports("sample", logits, seeds, counters, temperature, *single)
    assert not sampling.supports("sample", logits.double(), seeds, counters, temperature)
    assert not sampling.supports("sample", logits, seeds, counters, temperature.double())
    draws = ops.sample(logits, seeds, counters, temperature, *cuts)
    assert (draws.tokens != 7).all()


# 16-bit LM heads: fp32 logits from a wide copy that is never stale.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_the_definition_bit_for_bit_and_notices_changes(dtype) -> None:
    hidden = torch.randn(5, 16).to(dtype)
    head = torch.nn.Parameter(torch.randn(40, 16).to(dtype))

    def check() -> None:
        with torch.no_grad():
            assert fast.supports("logits", hidden, head)
            actual = ops.logits(hidden, head)
            with ops.using("reference"):
                assert torch.equal(actual, ops.logits(hidden, head))
            assert actual.dtype == torch.float32

    check()
    check()
    head.detach()[3:7].copy_(torch.randn(4, 16))  # as a weight update does, through a view
    check()
    head.data = torch.randn(40, 16).to(dtype)  # as waking up does
    check()
    with torch.inference_mode():
        head.detach().mul_(2)
    check()


def test_the_copy_goes_with_its_head() -> None:
    head = torch.randn(40, 16).bfloat16()
    ops.logits(torch.randn(2, 16).bfloat16(), head)
    key = id(head)
    assert key in fast._wide
    del head
    gc.collect()
    assert key not in fast._wide


def test_gradients_and_fp32_take_the_definition() -> None:
    head = torch.nn.Parameter(torch.randn(40, 16).bfloat16())
    assert not fast.supports("logits", torch.randn(2, 16).bfloat16(), head)
    assert not fast.supports("logits", torch.randn(2, 16), torch.randn(40, 16))
