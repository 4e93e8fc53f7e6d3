"""Page and sampling kernels on a GPU: real sizes in bf16, and inside a CUDA graph."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from support import kernels
from support.kernels import DENSE, check_rows_of_every_size, check_select, mean_scores, same
from support.paging import slots_of

from sparrow import ops
from sparrow.ops.reference.sampling import uniforms

LENGTHS = [1, 15, 16, 17, 0, 1000, 2048, 3333]
CUDA = {"device": "cuda"}
batch_of = partial(kernels.batch_of, heads=32, kv_heads=8, head_size=128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prefill_and_decoding_store_the_same_pages(dtype: torch.dtype) -> None:
    """Token by token from strided views, or all at once; and the definition agrees."""
    lengths = [64, 33, 16, 5]
    batch = batch_of(lengths, dtype=dtype)
    fused = [torch.randn(length, 8, 384, **CUDA).to(dtype) for length in lengths]
    steps, whole, plain = (
        [torch.full_like(x, float("nan")) for x in batch.pool[:2]] for _ in range(3)
    )
    slots = [
        slots_of(row, torch.arange(length, **CUDA), 16)
        for row, length in zip(batch.table_BM, lengths, strict=True)
    ]
    for step in range(max(lengths)):
        last = [min(step, length - 1) for length in lengths]
        token = torch.stack([x[at] for x, at in zip(fused, last, strict=True)])
        place = torch.stack([x[at] for x, at in zip(slots, last, strict=True)])
        live = torch.tensor([step < length for length in lengths], **CUDA)
        place = torch.where(live, place, -1)
        ops.write_pages(*steps, token[..., :128], token[..., 128:256], place)
    tokens, places = torch.cat(fused), torch.cat(slots)
    for pools, choice in ((whole, "fastest"), (plain, "reference")):
        with ops.using(choice):
            ops.write_pages(*pools, tokens[..., :128], tokens[..., 128:256], places)
    for grown, filled, expected in zip(steps, whole, plain, strict=True):
        same(grown, filled)
        same(filled, expected)


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
        check_select(scores, LENGTHS, [budget] * len(LENGTHS), page=16)


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
        options = {"page": 16, "first": first, "last": last, "width": pages + 3}
        check_select(scores, lengths, budgets, **options)


def odd_masses(rows: int, pages: int) -> torch.Tensor:
    """Multiples of 1/64, of which sums are exact in any order, with ties and with what is none."""
    masses = torch.randint(-1, 40, (rows, 4, pages), **CUDA) / 64
    masses[1, :, ::3], masses[2, :, ::2], masses[3] = float("nan"), float("-inf"), 0.0
    return masses


@pytest.mark.parametrize("pages", [100, 512, 2048, 5000, 32768])
@pytest.mark.parametrize("mass", [0.3, 0.95, 1.0])
def test_shares_of_the_mass_and_budgets_of_heads(pages: int, mass: float) -> None:
    torch.manual_seed(pages)
    masses = odd_masses(10, pages)
    lengths = torch.tensor([pages * 16 - row for row in range(10)], **CUDA)
    lengths[4], lengths[5] = 0, 16 * (pages // 3) + 1
    budgets = torch.randint(0, pages * 16, (10, 4), **CUDA)
    budgets[6:] = DENSE
    for share in (None, mass):
        check_select(masses, lengths, budgets, page=16, width=pages + 3, mass=share)


@pytest.mark.parametrize("mass", [None, 0.9])
def test_rows_of_every_size_in_one_wide_table(mass: float | None) -> None:
    counts = [1, 3, 511, 512, 513, 2048, 2049, 8192, 8193, 30_000, 32_768]
    check_rows_of_every_size(counts, 32_768, mass, ties=256)


def check_draws(logits, seeds, counters, temperature) -> None:
    """Equal up to rounding: a token's stretch of the ladder holds the goal, almost."""
    draws = ops.sample(logits, seeds, counters, temperature)
    with ops.using("reference"):
        expected = ops.sample(logits, seeds, counters, temperature)
    same(draws.ok, expected.ok)
    torch.testing.assert_close(draws.entropies, expected.entropies, atol=1e-4, rtol=1e-4)
    scaled = logits.double() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    logp = scaled.log_softmax(1)
    ladder, goal = logp.exp().cumsum(1), uniforms(seeds, counters)
    top = ladder.gather(1, draws.tokens[:, None])[:, 0]
    mine = logp.gather(1, draws.tokens[:, None])[:, 0]
    sampled = draws.ok & (temperature > 0)
    assert ((goal <= top + 1e-5) & (goal >= top - mine.exp() - 1e-5))[sampled].all()
    error = (draws.logprobs.double() - mine)[sampled].abs()
    assert not len(error) or error.max() < 1e-4
    same(draws.tokens[~sampled], expected.tokens[~sampled])


@pytest.mark.parametrize("vocabulary", [1, 1000, 4097, 151_936, 262_147])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = 24
    logits = (torch.randn(rows, vocabulary, **CUDA) * 3).to(dtype)
    logits[3, -1], logits[4, vocabulary // 2], logits[5, 0] = float("nan"), float("inf"), -1e30
    temperature = torch.rand(rows, **CUDA) + 0.3
    temperature[6:10], temperature[10] = 1.0, 0.0
    seeds, counters = torch.arange(rows, **CUDA) * 977 - 5, torch.arange(rows, **CUDA)
    check_draws(logits, seeds, counters, temperature)
    many = ops.sample(logits, seeds, counters, temperature)
    for row in range(0, rows, 5):
        one = slice(row, row + 1)
        alone = ops.sample(logits[one], seeds[one], counters[one], temperature[one])
        for left, right in zip(alone, many, strict=True):
            assert left.tolist() == right[one].tolist()


def test_frequencies() -> None:
    rows, vocabulary = 20_000, 9000
    logits = torch.full((rows, vocabulary), -40.0, **CUDA)
    logits[:, [5, 4095, 4096, 8999]] = torch.tensor([0.1, 0.2, 0.3, 0.4], **CUDA).log()
    index, ones = torch.arange(rows, **CUDA), torch.ones(rows, **CUDA)
    draws = ops.sample(logits, index, index // 7, ones)
    frequency = torch.bincount(draws.tokens, minlength=vocabulary)[[5, 4095, 4096, 8999]] / rows
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], **CUDA)
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / rows).sqrt()).all()
