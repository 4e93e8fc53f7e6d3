"""Decode attention on a CPU, reading each kept page once and copying nothing.

The work of a row is cut into blocks of about BLOCK_TOKENS tokens of its own lists. Each block
gives a partial softmax, and partials are joined in order, so the bits of a row depend on its own
lists alone: not on its neighbours, not on the number of threads. What happens inside a block is in
`decode_kernel`. Legend of the dimension letters: sparrow/ops/types.py; S = items (row, block).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.ops.cpu.decode_kernel import CHUNK, attend_blocks, find_fault, join_blocks
from sparrow.ops.cpu.simd import Array, floats, integers
from sparrow.ops.cpu.threads import share
from sparrow.ops.types import PageLists

FAULTS = {
    1: "a length is negative or does not fit its table",
    2: "a page list exceeds its width or its sequence",
    3: "a table names pages outside the pool",
}
BLOCK_TOKENS = 256  # the scores of a block, for all heads, stay in the first cache
BYTES_PER_THREAD = 1 << 19  # below this a helper costs more than it gives


def fits(dtype: torch.dtype, head_size: int) -> bool:
    """fp32 or bf16, and heads of whole vectors."""
    return dtype in (torch.float32, torch.bfloat16) and head_size % CHUNK == 0


def supports(_op: str, q_BHD: Tensor, k_NGPD: Tensor, v_NGPD: Tensor, *_: Any, **__: Any) -> bool:
    """One dtype that fits, and pools that need no copy."""
    return (
        fits(q_BHD.dtype, q_BHD.shape[2])
        and q_BHD.dtype == k_NGPD.dtype == v_NGPD.dtype
        and k_NGPD.is_contiguous()
        and v_NGPD.is_contiguous()
    )


def attend_decode(
    q_BHD: Tensor,
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    table_BM: Tensor,
    lengths_B: Tensor,
    lists: PageLists | None = None,
    *,
    scale: float,
) -> Tensor:
    kv_heads, page, size = k_NGPD.shape[1:]
    block = max(1, BLOCK_TOKENS // page)
    lengths = integers(lengths_B, np.int32)
    table = integers(table_BM, np.int32)
    pages, counts = _lists(lists, lengths, page, kv_heads)
    fault = find_fault(table, lengths, pages, counts, lists is None, page, len(k_NGPD))
    if fault:
        raise ValueError(f"{FAULTS[fault]} (pool: {len(k_NGPD)} pages, table: {table.shape[1]})")
    start_B = _block_starts(counts, block)
    # Scores are kept in base 2: one multiplication here spares one per exponential.
    q = (q_BHD.detach().float() * (scale * math.log2(math.e))).contiguous().numpy()
    top, total = np.empty((2, start_B[-1], q.shape[1]), np.float32)
    value = np.empty((start_B[-1], *q.shape[1:]), np.float32)
    lookup = (table, lengths, pages, counts, start_B, block)
    arguments = (q, floats(k_NGPD), floats(v_NGPD), *lookup, top, total, value)
    kept_bytes = 2 * int(counts.sum()) * page * size * k_NGPD.itemsize
    share(
        lambda first, last: attend_blocks(*arguments, first, last),
        int(start_B[-1]),
        most=1 + kept_bytes // BYTES_PER_THREAD,
    )
    out = np.empty_like(q)
    join_blocks(start_B, top, total, value, out)
    return torch.from_numpy(out).to(q_BHD.dtype)


def _lists(
    lists: PageLists | None, lengths_B: Array, page: int, kv_heads: int
) -> tuple[Array, Array]:
    """Logical pages [B, G, K] and their counts [B, G]; dense lists are counted, not written."""
    if lists is None:
        counts_B = -(-lengths_B // page)
        return np.empty((0, 0, 0), np.int32), np.repeat(counts_B[:, None], kv_heads, axis=1)
    return integers(lists.pages, np.int32), integers(lists.counts, np.int32) * (
        lengths_B[:, None] > 0
    )


def _block_starts(counts_BG: Array, block: int) -> Array:
    """Where the blocks of each row start among those of all rows, [B + 1]."""
    start_B = np.zeros(len(counts_BG) + 1, np.int64)
    np.cumsum(-(-counts_BG.max(axis=1, initial=0) // block), out=start_B[1:])
    return start_B
