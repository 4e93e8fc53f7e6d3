"""Formats of fields: what they cost, and how far off what is read back may be."""

import pytest
import torch
from torch import Tensor

from sparrow.sparse.flows import formats
from sparrow.sparse.flows.formats import D, Format, P, as_keys, bf16, fp8, fp16, fp32, int4
from sparrow.sparse.flows.nodes import FlowError

KEYS = torch.bfloat16
SHAPE = (3, 6)


def round_trip(form: Format, x: Tensor) -> Tensor:
    blocks = formats.encode(form, x, KEYS)
    declared = formats.storage("field", form, form.resolve({"P": 16, "D": 8}), KEYS)
    for block, (_, shape, dtype) in zip(blocks, declared, strict=True):
        assert block.dtype == dtype
        assert block.shape[block.ndim - len(shape) :] == shape
    return formats.decode(form, blocks)


def drawn(scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn((50, *SHAPE), generator=generator)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(fp32, torch.float32), (fp16, torch.float16), (bf16, torch.bfloat16), (as_keys, KEYS)],
)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_plain_formats_round_as_torch_does(form, dtype: torch.dtype, scale: float) -> None:
    x = drawn(scale)
    assert torch.equal(round_trip(form(*SHAPE), x), x.to(dtype).float())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_int4_is_off_by_half_a_step(scale: float) -> None:
    """A step is a seventh of the greatest number of the vector; its scale is rounded to fp16."""
    x = drawn(scale)
    most = x.abs().amax(-1, keepdim=True)
    error = (round_trip(int4(*SHAPE), x) - x).abs()
    assert (error <= most / 7 * 0.5 + most * 2**-10).all()
    assert error.max() > most.min() / 7 * 0.3  # and no better than that


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_fp8_is_off_by_a_sixteenth(scale: float) -> None:
    """Three bits of mantissa; numbers far below the vector's greatest are off by its scale."""
    x = drawn(scale)
    most = x.abs().amax(-1, keepdim=True)
    error = (round_trip(fp8(*SHAPE), x) - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, most / 448 * 2**-9) + most * 2**-10).all()


def test_int4_by_hand() -> None:
    x = torch.tensor([[7.0, -7.0, 3.4, -3.6, 0.4, 6.0]])
    low, scale = formats.encode(int4(1, 6), x, KEYS)
    assert scale.tolist() == [1.0]
    assert low.tolist() == [[15 | (4 << 4), 1 | (8 << 4), 11 | (14 << 4)]]
    assert formats.decode(int4(1, 6), [low, scale]).tolist() == [[7, -7, 3, -4, 0, 6]]


@pytest.mark.parametrize("form", [fp32, fp16, bf16, as_keys, fp8, int4])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 0.1, 12345.0])
def test_constant_vectors(form, value: float) -> None:
    """All numbers of a vector are its greatest, so only the scale is rounded."""
    x = torch.full((4, *SHAPE), value)
    torch.testing.assert_close(round_trip(form(*SHAPE), x), x, rtol=2**-8, atol=0)
    if value == 0:
        assert not round_trip(form(*SHAPE), x).any()


@pytest.mark.parametrize("form", [fp8, int4])
def test_vectors_have_scales_of_their_own(form) -> None:
    x = torch.stack([torch.ones(6), torch.full((6,), 0.1), torch.zeros(6)])
    torch.testing.assert_close(round_trip(form(*SHAPE), x[None])[0], x, rtol=2**-8, atol=0)


@pytest.mark.parametrize("form", [fp8, int4])
def test_numbers_beyond_the_scale_stay_finite_and_keep_their_sign(form) -> None:
    """The scale ends at fp16's greatest: what is larger is cut, and never NaN."""
    x = torch.tensor([1e30, -1e30, 1e9, -1e9, 0.0, 1.0]).expand(1, *SHAPE)
    back = round_trip(form(*SHAPE), x)
    assert back.isfinite().all()
    most = 65504.0 * (28 if form is fp8 else 7)
    assert back[0, 0].tolist()[:2] == [most, -most]
    assert back[0, 0, 4] == 0


@pytest.mark.parametrize("form", [fp8, int4])
def test_numbers_too_small_for_the_scale_are_zeros(form) -> None:
    assert not round_trip(form(*SHAPE), drawn(1e-12)).any()


@pytest.mark.parametrize(
    ("form", "size"),
    [
        (fp32(P, D), 16 * 8 * 4),
        (fp16(D), 16),
        (bf16(), 2),
        (as_keys(P // 4, D), 4 * 8 * 2),
        (fp8(P // 4, D), 4 * 8 + 4 * 2),
        (int4(P // 4, D), 4 * 4 + 4 * 2),
        (int4(2 * D), 8 + 2),
    ],
)
def test_bytes(form: Format, size: int) -> None:
    sizes = {"P": 16, "D": 8}
    assert formats.page_bytes(form, form.resolve(sizes), KEYS) == size


def test_blocks_of_a_field() -> None:
    assert formats.storage("m", int4(2, 6), (2, 6), KEYS) == [
        ("m", (2, 3), torch.uint8),
        ("m.scale", (2,), torch.float16),
    ]
    assert formats.storage("m", as_keys(6), (6,), torch.float32) == [("m", (6,), torch.float32)]


def test_sizes_read_as_they_are_written() -> None:
    assert [str(size) for size in (D, P // 4, 2 * D, D * 2 // 4)] == [
        "D",
        "P // 4",
        "2 * D",
        "2 * D // 4",
    ]
    assert (D * 3 // 4).resolve({"D": 8}) == 6
    with pytest.raises(FlowError, match="P // 32 is not whole where P is 16"):
        (P // 32).resolve({"P": 16})
