"""Page, sampling and row kernels against their definitions, in Triton's interpreter.

Where there is a GPU they run on it. What both tiers check is in tests/support/kernels.py.
"""

from itertools import product

import pytest
import torch
from support.paging import DENSE, check_select, check_selections, check_write, mean_scores, same
from support.rowstates import check_sampler, check_steps, rows_to_draw_from

pytest.importorskip("triton")
import triton
import triton.language as tl
from support.kernels import (
    DEVICE,
    batch_of,
    check_page_bits,
    check_rows_of_every_size,
    check_shares,
)

from sparrow.ops.kernels import pages as kernels
from sparrow.ops.kernels import sampling
from sparrow.ops.reference import pages as definition
from sparrow.ops.reference import sampling as sampling_definition

NAN = float("nan")


def test_write() -> None:
    check_write(kernels, torch.float32, 16, 8, device=DEVICE)
    check_write(kernels, torch.float16, 4, 12, kv_heads=3, tokens=torch.float32, device=DEVICE)
    check_write(kernels, torch.float16, 5, 16, kv_heads=1, device=DEVICE)


def test_choices() -> None:
    check_selections(kernels, rows=8, width=9, device=DEVICE)
    batch = batch_of([1, 16, 40, 77, 80], whole_numbers=True)
    for budget in (48, 64, 79):
        check_select(kernels, mean_scores(batch), batch.lengths_B, [budget] * 5, page=16)
    check_select(kernels, torch.randn(2, 2, 11, device=DEVICE), [44, 15], [16, DENSE], page=4)


SHARES = [(0.01, 1, 2, 64), (0.25, 0, 1, 8), (0.75, 2, 3, 8), (0.9, 1, 2, 64), (1.0, 0, 1, 4)]


def test_shares_of_exact_masses() -> None:
    for mass, first, last, most in SHARES:
        check_shares(40, mass, most, first=first, last=last)


@pytest.mark.parametrize(("pages", "mass"), [(50, 0.3), (2100, 0.95)])
def test_shares_of_any_masses(pages: int, mass: float) -> None:
    """Enough is kept, and without the worst of what was chosen it would not be."""
    torch.manual_seed(0)
    scores = torch.randn(3, 1, pages).mul(2).softmax(2).to(DEVICE)
    lengths = torch.full((3,), pages * 4, device=DEVICE)
    lists = kernels.select_pages(scores, lengths, lengths, page=4, mass=mass)
    for row in range(3):
        kept = lists.pages[row, 0, : lists.counts[row, 0]].long()
        free = kept[(kept >= 1) & (kept < pages - 2)]
        goal, held = mass * scores[row, 0].double().sum(), scores[row, 0, kept].double()
        assert held.sum() >= goal - 1e-6
        assert held.sum() - scores[row, 0, free].double().min() < goal + 1e-6
        assert scores[row, 0, free].min() == scores[row, 0, 1:-2].topk(len(free)).values[-1]


def test_rows_of_every_size_in_one_wide_table() -> None:
    counts = [3, 500, 512, 513, 2048, 2049, 4000, 9000]
    check_rows_of_every_size(counts, 9000, None, ties=10**5)
    check_rows_of_every_size(counts, 9000, 0.5, ties=4)


