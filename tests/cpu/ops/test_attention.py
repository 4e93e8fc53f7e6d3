"""The definitions of attention against softmax written out in double precision."""

import pytest
import torch
from support.paging import make_batch, mean_scores, plain_attention

from sparrow import ops
from sparrow.ops.reference.attention import QUERY_BLOCK
from sparrow.sparse.rule import Rule

SCALE = 0.3
LENGTHS = [1, 15, 16, 17, 100]
SPARSE = {"page": 16, "scale": SCALE, "scorer": Rule().scorer(2, 16)}


@pytest.fixture(autouse=True)
def definitions():
    with ops.using("reference"):
        yield


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (10, 2), (8, 1)])
def test_decode_is_softmax_attention(heads: int, kv_heads: int) -> None:
    batch = make_batch(LENGTHS, heads=heads, kv_heads=kv_heads)
    out = ops.attend_decode(batch.q_BHD, *batch.pool, scale=SCALE)
    ratio = heads // kv_heads
    for row in range(len(LENGTHS)):
        for head in range(heads):
            k_SD, v_SD = (t[row][:, head // ratio] for t in (batch.keys, batch.values))
            expected = plain_attention(batch.q_BHD[row, head, None], k_SD, v_SD, SCALE)[0]
            torch.testing.assert_close(out[row, head].double(), expected, atol=1e-5, rtol=1e-5)


def test_paged_prefill_in_chunks_is_causal_attention() -> None:
    lengths = [40, 3, 17]
    batch = make_batch(lengths)
    queries = [torch.randn(length, 6, 8) for length in lengths]
    bounds = torch.tensor([0, 40, 43, 60])
    packed = ops.attend_causal(
        torch.cat(queries), torch.cat(batch.keys), torch.cat(batch.values), bounds, scale=SCALE
    )
    whole = ops.attend_causal_paged(torch.cat(queries), *batch.pool, bounds, scale=SCALE)
    assert torch.equal(whole, packed)
    last = ops.attend_causal_paged(
        torch.cat([query[-3:] for query in queries]),
        *batch.pool,
        torch.tensor([0, 3, 6, 9]),
        scale=SCALE,
    )
    expected = torch.cat([part[-3:] for part in packed.split(lengths)])
    torch.testing.assert_close(last, expected, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("budget", [0, 12])
def test_gradients_of_sparse_attention(budget: int) -> None:
    """Against finite differences; the choice of pages is constant around a generic point."""
    torch.manual_seed(budget)
    shapes = ((17, 2, 2), (17, 1, 2), (17, 1, 2))
    tensors = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]
    bounds, dense, budgets = (
        torch.tensor([0, 4, 17]),
        torch.tensor([1, 2]),
        torch.full((17,), budget),
    )

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        options = {"page": 2, "scale": SCALE, "scorer": Rule().scorer(2, 2)}
        return ops.attend_sparse(*tensors, bounds, dense, budgets, **options)

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)


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


def test_more_queries_than_tokens_are_refused() -> None:
    batch, edges = make_batch([20]), torch.tensor([0, 21])
    with pytest.raises(ValueError, match="row 0"):
        ops.attend_causal_paged(torch.randn(21, 6, 8), *batch.pool, edges, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    batch = make_batch([50], dtype=dtype)
    out = ops.attend_decode(batch.q_BHD, *batch.pool, scale=SCALE)
    assert out.dtype == dtype
    for head in range(6):
        k_SD, v_SD = batch.keys[0][:, head // 3], batch.values[0][:, head // 3]
        expected = plain_attention(batch.q_BHD[0, head, None], k_SD, v_SD, SCALE)[0]
        rounding = (expected.to(dtype) - expected).abs().max()
        assert (out[0, head].double() - expected).abs().max() <= 2 * rounding


@pytest.mark.slow
def test_a_long_sequence_sparse_at_once_is_decode_token_by_token() -> None:
    """3000 tokens over many blocks of queries and a budget that grows with the length."""
    length, page = 3000, 16
    batch = make_batch([length], heads=6, kv_heads=2, head_size=16)
    q_SHD = torch.randn(length, 6, 16)
    budgets = 64 + torch.arange(length) // 8
    edges = torch.tensor([0, length])
    tokens = (q_SHD, batch.keys[0], batch.values[0], edges)
    many = ops.attend_sparse(*tokens, torch.tensor([100]), budgets, **SPARSE)
    table = batch.table_BM
    for position in range(100, length, 7):
        q, lengths = q_SHD[position, None], torch.tensor([position + 1])
        scores = mean_scores(batch._replace(q_BHD=q, lengths_B=lengths))
        lists = ops.select_pages(scores, lengths, budgets[position, None], page=page)
        one = ops.attend_decode(q, batch.k_NGPD, batch.v_NGPD, table, lengths, lists, scale=SCALE)
        torch.testing.assert_close(many[position], one[0], atol=1e-5, rtol=1e-4)
