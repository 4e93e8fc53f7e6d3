"""Checks of Triton kernels that both tiers run: small sizes in fp32 and fp16 in the interpreter
(tests/cpu/kernels), which gets bf16 wrong, and real sizes in bf16 on a GPU (tests/gpu).
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow import ops
from sparrow.ops import PageLists
from sparrow.ops.kernels import attend_prefill as prefill
from sparrow.ops.kernels import pages
from sparrow.sparse.compile.launch import Compiled
from sparrow.sparse.flows import interpret
from support.flows import LAYER, Bed, same_choice
from support.paging import DENSE, SCALE, Batch, check_error, check_select, make_batch, relaid

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(lengths: list[int], **options: Any) -> Batch:
    return make_batch(lengths, **options).to(DEVICE)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write shows as NaN."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


# Attention.


def attend_chunks(batch: Batch, q_THD: Tensor, bounds: Tensor) -> Tensor:
    return prefill.attend_causal_paged(q_THD, *batch.pool, bounds, scale=SCALE)


def queries_of(batch: Batch, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Queries for the last so many tokens of each row, and their bounds."""
    bounds = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(sum(counts), *batch.q_BHD.shape[1:], generator=generator)
    return q.to(batch.q_BHD), bounds


def check_prefill(batch: Batch, counts: list[int]) -> None:
    q, bounds = queries_of(batch, counts)
    check_error(prefill, "attend_causal_paged", q, batch, bounds)


def check_bits_of_prefill(batch: Batch, counts: list[int]) -> None:
    """Layouts, integers and neighbours in the pack change no bit."""
    q, bounds = queries_of(batch, counts)
    together = attend_chunks(batch, q, bounds)
    fused = torch.cat([torch.full_like(q, torch.nan), q], dim=1)[:, q.shape[1] :]
    assert torch.equal(attend_chunks(relaid(batch), fused, bounds.int()), together)
    last = batch._replace(table_BM=batch.table_BM[-1:], lengths_B=batch.lengths_B[-1:])
    alone = attend_chunks(last, q[bounds[-2] :], bounds[-2:] - bounds[-2])
    assert torch.equal(alone, together[bounds[-2] :])


# Choice of pages.


def check_shares(count: int, mass: float, most: int = 40, **options: Any) -> None:
    """Multiples of 1/64, of which sums are exact in any order, with ties and with what is none."""
    torch.manual_seed(count)
    masses = torch.randint(-1, most, (10, 2, count), device=DEVICE) / 64
    masses[1, :, ::3], masses[2, :, ::2], masses[3] = torch.nan, -torch.inf, 0.0
    lengths = torch.tensor([count * 4 - row for row in range(10)], device=DEVICE)
    lengths[4], lengths[5] = 0, 4 * (count // 3) + 1
    budgets = torch.randint(0, count * 4, (10, 2), device=DEVICE)
    budgets[6:] = DENSE
    for paid in (budgets, budgets[:, 0]):
        check_select(pages, masses, lengths, paid, page=4, mass=mass, **options)


def check_rows_of_every_size(counts: list[int], width: int, mass: float | None, ties: int) -> None:
    """In one wide table; what lies beyond a row's finished pages is not even looked at."""
    torch.manual_seed(0)
    masses = torch.randint(0, ties, (len(counts), 1, width)) / 64  # sums are exact
    lengths = [count * 4 - row % 2 for row, count in enumerate(counts)]
    for row, length in enumerate(lengths):
        masses[row, :, length // 4 :] = torch.inf
    for budgets in ([count * 2 for count in counts], [DENSE] * len(counts)):
        check_select(pages, masses.to(DEVICE), lengths, budgets, page=4, mass=mass)


# Generated kernels.


def fill_fields(bed: Bed, kernels: Compiled) -> None:
    """Every page's fields, by definition and by kernel."""
    interpret.summarise_slots(bed.program, bed.defined, LAYER, bed.slots_T)
    unread = bed.compiled.field("k", LAYER)[:, :, 0]
    kernels.append(bed.compiled, LAYER, unread, unread, bed.slots_T, write=False)


def select(bed: Bed, kernels: Compiled, budgets: Tensor) -> PageLists:
    given = (bed.q_BHD, bed.table_BM, bed.lengths_B, budgets, bed.rows_B)
    return kernels.select(bed.compiled, LAYER, *given, first=1, last=2)


def check_choice(bed: Bed, kernels: Compiled, budgets: Tensor, tolerance: float = 1e-4) -> None:
    """Choices are those of the definition, and so is the state afterwards."""
    score_BGM, page = bed.scores(), bed.program.page
    with ops.using("reference"):
        wanted = ops.select_pages(
            score_BGM, bed.lengths_B, budgets, page=page, mass=bed.program.mass
        )
    same_choice(score_BGM, wanted, select(bed, kernels, budgets))
    for name, _ in bed.program.state:
        left, right = (c.state(name, LAYER) for c in (bed.defined, bed.compiled))
        torch.testing.assert_close(right, left, rtol=tolerance / 10, atol=tolerance)
