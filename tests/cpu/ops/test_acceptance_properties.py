"""Bounds from top-K lists hold for any two distributions, and no tighter upper one would."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparrow import ops
from sparrow.ops.reference import logprob
from sparrow.ops.reference.acceptance import acceptance_bounds


@st.composite
def sides(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Hidden states of two sides, a head, and k: from flat to peaked, from equal to strangers."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    vocabulary = draw(st.sampled_from([1, 2, 3, 7, 50, 400]))
    sharp = draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 5.0, 40.0]))
    apart = draw(st.sampled_from([0.0, 1e-6, 1e-2, 0.3, 2.0]))
    head_VC = torch.randn(vocabulary, 6, generator=generator)
    p_TC = sharp * torch.randn(5, 6, generator=generator)
    q_TC = p_TC + apart * torch.randn(5, 6, generator=generator)
    if draw(st.booleans()):
        p_TC, q_TC, head_VC = p_TC.round(), q_TC.round(), head_VC.round()  # ties
    return p_TC, q_TC, head_VC, draw(st.integers(1, vocabulary))


@given(sides=sides(), temperature=st.sampled_from([0.1, 0.6, 1.0, 3.0]))
def test_the_bracket_always_holds(sides, temperature: float) -> None:
    """As stored, without a tolerance."""
    p_TC, q_TC, head_VC, k = sides
    ids_T = torch.zeros(len(p_TC), dtype=torch.long)
    found = ops.compare(p_TC, q_TC, head_VC, ids_T, temperature=temperature, top_k=k)
    assert (found.lower >= 0).all()
    assert (found.lower <= found.alpha).all()
    assert (found.alpha <= found.upper).all()
    assert (found.upper <= 1).all()
    whole = ops.compare(p_TC, q_TC, head_VC, ids_T, temperature=temperature, top_k=len(head_VC))
    torch.testing.assert_close(whole.lower, whole.upper, atol=1e-5, rtol=0)


@given(sides=sides())
def test_equal_sides_are_accepted_and_may_be_so_for_all_that_lists_tell(sides) -> None:
    p_TC, _, head_VC, k = sides
    ids_T = torch.zeros(len(p_TC), dtype=torch.long)
    found = ops.compare(p_TC, p_TC, head_VC, ids_T, top_k=k)
    for part in (found.alpha, found.upper):
        torch.testing.assert_close(part, torch.ones(len(p_TC)), atol=1e-5, rtol=0)


@given(sides=sides())
def test_longer_lists_tell_more(sides) -> None:
    p_TC, q_TC, head_VC, k = sides
    sides = [logprob.log_softmax(side, head_VC, None) for side in (p_TC, q_TC)]
    tops = [[side.topk(n) for side in sides] for n in (max(1, k // 2), k)]
    (few_low, few_high), (low, high) = (
        acceptance_bounds(p.indices, p.values, q.indices, q.values, len(head_VC)) for p, q in tops
    )
    assert (few_low <= low + 1e-5).all()
    assert (high <= few_high + 1e-5).all()


@given(seed=st.integers(0, 2**31), vocabulary=st.integers(2, 6), k=st.integers(1, 3))
def test_no_distributions_with_these_lists_have_more(seed: int, vocabulary: int, k: int) -> None:
    """The upper bound is reached: two distributions are built that agree with the lists."""
    generator = torch.Generator().manual_seed(seed)
    k = min(k, vocabulary)
    p_V, q_V = torch.rand(2, vocabulary, generator=generator, dtype=torch.float64).pow(2).add(1e-3)
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    p_top, q_top = p_V.topk(k), q_V.topk(k)
    _, upper = acceptance_bounds(
        p_top.indices[None],
        p_top.values[None].log(),
        q_top.indices[None],
        q_top.values[None].log(),
        vocabulary,
    )
    mine, other = _closest(p_V, q_V, k)
    for side, top in ((mine, p_top), (other, q_top)):
        assert float(side.sum()) == pytest.approx(1)
        torch.testing.assert_close(side[top.indices], top.values)
        assert float(side.sort(descending=True).values[k - 1]) <= float(top.values[-1]) + 1e-12
    assert float(torch.minimum(mine, other).sum()) == pytest.approx(float(upper), abs=1e-9)


def _closest(p_V: Tensor, q_V: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Keep both lists; spend what is left first where only the other side is named, then where
    neither is, step by step alike on both sides, and last wherever there is room."""
    sides = []
    for own, other in ((p_V, q_V), (q_V, p_V)):
        named, named_there = own.topk(k), set(other.topk(k).indices.tolist())
        side = torch.zeros_like(own).index_put((named.indices,), named.values)
        free = [v for v in range(len(own)) if v not in named.indices.tolist()]
        sides.append([side, free, named_there, float(named.values[-1]), other])
    for side, free, named_there, cap, other in sides:
        for v in [v for v in free if v in named_there]:
            side[v] = min(float(other[v]), cap, 1 - float(side.sum()))
    (mine, free, there, cap, _), (other, _, _, other_cap, _) = sides
    for v in [v for v in free if v not in there]:
        give = min(cap, other_cap, 1 - float(mine.sum()), 1 - float(other.sum()))
        mine[v] = other[v] = give
    for side, free, _, cap, _ in sides:
        for v in free:
            side[v] += max(0.0, min(cap - float(side[v]), 1 - float(side.sum())))
    return mine, other