@triton.jit
def _score_and_select(pages, count, scores, length, budget, width, BLOCK: tl.constexpr):
    """A kernel that makes its own scores: every third page is good."""
    m = tl.arange(0, BLOCK)
    tl.store(scores + m, (m % 3 == 0).to(tl.float32), m < length // 4)
    tl.debug_barrier()
    kernels.select_row(pages, count, scores, length, budget, width, 4, 1, 2, None, BLOCK)


@pytest.mark.parametrize(("budget", "width"), [(48, 70), (0, 70), (1000, 70), (1000, 3), (48, 5)])
def test_a_row_can_be_selected_inside_another_kernel(budget: int, width: int) -> None:
    """What exceeds the width is left out, and the memory beside the list stays as it is."""
    scores = torch.full((64,), NAN, device=DEVICE)
    pages = torch.full((80,), -9, dtype=torch.int32, device=DEVICE)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _score_and_select[(1,)](pages, count, scores, 199, budget, width, BLOCK=64)
    lengths, budgets = torch.tensor([[199], [budget]], device=DEVICE)
    expected = definition.select_pages.definition(scores.view(1, 1, 64), lengths, budgets, page=4)
    wanted = torch.nn.functional.pad(expected.pages[0, 0], (0, 16), value=-1)[:width]
    same(pages, torch.nn.functional.pad(wanted, (0, 80 - width), value=-9))
    same(count, expected.counts[0].clamp(max=width))


def test_what_does_not_fit_stays_in_its_row() -> None:
    """On a GPU nobody can be told; the memory beside the list must stay as it is."""
    lengths, budgets = torch.tensor([[40, 32], [16, 16]], device=DEVICE)  # beyond the scores
    lists = kernels.select_pages(torch.randn(2, 1, 8, device=DEVICE), lengths, budgets, page=4)
    assert lists.counts.tolist() == [[4], [4]]
    assert lists.pages[:, :, :4].max() == 7


def test_what_falls_back_to_the_definition() -> None:
    batch = batch_of([20])
    pool = (batch.k_NGPD, batch.v_NGPD)
    k, slots = batch.keys[0].to(DEVICE), torch.arange(20, device=DEVICE)
    assert kernels.supports("write_pages", *pool, k, k, slots)
    assert not kernels.supports("write_pages", *(x.double() for x in pool), k, k, slots)
    assert not kernels.supports("write_pages", *(x.transpose(0, 1) for x in pool), k, k, slots)
    assert not kernels.supports("write_pages", *pool, k.mT.contiguous().mT, k, slots)
    for scores in (torch.zeros(1, 1, 40_000), torch.zeros(1, 1, 8).double()):
        assert not kernels.supports("select_pages", scores, slots, slots, page=16)


# Sampling and rows.


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of NaN in interpreters
def test_draws_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks of a vocabulary that the interpreter can stand."""
    monkeypatch.setattr(sampling, "CHUNK", 16)
    for vocabulary, spread in ((1, 1.0), (16, 30.0), (70, 3.0), (17, 0.1)):
        rows = [part.to(DEVICE) for part in rows_to_draw_from(vocabulary, spread)]
        check_sampler(sampling, rows)
    check_sampler(sampling, [rows[0].half(), *rows[1:]])
    temperature = torch.tensor([1.0, 0.7, 0.01, 2.0, 0.0, 0.5], device=DEVICE)
    for vocabulary, spread in product((1, 16, 17, 101), (0.1, 3.0, 30.0)):
        logits = torch.randn(6, vocabulary, device=DEVICE) * spread
        number = torch.arange(6, device=DEVICE)
        logits[4, -2:] = 3e38  # of two equals the earlier
        rows = (logits, number * 7, number, temperature)
        found, wanted = sampling.sample(*rows), sampling_definition.sample.definition(*rows)
        assert torch.equal(found.tokens, wanted.tokens)
        for name in ("logprobs", "entropies"):
            pair = getattr(found, name), getattr(wanted, name)
            torch.testing.assert_close(*pair, atol=3e-6, rtol=3e-6)


def test_cuts_are_left_to_the_definition() -> None:
    logits, ints, floats = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), torch.ones(2)
    assert sampling.supports("sample", logits, ints, ints, floats)
    assert not sampling.supports("sample", logits, ints, ints, floats, ints)
    assert not sampling.supports("sample", logits, ints, ints, floats, None, floats)
    assert not sampling.supports("sample", logits, ints, ints, floats, None, None, ints[:, None])
    assert not sampling.supports("sample", logits.double(), ints, ints, floats)


def test_row_kernels_do_what_the_definitions_do() -> None:
    check_steps(sampling, device=DEVICE)


@pytest.mark.parametrize(("rows", "width"), [(5, 40), (3, 32), (2, 700)])
def test_lists_as_bits(rows: int, width: int) -> None:
    check_page_bits(rows, width)
