"""Flash attention for training on a GPU: the values and gradients of the definition."""

from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sparrow import ops
from sparrow.models.attention import Packed
from sparrow.models.decoder import Attention
from sparrow.schema.episode import Document
from sparrow.training.packing import Flash, pack, packed_attention

SCALE = 0.125
PARTS = ("out", "q", "k", "v")
LENGTHS = {
    "odd": [1, 17, 333, 2, 129],
    "ones": [1, 1, 1],
    "one": [1000],
    "blocks": [128, 256, 1, 64],
}
SHAPES = [(4, 2, 64), (4, 4, 64), (6, 1, 32), (8, 2, 128)]


class Case(NamedTuple):
    """Queries, keys, values and the gradient that comes back to their attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    back: Tensor
    bounds: Tensor
    longest: int


def draw(lengths: list[int], heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> Case:
    torch.manual_seed(sum(lengths))
    tokens = sum(lengths)
    q, k, v, back = (
        torch.randn(tokens, count, size, device="cuda").to(dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    return Case(q, k, v, back, bounds, max(lengths))


def run(attention: Attention, case: Case, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of q, k, v, in double precision."""
    leaves = [tensor.to(dtype).detach().requires_grad_() for tensor in (case.q, case.k, case.v)]
    out = attention(0, *leaves, scale=SCALE)
    out.backward(case.back.to(out.dtype))
    grads = [leaf.grad for leaf in leaves]
    return [out.detach().double(), *(grad.double() for grad in grads if grad is not None)]


def torch_attention(case: Case) -> Attention:
    """Torch's own, document by document, products in the dtype of what comes in."""

    def attend(layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float) -> Tensor:
        group = q_THD.shape[1] // k_TGD.shape[1]
        k_THD, v_THD = (x.repeat_interleave(group, dim=1) for x in (k_TGD, v_TGD))
        edges = case.bounds.tolist()
        outputs = []
        for start, stop in pairwise(edges):
            q, k, v = (x[start:stop].transpose(0, 1) for x in (q_THD, k_THD, v_THD))
            score = q @ k.transpose(1, 2) * scale
            ahead = torch.ones_like(score, dtype=torch.bool).triu(1)
            weight = score.masked_fill(ahead, float("-inf")).softmax(2)
            outputs.append((weight @ v).transpose(0, 1))
        return torch.cat(outputs)

    return attend


def flash(case: Case, dtype: torch.dtype) -> Flash:
    return Flash(bounds=case.bounds, longest=case.longest, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_values_and_gradients_are_as_exact_as_plain_torch(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The error against float64 is at most twice that of plain torch in the same dtype."""
    case = draw(LENGTHS[name], *shape, dtype)
    with ops.using("reference"):
        exact = run(Packed(bounds=case.bounds), case, torch.float64)
    found = run(flash(case, dtype), case, dtype)
    plain = run(torch_attention(case), case, dtype)
    # What is exactly 0 for the one (the gradient of a lone token's query) may be rounding for the
    # other: as much as values of order 1 round to.
    rounding = torch.finfo(dtype).eps
    for part, near, far, wanted in zip(PARTS, found, plain, exact, strict=True):
        error, allowed = (near - wanted).abs(), (far - wanted).abs()
        assert near.isfinite().all(), part
        assert error.max() <= 2 * allowed.max() + rounding, part
        assert error.norm() <= 2 * allowed.norm() + rounding, part


def test_float32_leaves_get_float32_gradients() -> None:
    """As in training: weights are float32, products are not."""
    case = draw(LENGTHS["odd"], 4, 2, 64, torch.bfloat16)
    leaves = [x.float().requires_grad_() for x in (case.q, case.k, case.v)]
    out = flash(case, torch.bfloat16)(0, *leaves, scale=SCALE)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        assert leaf.grad.isfinite().all()


def test_a_document_sees_itself_alone() -> None:
    """Bit for bit: what stands beside it changes nothing."""
    case = draw([40, 300, 7], 4, 2, 64, torch.bfloat16)
    other = [x.clone() for x in (case.q, case.k, case.v)]
    for tensor in other:
        tensor[:40] = torch.randn_like(tensor[:40])
        tensor[340:] = torch.randn_like(tensor[340:])
    attention = flash(case, torch.bfloat16)
    first = attention(0, case.q, case.k, case.v, scale=SCALE)
    second = attention(0, *other, scale=SCALE)
    assert torch.equal(first[40:340], second[40:340])
    assert not torch.equal(first[:40], second[:40])


def test_which_attention_a_pack_gets() -> None:
    documents = [Document(ids=[1, 2, 3], prompt=1), Document(ids=[4, 5], prompt=1)]
    here, there = pack(documents), pack(documents).to(torch.device("cuda"))
    assert isinstance(packed_attention(there, torch.bfloat16), Flash)
    assert isinstance(packed_attention(there, torch.float32), Packed)
    assert isinstance(packed_attention(here, torch.bfloat16), Packed)
