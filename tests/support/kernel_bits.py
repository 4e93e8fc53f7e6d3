"""Prints a digest of what the numba kernels compute: `python -m support.kernel_bits`."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from sparrow.ops.cpu import attention, pages, sampling
from support.paging import SCALE, make_batch
from support.rowstates import rows_to_draw_from


def computed() -> Iterator[Tensor]:
    """Rows of many lengths: the optimiser unrolls sums, and what is left over is another loop."""
    for dtype in (torch.float32, torch.bfloat16):
        batch = make_batch([*range(1, 64), 200, 301], head_size=16, dtype=dtype)
        yield attention.attend_decode(batch.q_BHD, *batch.pool, scale=SCALE)
        places = batch.table_BM, batch.lengths_B
        landmark_NGD = torch.nan_to_num(batch.landmark_NGD)
        yield pages.score_pages(batch.q_BHD, landmark_NGD, *places, page=batch.page)
    for vocabulary in (47, 129, 1000):
        yield from sampling.sample(*rows_to_draw_from(vocabulary, 3.0, copies=2))


if __name__ == "__main__":
    digest = hashlib.sha256()
    for result in computed():
        digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    print(digest.hexdigest())
