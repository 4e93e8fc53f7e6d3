"""Random sequences in shuffled pages, with NaN wherever nothing was written."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparrow import ops


class Batch(NamedTuple):
    """Sequences both ways: contiguous (lists of [S, G, D]) and in pages."""

    q_BHD: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_NGPD: Tensor
    v_NGPD: Tensor
    landmark_NGD: Tensor
    table_BM: Tensor
    lengths_B: Tensor
    page: int

    @property
    def pool(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments after q that the paged attentions take."""
        return self.k_NGPD, self.v_NGPD, self.table_BM, self.lengths_B


def make_batch(
    lengths: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 8,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    whole_numbers: bool = False,
) -> Batch:
    """`whole_numbers` draws small integers, so that sums are exact and scores tie often."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if whole_numbers:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    keys = [draw(length, kv_heads, head_size) for length in lengths]
    values = [draw(length, kv_heads, head_size) for length in lengths]
    counts = [-(-length // page) for length in lengths]
    total = sum(counts) + 3
    k_NGPD = torch.full((total, kv_heads, page, head_size), float("nan"), dtype=dtype)
    v_NGPD = torch.full_like(k_NGPD, float("nan"))
    landmark_NGD = torch.full((total, kv_heads, head_size), float("nan"), dtype=dtype)
    free = torch.randperm(total, generator=generator)
    table_BM = torch.full((len(lengths), max(counts, default=0)), -1)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table_BM[row, :count], free = free[:count], free[count:]
        slots = slots_of(table_BM[row], torch.arange(length), page)
        ops.write_pages(k_NGPD, v_NGPD, keys[row], values[row], slots)
        finished = table_BM[row, : length // page]
        landmark_NGD[finished] = k_NGPD[finished].float().mean(2).to(dtype)
    return Batch(
        q_BHD=draw(len(lengths), heads, head_size),
        keys=keys,
        values=values,
        k_NGPD=k_NGPD,
        v_NGPD=v_NGPD,
        landmark_NGD=landmark_NGD,
        table_BM=table_BM,
        lengths_B=torch.tensor(lengths, dtype=torch.int32),
        page=page,
    )


def mean_scores(batch: Batch) -> Tensor:
    """Mean query times mean key of every finished page, [B, G, M]; -inf elsewhere."""
    kv_heads, width = batch.k_NGPD.shape[1], batch.table_BM.shape[1]
    q_BGD = batch.q_BHD.float().unflatten(1, (kv_heads, -1)).mean(2)
    landmark_BMGD = batch.landmark_NGD[batch.table_BM.clamp(min=0)].float()
    finished_BM = (
        torch.arange(width, device=q_BGD.device) < (batch.lengths_B // batch.page)[:, None]
    )
    score_BGM = torch.einsum("bgd,bmgd->bgm", q_BGD, landmark_BMGD)
    return score_BGM.masked_fill(~finished_BM[:, None], -torch.inf)


def slots_of(table_M: Tensor, positions_T: Tensor, page: int) -> Tensor:
    return table_M[positions_T // page] * page + positions_T % page


def plain_attention(q_RD: Tensor, k_SD: Tensor, v_SD: Tensor, scale: float) -> Tensor:
    """Softmax attention of the heads of one group, written out in double precision."""
    score_RS = q_RD.double() @ k_SD.double().T * scale
    weight_RS = (score_RS - score_RS.max(1, keepdim=True).values).exp()
    return weight_RS / weight_RS.sum(1, keepdim=True) @ v_SD.double()
