"""The first and last act of a decode step in one kernel each, instead of some thirty small ones.

R rows; other letters as in sparrow/ops/types.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.ops.reference.sampling import Draws
from sparrow.ops.types import RowState, StepInputs

PAGES = 1024  # table entries that one program copies


def fits(_dtype: torch.dtype, _head_size: int) -> bool:
    return True


def supports(_op: str, at_B: Tensor, *_: Any, **__: Any) -> bool:
    return at_B.dtype == torch.int64 and at_B.is_contiguous()


def step_inputs(at_B: Tensor, rows: RowState, *, page: int, width: int) -> StepInputs:
    count, device = len(at_B), at_B.device
    whole = torch.empty(6, count, dtype=torch.int64, device=device)
    temperature_B = torch.empty(count, dtype=torch.float32, device=device)
    table_BM = torch.empty(count, width, dtype=rows.table_RM.dtype, device=device)
    if count:
        _read_rows[count, triton.cdiv(width, PAGES)](
            *(at_B, rows.token_R, rows.length_R, rows.seed_R, rows.drawn_R, rows.temperature_R),
            *(rows.table_RM, whole, temperature_B, table_BM, count, width),
            rows.table_RM.stride(0),
            PAGE=page,
            PAGES=PAGES,
            num_warps=4,
        )
    ids_B, positions_B, lengths_B, slots_B, seeds_B, counters_B = whole.unbind(0)
    return StepInputs(
        ids_B=ids_B,
        positions_B=positions_B,
        lengths_B=lengths_B,
        slots_B=slots_B,
        table_BM=table_BM,
        seeds_B=seeds_B,
        counters_B=counters_B,
        temperature_B=temperature_B,
    )


def step_outputs(at_B: Tensor, draws: Draws, rows: RowState, *, advance: bool) -> Tensor:
    packed_4B = torch.empty(4, len(at_B), dtype=torch.int32, device=at_B.device)
    if len(at_B):
        _write_rows[(1,)](
            *(at_B, *draws, rows.token_R, rows.drawn_R, rows.length_R, packed_4B, len(at_B)),
            ADVANCE=advance,
            BLOCK=triton.next_power_of_2(len(at_B)),
            num_warps=1,
        )
    return packed_4B


@triton.jit
def _read_rows(
    at: tl.tensor,
    token: tl.tensor,
    length: tl.tensor,
    seed: tl.tensor,
    drawn: tl.tensor,
    temperature: tl.tensor,
    table: tl.tensor,
    whole: tl.tensor,
    out_temperature: tl.tensor,
    out_table: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    table_stride: tl.tensor,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
) -> None:
    """Program (b, j): a stretch of row b's table; the first also its scalars."""
    b, stretch = tl.program_id(0), tl.program_id(1)
    row = tl.load(at + b)
    page_M = stretch * PAGES + tl.arange(0, PAGES)
    inside = page_M < width
    entry_M = tl.load(table + row * table_stride + page_M, mask=inside)
    tl.store(out_table + b.to(tl.int64) * width + page_M, entry_M, mask=inside)
    if stretch == 0:
        tokens = tl.load(length + row)
        position = tl.maximum(tokens, 0)
        block = tl.load(table + row * table_stride + position // PAGE).to(tl.int64)
        slot = tl.where(tokens >= 0, block * PAGE + position % PAGE, -1)
        tl.store(whole + b, tl.load(token + row))
        tl.store(whole + count + b, position)
        tl.store(whole + 2 * count + b, tokens + 1)
        tl.store(whole + 3 * count + b, slot)
        tl.store(whole + 4 * count + b, tl.load(seed + row))
        tl.store(whole + 5 * count + b, tl.load(drawn + row))
        tl.store(out_temperature + b, tl.load(temperature + row))


@triton.jit
def _write_rows(
    at: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    entropies: tl.tensor,
    ok: tl.tensor,
    token: tl.tensor,
    drawn: tl.tensor,
    length: tl.tensor,
    packed: tl.tensor,
    count: tl.tensor,
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program for all rows: a batch is small. Padding rows may repeat; all write the same."""
    b = tl.arange(0, BLOCK)
    real = b < count
    row = tl.load(at + b, mask=real, other=0)
    token_B = tl.load(tokens + b, mask=real)
    tl.store(packed + b, token_B.to(tl.int32), mask=real)
    logprob_B = tl.load(logprobs + b, mask=real)
    tl.store(packed + count + b, logprob_B.to(tl.int32, bitcast=True), mask=real)
    entropy_B = tl.load(entropies + b, mask=real)
    tl.store(packed + 2 * count + b, entropy_B.to(tl.int32, bitcast=True), mask=real)
    tl.store(packed + 3 * count + b, tl.load(ok + b, mask=real).to(tl.int32), mask=real)
    drawn_B = tl.load(drawn + row, mask=real)
    length_B = tl.load(length + row, mask=real)
    tl.debug_barrier()  # a repeated padding row is read before anybody writes it
    tl.store(token + row, token_B, mask=real)
    tl.store(drawn + row, drawn_B + 1, mask=real)
    if ADVANCE:
        grown_B = tl.where(length_B >= 0, length_B + 1, length_B)
        tl.store(length + row, grown_B, mask=real)
