"""Versions of sampling and of the row ops against their definitions, and rows to try them on."""

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sparrow import ops
from sparrow.ops.reference import sampling as definition


def make_rows(rows: int, pages: int, *, page: int = 16, device: str = "cpu") -> ops.RowState:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int, high: int = 2**62) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    length_R = draw(rows, high=pages * page)
    length_R[-1] = -1
    state = ops.RowState(
        token_R=draw(rows, high=50_000),
        length_R=length_R,
        seed_R=draw(rows),
        drawn_R=draw(rows, high=1000),
        temperature_R=torch.rand(rows, generator=generator),
        table_RM=draw(rows, pages, high=9000).int(),
    )
    return ops.RowState(*(tensor.to(device) for tensor in state))


def make_draws(rows: int, *, device: str = "cpu") -> ops.Draws:
    generator = torch.Generator().manual_seed(rows + 1)
    draws = ops.Draws(
        tokens=torch.randint(0, 50_000, (rows,), generator=generator),
        logprobs=-torch.rand(rows, generator=generator),
        entropies=torch.rand(rows, generator=generator),
        ok=torch.rand(rows, generator=generator) < 0.8,
    )
    return ops.Draws(*(tensor.to(device) for tensor in draws))


def check_steps(module: Any, *, device: str = "cpu") -> None:
    """A version of the row ops does what the definitions do, padding and repeated rows included."""
    for rows, width in ((5, 3), (40, 70), (9, 1)):
        at = torch.tensor([3, 0, rows - 1, 2, rows - 1], device=device)
        mine, theirs = (make_rows(rows, width + 2, page=16, device=device) for _ in range(2))
        for state in (mine, theirs):
            state.length_R.clamp_(max=width * 16 - 1)
        draws = make_draws(5, device=device)
        found = module.step_inputs(at, mine, page=16, width=width)
        with ops.using("reference"):
            wanted = ops.step_inputs(at, theirs, page=16, width=width)
        for name, left, right in zip(wanted._fields, found, wanted, strict=True):
            assert left.dtype == right.dtype, name
            assert torch.equal(left, right), name
        # Padding rows repeat, and which of their draws stays is nobody's business: make them equal.
        draws.tokens[4] = draws.tokens[2]
        for advance in (False, True):
            packed = module.step_outputs(at, draws, mine, advance=advance)
            with ops.using("reference"):
                expected = ops.step_outputs(at, draws, theirs, advance=advance)
            assert torch.equal(packed, expected)
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert mine.length_R[-1] == -1


SEEDS = [0, 1, -1, 2**62, -(2**63), 2**63 - 1, 1234567, 42]
COUNTERS = [0, 1, 2, 3, 2**31, 0, 2**40, 5]
LOWEST = torch.finfo(torch.float32).min
NOT_FINITE = (math.nan, -math.nan, math.inf, -math.inf)
ROWS = 13 + 3 * len(NOT_FINITE)


def rows_to_draw_from(vocabulary: int, spread: float, copies: int = 1) -> list[Tensor]:
    """Logits, seeds, counters and temperatures: seven usual rows, then one of every odd kind."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(copies, ROWS, vocabulary, generator=generator) * spread
    for row, (value, at) in enumerate(product(NOT_FINITE, (0, vocabulary // 2, -1)), start=13):
        logits[:, row, at] = value
    logits[:, 7] = -math.nan
    logits[:, 8] = logits[:, 8].round()  # the earliest of many equals, taken greedily
    logits[:, 9], logits[:, 10] = 0.0, 0.0
    logits[:, 9, -1] = 1e-8  # the best, which exp cannot tell from the others
    logits[:, 11] = LOWEST  # as some mark what must not be drawn; half of it is -inf
    logits[:, 11, [vocabulary // 3, -1]] = torch.tensor([4.0, 4.5])
    logits[:, 12], logits[:, 12, vocabulary // 2] = -1000.0, 1000.0
    seeds, counters = (torch.tensor(numbers).repeat(4)[:ROWS] for numbers in (SEEDS, COUNTERS))
    shift = 97 * torch.arange(copies)[:, None]
    temperature = torch.rand(copies, ROWS, generator=generator) + 0.3
    temperature[:, [8, 9]], temperature[:, 11], temperature[:, 12] = 0.0, 0.5, 1e-30
    rows = logits, seeds ^ shift, counters + shift, temperature
    return [row.flatten(0, 1) for row in rows]


def check_sample(
    module: Any, rows: list[Tensor], *, near: float = 1e-5, rtol: float = 1e-5
) -> ops.Draws:
    """Against fp64: the uniform number lies in its token's step of the cumulative distribution.

    The definition sums in fp32 and is itself off by up to 1e-4 for a large vocabulary.
    """
    assert module.supports("sample", *rows)
    logits_BV, seeds_B, counters_B, temperature_B = rows
    draws, expected = module.sample(*rows), definition.sample.definition(*rows)
    assert [(x.dtype, x.shape) for x in draws] == [(x.dtype, x.shape) for x in expected]
    assert torch.equal(draws.ok, expected.ok)
    sampled = draws.ok & (temperature_B > 0)
    assert torch.equal(draws.tokens[~sampled], expected.tokens[~sampled])
    assert not draws.logprobs[~sampled].any()
    assert not draws.entropies[~sampled].any()
    scaled_BV = logits_BV[sampled].double() / temperature_B[sampled].double()[:, None]
    logp_BV = scaled_BV.log_softmax(1)
    p_BV, token_B1 = logp_BV.exp(), draws.tokens[sampled, None]
    above_B = p_BV.cumsum(1).gather(1, token_B1)[:, 0]
    below_B = above_B - p_BV.gather(1, token_B1)[:, 0]
    uniform_B = definition.uniforms(seeds_B, counters_B)[sampled]
    assert (uniform_B >= below_B - near / 10).all()
    assert (uniform_B <= above_B + near / 10).all()
    assert (below_B < above_B).all()  # tokens without mass are never drawn
    close = {"atol": near, "check_dtype": False}
    wanted_B = logp_BV.gather(1, token_B1)[:, 0]
    torch.testing.assert_close(draws.logprobs[sampled], wanted_B, rtol=rtol, **close)
    entropy_B = torch.special.entr(p_BV).sum(1)
    torch.testing.assert_close(draws.entropies[sampled], entropy_B, rtol=near, **close)
    return draws


def check_sampler(module: Any, rows: list[Tensor], **near: float) -> None:
    """Also: a row has the same bits alone and of other integers, on a CPU also of other strides."""
    many = check_sample(module, rows, **near)
    logits, *others = rows
    check_sample(module, [*rows[:3], torch.zeros_like(others[2])])
    strided = torch.cat([logits, logits], dim=1)[:, : logits.shape[1]]
    again = check_sample(module, [strided, *others], **near)
    if not logits.is_cuda:  # a GPU's loads, and so the order of sums, depend on the alignment
        assert all(torch.equal(*pair) for pair in zip(again, many, strict=True))
    for row in range(0, len(logits), 1 + len(logits) // 6):
        alone = module.sample(*(part[row : row + 1] for part in rows))
        for left, right in zip(alone, many, strict=True):
            assert torch.equal(left, right[row : row + 1])
    small, temperature = [number % 1000 for number in others[:2]], others[2]
    narrow = module.sample(logits, *(number.int() for number in small), temperature)
    wide = module.sample(logits, *small, temperature)
    assert all(torch.equal(*pair) for pair in zip(narrow, wide, strict=True))
    assert [len(x) for x in module.sample(*(part[:0] for part in rows))] == [0, 0, 0, 0]
