"""The attention kernels in Triton's interpreter against their definitions.

Where there is a GPU they run on it. What both tiers check is in tests/support/kernels.py.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from support import kernels, paging
from support.kernels import DEVICE, attend_chunks, batch_of, check_prefill, poisoned_memory
from support.paging import attend, check_bits_of_decode, check_decode, check_verify, chosen

from sparrow.ops import PageLists
from sparrow.ops.kernels import attend_decode as decode
from sparrow.ops.kernels import attend_kept
from sparrow.ops.kernels import attend_prefill as prefill

LENGTHS = [1, 16, 17, 0, 70]
PLAN = decode.plan
pytestmark = pytest.mark.usefixtures(poisoned_memory.__name__)


@pytest.fixture(autouse=True)
def _splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut into three splits at most, unless a test says otherwise."""
    cut_into(3, monkeypatch)


def cut_into(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many splits, each of 32 tokens at least."""
    cut = decode.DecodePlan(tile=32, splits=splits, least=32, warps=4, stages=2)
    monkeypatch.setattr(decode, "plan", lambda *_: cut)


@pytest.mark.parametrize("splits", [1, 3, 64])
def test_decode(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and over lists; heads of odd sizes, whose neighbours must not come in."""
    cut_into(splits, monkeypatch)
    for heads, dtype in ((2, torch.float32), (6, torch.float16)):
        sizes = {"heads": heads, "kv_heads": 2, "head_size": 32}
        check_decode(decode, batch_of(LENGTHS, **sizes, dtype=dtype))
    for head_size in (32, 48):
        batch = batch_of(LENGTHS, heads=4, head_size=head_size)
        check_decode(decode, batch, chosen(batch, 48))
        check_decode(decode, batch, chosen(batch, 64, width=5))


@pytest.mark.parametrize("splits", [1, 3])
def test_verify(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries at the edges of pages and splits, rows of fewer drafts, and a row of none."""
    cut_into(splits, monkeypatch)
    for heads, dtype in ((4, torch.float32), (6, torch.float16)):
        batch = batch_of([9, 33, 17, 0, 100], heads=heads, kv_heads=2, head_size=32, dtype=dtype)
        check_verify(decode, batch, 5, [5, 5, 3, 0, 1])
        check_verify(decode, batch, 9, [9, 2, 9, 0, 9])
    check_verify(decode, batch_of([40], heads=1, kv_heads=1, head_size=48), 17, [17])


SHAPES = [(64, 16), (128, 32), (32, 4), (32, 64), (40, 16), (80, 16), (96, 4), (32, 256)]


def test_decode_of_other_shapes_and_many_heads_of_a_group() -> None:
    for head_size, page in SHAPES:
        check_decode(decode, batch_of([70, 3], heads=2, kv_heads=1, head_size=head_size, page=page))
    for ratio in (17, 64):
        check_decode(decode, batch_of([20, 40], heads=ratio, kv_heads=1, head_size=32))


def test_kept_pages_are_shared_by_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there may be, in whole tiles, however wide the table is."""
    partials: list[Tensor] = []
    make = decode._partials
    monkeypatch.setattr(decode, "_partials", lambda *args: partials.extend(make(*args)) or partials)
    batch = batch_of([24 * 16], heads=1, kv_heads=1, head_size=32)
    pages = torch.arange(24, device=DEVICE).view(1, 1, 24)
    uses = [(1, 64, 1), (3, 3, 2), (6, 3, 3), (7, 3, 2), (20, 3, 3), (20, 64, 10)]
    for kept, splits, used in uses:
        cut_into(splits, monkeypatch)
        partials.clear()
        check_decode(decode, batch, PageLists(pages, torch.full((1, 1), kept, device=DEVICE)))
        _, top_BHX, _ = partials
        assert top_BHX.isfinite().sum() == used


def test_lists_layouts_and_other_rows_change_no_bit() -> None:
    check_bits_of_decode(decode, batch_of(LENGTHS, head_size=32), 48)


def test_pages_off_the_list_are_never_read() -> None:
    """Unused slots of the pool hold NaN already; here the pages that no head keeps do, too."""
    batch = batch_of([150], heads=2, head_size=32)
    lists = chosen(batch, 48)
    expected = attend(decode, batch, lists)
    kept = lists.pages[0].unique().long()
    lost = torch.ones(len(batch.k_NGPD), dtype=torch.bool, device=DEVICE)
    lost[batch.table_BM[0, kept[kept >= 0]]] = False
    batch.k_NGPD[lost], batch.v_NGPD[lost] = torch.nan, torch.nan
    assert torch.equal(attend(decode, batch, lists), expected)
    assert expected.isfinite().all()


def test_rows_without_pages_give_zeros_and_nan_stays_in_its_heads() -> None:
    paging.check_rows_without_pages_and_nan(decode, DEVICE)


def test_plans_cut_by_whole_tiles_and_pages() -> None:
    numbers = (1, 4, 32, 64, 256), (16, 128, 2048, 32768, 131072), (32, 80, 128, 256), (2, 4)
    for rows, tokens, size, itemsize in product(*numbers):
        cut = PLAN(rows, 8, tokens, size, itemsize)
        assert cut.tile.bit_count() == cut.least.bit_count() == 1
        assert cut.least % cut.tile == 0
        assert 1 <= cut.splits <= min(decode.MOST_SPLITS, max(1, tokens // cut.least))
        assert cut.splits * rows * 8 <= decode.MOST_PROGRAMS
    known = [(1, 2**18, 64), (1, 4096, 32), (16, 32768, 16), (32, 32768, 16), (32, 2048, 1)]
    for rows, tokens, splits in (*known, (60, 4096, 2)):
        assert PLAN(rows, 8, tokens, 128, 2).splits == splits


@pytest.mark.parametrize(("ratio", "dtype"), [(1, torch.float16), (3, torch.float32)])
def test_prefill(ratio: int, dtype: torch.dtype) -> None:
    batch = batch_of(LENGTHS, heads=2 * ratio, kv_heads=2, head_size=32, dtype=dtype)
    for counts in (LENGTHS, [1, 15, 2, 0, 50], [0, 3, 0, 0, 33]):
        check_prefill(batch, counts)
    for head_size in (40, 80):
        odd = batch_of([40, 3], heads=2, kv_heads=1, head_size=head_size)
        check_prefill(odd, [35, 3])
    assert attend_chunks(batch, *kernels.queries_of(batch, [0] * 5)).shape == (0, 2 * ratio, 32)
    kernels.check_bits_of_prefill(batch, [1, 15, 2, 0, 50])


def test_what_is_left_to_the_definition() -> None:
    q, k = torch.zeros(1, 2, 64), torch.zeros(3, 2, 16, 64)
    for module, op in ((decode, "attend_decode"), (prefill, "attend_causal_paged")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert module.supports(op, q.to(dtype), k.to(dtype), k.to(dtype))
        assert module.supports(op, q[..., :48], *[k[..., :48].contiguous()] * 2)
        for queries, pool in (
            (q.double(), k.double()),
            (q, k.half()),
            (q, k.transpose(0, 2)),
            (q[..., :44], k[..., :44].contiguous()),
            (q[..., :24], k[..., :24].contiguous()),
            (q, k[:, :, :12].contiguous()),
        ):
            assert not module.supports(op, queries, pool, pool)


@pytest.mark.parametrize(
    "sizes",
    [
        {"lengths": [70, 33, 1]},
        {"lengths": [5, 150], "page": 4, "heads": 6, "head_size": 48},
        {"lengths": [64, 40], "page": 64, "share": 1.0, "dtype": torch.float16},
        {"lengths": [600], "page": 8, "heads": 1, "kv_heads": 1},  # more pages than a word has
    ],
)
def test_kept_pages_with_gradients(sizes: dict) -> None:
    kernels.check_kept(sizes.pop("lengths"), **sizes)


def test_places_beyond_32_bits_are_left_to_the_definition() -> None:
    near, far = (
        torch.empty_strided((40, 2, 32), (stride, 32, 1), device="meta") for stride in (64, 2**26)
    )
    assert attend_kept.supports("attend_kept", near, near, near, page=16)
    assert not attend_kept.supports("attend_kept", near, near, far, page=16)
