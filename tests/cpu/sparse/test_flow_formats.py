"""Formats of fields: what they cost, and how far off what is read back may be."""

import pytest
import torch
from torch import Tensor

from sparrow.sparse.flows import D, FlowError, P, as_keys, bf16, fp8, fp16, fp32, int4
from sparrow.sparse.flows.formats import Format, PageField

KEYS = torch.bfloat16
SHAPE, SIZES = (3, 6), {"P": 16, "D": 8}
PLAIN = {fp32: torch.float32, fp16: torch.float16, bf16: torch.bfloat16, as_keys: KEYS}
SCALED = {fp8: 28, int4: 7}


def field_of(form: Format) -> PageField:
    return PageField(name="m", form=form, shape=form.resolve(SIZES))


def round_trip(form: Format, x: Tensor) -> Tensor:
    field = field_of(form)
    blocks = field.encode(x, KEYS)
    for block in field.storage(KEYS):
        stored = blocks[block.name]
        assert stored.dtype == block.dtype
        assert stored.shape[stored.ndim - len(block.shape) :] == block.shape
    return field.decode(blocks)


def drawn(scale: float = 1.0) -> Tensor:
    return scale * torch.randn((50, *SHAPE), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
def test_rounding(scale: float) -> None:
    """Plain formats round as torch does. A step of int4 is a seventh of the greatest number of its
    vector, fp8 has three bits of mantissa; both have a scale in fp16.
    """
    x = drawn(scale)
    for form, dtype in PLAIN.items():
        assert torch.equal(round_trip(form(*SHAPE), x), x.to(dtype).float())
    if scale < 1e-3:
        return
    most = x.abs().amax(-1, keepdim=True)
    error = (round_trip(int4(*SHAPE), x) - x).abs()
    assert (error <= most / 7 * 0.5 + most * 2**-10).all()
    assert error.max() > most.min() / 7 * 0.3  # and no better than that
    error = (round_trip(fp8(*SHAPE), x) - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, most / 448 * 2**-9) + most * 2**-10).all()


def test_int4_by_hand() -> None:
    field = field_of(int4(1, 6))
    blocks = field.encode(torch.tensor([[7.0, -7.0, 3.4, -3.6, 0.4, 6.0]]), KEYS)
    assert blocks["m.scale"].tolist() == [1.0]
    assert blocks["m"].tolist() == [[15 | (4 << 4), 1 | (8 << 4), 11 | (14 << 4)]]
    assert field.decode(blocks).tolist() == [[7, -7, 3, -4, 0, 6]]


def test_constant_vectors_and_numbers_beyond_the_scale() -> None:
    """Where all numbers of a vector are its greatest, only the scale is rounded. The scale ends at
    fp16's greatest: what is larger is cut, keeps its sign, and is never NaN.
    """
    x = torch.tensor([0.0, 1.0, -3.0, 0.1, 12345.0, 0.0]).reshape(2, 3, 1).expand(2, *SHAPE)
    for form in (*PLAIN, *SCALED):
        back = round_trip(form(*SHAPE), x)
        torch.testing.assert_close(back, x, rtol=2**-8, atol=0)
        assert not back[x == 0].any()
    large = torch.tensor([1e30, -1e30, 1e9, -1e9, 0.0, 1.0]).expand(1, *SHAPE)
    for form, steps in SCALED.items():
        back = round_trip(form(*SHAPE), large)
        assert back.isfinite().all()
        assert back[0, 0].tolist()[:2] == [65504.0 * steps, -65504.0 * steps]
        assert back[0, 0, 4] == 0
        assert not round_trip(form(*SHAPE), drawn(1e-12)).any()  # too small for the scale


def test_blocks_and_bytes_of_a_field() -> None:
    sizes = {
        fp32(P, D): 16 * 8 * 4,
        fp16(D): 16,
        bf16(): 2,
        as_keys(P // 4, D): 4 * 8 * 2,
        fp8(P // 4, D): 4 * 8 + 4 * 2,
        int4(P // 4, D): 4 * 4 + 4 * 2,
        int4(2 * D): 8 + 2,
    }
    for form, size in sizes.items():
        assert field_of(form).bytes(KEYS) == size
    packed = [(b.name, b.shape, b.dtype) for b in field_of(int4(2, 6)).storage(KEYS)]
    assert packed == [("m", (2, 3), torch.uint8), ("m.scale", (2,), torch.float16)]
    (plain,) = field_of(as_keys(6)).storage(torch.float32)
    assert (plain.name, plain.shape, plain.dtype) == ("m", (6,), torch.float32)


def test_sizes_read_as_they_are_written() -> None:
    written = ["D", "P // 4", "2 * D", "2 * D // 4"]
    assert [str(size) for size in (D, P // 4, 2 * D, D * 2 // 4)] == written
    assert (D * 3 // 4).resolve({"D": 8}) == 6
    with pytest.raises(FlowError, match="P // 32"):
        (P // 32).resolve({"P": 16})
