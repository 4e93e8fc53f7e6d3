"""The definitions of attention against softmax written out in double precision."""

from functools import partial

import pytest
import torch
from support.flows import mean_flow
from support.paging import make_batch, plain_attention

from sparrow import ops
from sparrow.ops.reference.attention import QUERY_BLOCK
from sparrow.sparse.flows import library
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.rule import Rule

SCALE = 0.3
LENGTHS = [1, 15, 16, 17, 100]
SPARSE = {"page": 16, "scale": SCALE, "scorer": Rule().scorer(2, 16)}


@pytest.fixture(autouse=True)
def definitions():
    with ops.using("reference"):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (10, 2), (8, 1)])
def test_decode_is_softmax_attention(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Computed in fp32: what comes out of 16 bits is rounded once."""
    batch = make_batch(LENGTHS, heads=heads, kv_heads=kv_heads, dtype=dtype)
    out = ops.attend_decode(batch.q_BHD, *batch.pool, scale=SCALE)
    assert out.dtype == dtype
    ratio = heads // kv_heads
    for row in range(len(LENGTHS)):
        for head in range(heads):
            k_SD, v_SD = (t[row][:, head // ratio] for t in (batch.keys, batch.values))
            expected = plain_attention(batch.q_BHD[row, head, None], k_SD, v_SD, SCALE)[0]
            rounding = 2 * float((expected.to(dtype) - expected).abs().max())
            near = (1e-5, 1e-5) if dtype == torch.float32 else (rounding, 0.0)
            actual = out[row, head].double()
            torch.testing.assert_close(actual, expected, atol=near[0], rtol=near[1])


def test_a_sequence_does_not_depend_on_its_neighbours_and_may_be_empty() -> None:
    length = QUERY_BLOCK + 9
    q, k, v = (torch.randn(2 * length, heads, 8) for heads in (6, 2, 2))
    both = ops.attend_causal(q, k, v, torch.tensor([0, length, 2 * length]), scale=SCALE)
    edges = torch.tensor([0, length])
    alone = ops.attend_causal(q[length:], k[length:], v[length:], edges, scale=SCALE)
    assert torch.equal(both[length:], alone)
    for edges in (torch.tensor([0]), torch.tensor([0, 0])):
        none = ops.attend_causal(q[:0], k[:0], v[:0], edges, scale=1.0)
        assert none.shape == (0, 6, 8)


TOP_P = mean_flow("top-p", library.softmax_sum.score, mass=0.5)
FLOWS = [library.block_mean, library.running_average(0.5), library.fine_means(2), TOP_P]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_gradients_of_sparse_attention(flow: Flow) -> None:
    """Against finite differences; the choice of pages is constant around a generic point."""
    torch.manual_seed(0)
    random = partial(torch.randn, dtype=torch.float64, requires_grad=True)
    tensors = [random(17, heads, 2) for heads in (2, 1, 1)]
    bounds, dense = torch.tensor([0, 4, 17]), torch.tensor([1, 2])
    rule = Rule(flow=flow, first=0, last=1)
    options = {"page": 2, "first": 0, "last": 1, "mass": rule.mass, "scale": SCALE}
    options["scorer"] = rule.scorer(2, 2)

    def attend(budget: int, *qkv: torch.Tensor) -> torch.Tensor:
        return ops.attend_sparse(*qkv, bounds, dense, torch.full((17,), budget), **options)

    for budget in (0, 8):
        assert torch.autograd.gradcheck(partial(attend, budget), tensors, fast_mode=True)


def test_gradients_of_dense_and_of_sparse_with_a_whole_budget_are_equal() -> None:
    length = 2 * QUERY_BLOCK + 5
    tensors = [torch.randn(length, heads, 8) for heads in (6, 2, 2)]
    grads = []
    for sparse in (False, True):
        q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
        bounds = torch.tensor([0, length])
        if sparse:
            whole = torch.tensor([7]), torch.full((length,), length)
            out = ops.attend_sparse(q, k, v, bounds, *whole, **SPARSE)
        else:
            out = ops.attend_causal(q, k, v, bounds, scale=SCALE)
        out.square().sum().backward()
        grads.append((out.detach(), q.grad, k.grad, v.grad))
    for dense, sparse in zip(*grads, strict=True):
        assert torch.equal(dense, sparse)
