"""The attention kernels on a GPU: exactness, poisoned memory, equal bits, CUDA graphs."""

import pytest
import torch

pytest.importorskip("triton")
from support import kernels
from support.kernels import attend_chunks, batch_of, check_prefill, poisoned_memory, queries_of
from support.paging import attend, check_bits_of_decode, check_decode, check_verify, chosen

from sparrow.ops import PageLists
from sparrow.ops.kernels import attend_decode as decode

LENGTHS = [1, 15, 16, 17, 0, 1000, 5003]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LARGE = {"heads": 4, "kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16}
pytestmark = pytest.mark.usefixtures(poisoned_memory.__name__)


# Every pair of dtype and head size, every ratio of heads; all triples would be compiled for long.
SHAPES = [
    *((128, torch.bfloat16, 2), (128, torch.bfloat16, 5), (64, torch.bfloat16, 8)),
    *((128, torch.float16, 1), (64, torch.float16, 3), (128, torch.float32, 2)),
    *((64, torch.float32, 3), (80, torch.bfloat16, 5), (96, torch.bfloat16, 4)),
    *((112, torch.float16, 7), (160, torch.bfloat16, 64)),
]
CHUNKS = [LENGTHS, [1, 1, 5, 0, 0, 300, 129], [0, 0, 0, 1, 0, 0, 2000]]


@pytest.mark.parametrize(("head_size", "dtype", "ratio"), SHAPES)
def test_decode_and_prefill(head_size: int, dtype: torch.dtype, ratio: int) -> None:
    batch = batch_of(LENGTHS, heads=2 * ratio, kv_heads=2, head_size=head_size, dtype=dtype)
    for lists in (None, chosen(batch, 64), chosen(batch, 800)):
        check_decode(decode, batch, lists)
    for counts in CHUNKS:
        check_prefill(batch, counts)


@pytest.mark.parametrize("queries", [2, 9, 16])
@pytest.mark.parametrize(("head_size", "dtype", "ratio"), SHAPES[:7])
def test_verify(head_size: int, dtype: torch.dtype, ratio: int, queries: int) -> None:
    lengths = [20, 31, 32, 33, 0, 1000, 5003]
    batch = batch_of(lengths, heads=2 * ratio, kv_heads=2, head_size=head_size, dtype=dtype)
    check_verify(decode, batch, queries, [queries, queries, 2, 1, 0, queries - 1, queries])


OTHER_SHAPES = [
    *((32, 16, torch.float16), (32, 16, torch.float32), (256, 16, torch.bfloat16)),
    *((256, 16, torch.float32), (128, 1, torch.bfloat16), (64, 64, torch.float16)),
    *((64, 256, torch.bfloat16), (40, 16, torch.bfloat16), (240, 16, torch.bfloat16)),
    (80, 16, torch.float32),
]


@pytest.mark.parametrize(("head_size", "page", "dtype"), OTHER_SHAPES)
def test_other_shapes(head_size: int, page: int, dtype: torch.dtype) -> None:
    batch = batch_of([700, 3], head_size=head_size, page=page, dtype=dtype)
    check_decode(decode, batch)
    check_prefill(batch, [300, 3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_layouts_and_other_rows_change_no_bit(dtype: torch.dtype) -> None:
    for lengths in (LENGTHS, [40, 100], [30_000]):
        check_bits_of_decode(decode, batch_of(lengths, **LARGE | {"dtype": dtype}), 256)
    kernels.check_bits_of_prefill(batch_of(LENGTHS, **LARGE | {"dtype": dtype}), CHUNKS[1])


@pytest.mark.parametrize("kept", [1, 8, 9, 64, 500])
def test_few_pages_of_a_wide_table(kept: int) -> None:
    """One long row: its kept pages are shared by many programs, whatever their number."""
    batch = batch_of([60_000], **LARGE)
    lists = chosen(batch, max(3, kept) * 16)
    check_decode(decode, batch, PageLists(lists.pages, lists.counts.clamp(max=kept)))


@pytest.mark.parametrize("listed", [False, True])
def test_a_graph_replays_what_eager_gives(listed: bool) -> None:
    batch = batch_of(LENGTHS, **LARGE)
    lists = chosen(batch, 256) if listed else None
    attend(decode, batch, lists)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(decode, batch, lists)
    for shift in (0, 3, 7):
        batch.q_BHD.copy_(batch.q_BHD.roll(1, 1))
        batch.lengths_B.copy_((batch.lengths_B - shift).clamp(min=0))
        if lists is not None:
            fewer = chosen(batch, 256 - 16 * shift)
            lists.pages.copy_(fewer.pages)
            lists.counts.copy_(fewer.counts)
        graph.replay()
        assert torch.equal(out, attend(decode, batch, lists))


def test_prefill_waits_for_nothing() -> None:
    """A capture fails where the host waits."""
    batch = batch_of(LENGTHS, **LARGE)
    q, bounds = queries_of(batch, [1, 15, 4, 1, 0, 679, 2000])
    together = attend_chunks(batch, q, bounds)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = attend_chunks(batch, q, bounds)
    graph.replay()
    assert torch.equal(again, together)


@pytest.mark.parametrize(("head_size", "dtype", "ratio"), SHAPES[:-1])
def test_kept_pages_with_gradients(head_size: int, dtype: torch.dtype, ratio: int) -> None:
    sizes = {"heads": 2 * ratio, "kv_heads": 2, "head_size": head_size, "dtype": dtype}
    kernels.check_kept([1, 1029, 256, 700, 17], **sizes)
    kernels.check_kept([1500, 3], page=64, share=0.1, **sizes)
