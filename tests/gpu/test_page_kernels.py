"""Page and sampling kernels on a GPU: real sizes in bf16, and inside a CUDA graph."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from support import kernels
from support.kernels import check_rows_of_every_size, check_shares
from support.paging import DENSE, check_select, check_selections, check_write, mean_scores, same
from support.rowstates import check_sampler, rows_to_draw_from

from sparrow import ops
from sparrow.ops.kernels import pages as page_kernels
from sparrow.ops.kernels import sampling

LENGTHS = [1, 15, 16, 17, 0, 1000, 2048, 3333]
CUDA = {"device": "cuda"}
batch_of = partial(kernels.batch_of, heads=32, kv_heads=8, head_size=128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tokens_land_where_the_definition_puts_them(dtype: torch.dtype) -> None:
    check_write(page_kernels, dtype, 16, 128, kv_heads=8, device="cuda")


def test_places_beyond_two_billion_numbers() -> None:
    pages = 2**31 // (8 * 16 * 128) + 40
    pool = torch.zeros(pages, 8, 16, 128, dtype=torch.bfloat16, **CUDA)
    token = torch.randn(16, 8, 128, **CUDA).bfloat16()
    slots = torch.arange(16, **CUDA) + (pages - 1) * 16
    ops.write_pages(pool, pool, token, token, slots)
    same(pool[-1], token.transpose(0, 1))
    assert not pool[:-1].any()


def test_choices_by_scores() -> None:
    batch = batch_of(LENGTHS, dtype=torch.bfloat16)
    wide = torch.full((len(LENGTHS), 250), -1, **CUDA)
    wide[:, : batch.table_BM.shape[1]] = batch.table_BM
    scores = mean_scores(batch._replace(table_BM=wide))
    for budget in (0, 48, 512, 1000, 2048, DENSE):
        check_select(page_kernels, scores, LENGTHS, [budget] * len(LENGTHS), page=16)
    check_selections(page_kernels, rows=60, width=41, device="cuda")


@pytest.mark.parametrize("pages", [100, 256, 1000, 2048, 5000, 8192, 16384, 32768])
@pytest.mark.parametrize("ties", [False, True])
def test_choices_among_many(pages: int, ties: bool) -> None:
    torch.manual_seed(pages)
    scores = torch.randn(12, 4, pages, **CUDA)
    if ties:
        scores = scores.round()
    scores[1, :, ::3], scores[2, :, ::2] = float("nan"), float("-inf")
    scores[3, :, 5::7], scores[4], scores[5] = float("inf"), 0.0, -0.0
    scores[5, :, ::5] = 0.0
    lengths = torch.tensor([pages * 16 - row for row in range(12)], **CUDA)
    lengths[6], lengths[7] = 0, 16 * (pages // 3) + 1
    budgets = torch.tensor([4096, 512, 700, 512, 640, 640, 512, 600, 48, 0, 10**6, 1024], **CUDA)
    for first, last in ((1, 2), (0, 1), (4, 8)):
        options = {"page": 16, "first": first, "last": last}
        check_select(page_kernels, scores, lengths, budgets, **options)


@pytest.mark.parametrize("pages", [100, 512, 2048, 5000, 32768])
@pytest.mark.parametrize("mass", [0.3, 0.95, 1.0])
def test_shares_of_the_mass_and_budgets_of_heads(pages: int, mass: float) -> None:
    check_shares(pages, mass, heads=4, page=16)


@pytest.mark.parametrize("mass", [None, 0.9])
def test_rows_of_every_size_in_one_wide_table(mass: float | None) -> None:
    counts = [1, 3, 511, 512, 513, 2048, 2049, 8192, 8193, 30_000, 32_768]
    check_rows_of_every_size(counts, 32_768, mass, ties=256)


@pytest.mark.parametrize("vocabulary", [1, 1000, 4097, 151_936, 262_147])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws(vocabulary: int, dtype: torch.dtype) -> None:
    logits, *others = (part.cuda() for part in rows_to_draw_from(vocabulary, 3.0, copies=2))
    check_sampler(sampling, [logits.to(dtype), *others], near=1e-4, rtol=0.0)


@pytest.mark.parametrize(("rows", "width"), [(3000, 256), (40000, 33), (300, 4096)])
def test_lists_as_bits(rows: int, width: int) -> None:
    kernels.check_page_bits(rows, width, kv_heads=8)
