"""Attention: one new token over a page list, many tokens dense, many tokens sparse.

All many-token forms go through one block function, so a sparse call whose lists hold every page
equals the dense call bit for bit, and a paged sequence equals a contiguous one bit for bit.
Legend of the dimension letters: sparrow/ops/types.py. Integer tensors may be int32 or int64. A page
is P tokens; a *slot* is page * P + offset; a negative slot or a length of 0 is padding and has no
effect.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparrow.ops.dispatch import needs_gradients, op
from sparrow.ops.reference.pages import DENSE, WORD, accumulator, keep_pages
from sparrow.ops.types import PageLists, Scorer, Scores

# Queries of a block, counted from the first query of a sequence in the call, so that the result
# of a sequence never depends on its neighbours. On a GPU more: _block_size.
QUERY_BLOCK = 128
Keep = Callable[[int, int], Tensor | None]
"""Tokens that the queries start to stop of a sequence keep, bool [n, G, stop]; None: all."""
GPU_SCORES = 2**27  # scores of a block on a GPU, where small blocks are bound by launches


@op(gradients=False)
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
    """Attention of one new token per row over its pages, [B, H, D] in q's dtype.

    lengths count the tokens in the cache, the new one included. Without lists every page is
    attended (dense); the list of all pages gives the same bits. What lies in table entries beyond
    a sequence, in unused slots and in pages off the list is never read. A row's result does
    not depend on the other rows. Rows of length 0 give zeros. No gradients.
    """
    kv_heads, page = k_NGPD.shape[1:3]
    out_BHD = torch.zeros_like(q_BHD)
    out_BGRD = out_BHD.view(len(q_BHD), kv_heads, -1, q_BHD.shape[2])
    q_BGRD = q_BHD.unflatten(1, (kv_heads, -1))
    for row, length in enumerate(lengths_B.tolist()):
        for head in range(kv_heads if length else 0):
            if lists is None:
                pages_K = torch.arange(-(-length // page), device=q_BHD.device)
            else:
                pages_K = lists.pages[row, head, : int(lists.counts[row, head])].long()
            block_K = table_BM[row, pages_K]
            real_S = (pages_K[:, None] * page + pages_K.new_tensor(range(page))).flatten() < length
            k_SD = k_NGPD[block_K, head].flatten(0, 1)[real_S]
            v_SD = v_NGPD[block_K, head].flatten(0, 1)[real_S]
            out_BGRD[row, head] = _attend_rows(q_BGRD[row, head], k_SD, v_SD, scale)
    return out_BHD


@op(gradients=False)
def attend_verify(
    q_THD: Tensor,
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    table_BM: Tensor,
    lengths_T: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Dense attention of T / B neighbouring tokens of each row over its pages, [T, H, D].

    Keys and values of all of them are in the cache; lengths are those that each query sees, its own
    token included. By definition these are T rows of `attend_decode`, bit for bit.
    """
    table_TM = table_BM.repeat_interleave(len(q_THD) // max(1, len(table_BM)), dim=0)
    return attend_decode(q_THD, k_NGPD, v_NGPD, table_TM, lengths_T, scale=scale)


def _attend_rows(q_RD: Tensor, k_SD: Tensor, v_SD: Tensor, scale: float) -> Tensor:
    wide = accumulator(q_RD.dtype)
    weight_RS = ((q_RD.to(wide) @ k_SD.to(wide).T) * scale).softmax(dim=1)
    return (weight_RS @ v_SD.to(wide)).to(q_RD.dtype)


@op()
def attend_causal(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, bounds: Tensor, *, scale: float
) -> Tensor:
    """Causal attention over packed sequences, [T, H, D], with gradients.

    bounds [B + 1] are the edges of the sequences: sequence b is tokens bounds[b] to bounds[b+1].
    """
    outputs = [
        _attend_sequence(q_THD[span], k_TGD[span], v_TGD[span], 0, None, scale)
        for span in _spans(bounds, len(q_THD))
    ]
    return torch.cat([q_THD[:0], *outputs])


@op(gradients=False)
def attend_causal_paged(
    q_THD: Tensor,
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    table_BM: Tensor,
    lengths_B: Tensor,
    bounds: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Causal attention of the last tokens of each sequence over its pages, [T, H, D].

    The queries of row b are tokens bounds[b] to bounds[b+1] of the pack and the last ones of the
    lengths[b] tokens in its pages (a prompt, or a chunk of one). No gradients.
    """
    outputs = []
    spans = _spans(bounds, len(q_THD))
    for row, (span, length) in enumerate(zip(spans, lengths_B.tolist(), strict=True)):
        queries, room = span.stop - span.start, table_BM.shape[1] * k_NGPD.shape[2]
        if not queries <= length <= room:
            sizes = f"{queries} queries, length {length}, table of {room} tokens"
            raise ValueError(f"row {row}: expected queries <= length <= table, got {sizes}")
        k_SGD = gather_sequence(k_NGPD, table_BM[row], length)
        v_SGD = gather_sequence(v_NGPD, table_BM[row], length)
        outputs.append(_attend_sequence(q_THD[span], k_SGD, v_SGD, length - queries, None, scale))
    return torch.cat([q_THD[:0], *outputs])


def gather_sequence(pool_NGPD: Tensor, table_M: Tensor, length: int) -> Tensor:
    """One sequence's keys or values out of its pages, [S, G, D]."""
    page = pool_NGPD.shape[2]
    blocks_MGPD = pool_NGPD[table_M[: -(-length // page)]]
    return blocks_MGPD.transpose(1, 2).flatten(0, 1)[:length]


@op()
def attend_sparse(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    bounds: Tensor,
    dense_B: Tensor,
    budgets: Tensor,
    *,
    page: int,
    first: int = 1,
    last: int = 2,
    scale: float,
    mass: float | None = None,
    scorer: Scorer,
) -> Tensor:
    """Sparse causal attention of whole packed sequences at once, [T, H, D], with gradients.

    The first dense[b] tokens of sequence b (its prompt) see everything before them. Each later
    token keeps the pages that decoding would have kept when it was the newest token: scored by
    `scorer` and chosen by the rule of `select_pages` under its own budget, budgets[t] or, by KV
    head, budgets[t, g].
    Pages are counted from the start of each sequence. The choice itself carries no gradient. Scores
    of one token and of many are equal up to rounding, so a near tie may fall to either page.
    """
    outputs = []
    choose = partial(keep_pages, page=page, first=first, last=last, mass=mass)
    for span, dense in zip(_spans(bounds, len(q_THD)), dense_B.tolist(), strict=True):
        q_SHD, k_SGD, v_SGD = q_THD[span], k_TGD[span], v_TGD[span]
        states = q_SHD.detach(), k_SGD.detach(), v_SGD.detach()
        scores = scorer(*states, dense, budgets[span])
        keep = _keeping(scores, budgets[span], dense, page, choose)
        outputs.append(_attend_sequence(q_SHD, k_SGD, v_SGD, 0, keep, scale))
    return torch.cat([q_THD[:0], *outputs])


@op()
def attend_kept(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    bounds: Tensor,
    bits_GWT: Tensor,
    *,
    page: int,
    scale: float,
) -> Tensor:
    """Causal attention of packed sequences over kept pages, [T, H, D], with gradients.

    bits: `page_bits`, what each token keeps of its own sequence; at least its own page.
    """
    outputs = []
    for span in _spans(bounds, len(q_THD)):
        keep = _unpacking(bits_GWT[:, :, span], page)
        outputs.append(_attend_sequence(q_THD[span], k_TGD[span], v_TGD[span], 0, keep, scale))
    return torch.cat([q_THD[:0], *outputs])


def _unpacking(bits_GWS: Tensor, page: int) -> Keep:
    """The tokens that queries of one sequence keep, by their bits."""

    def keep(start: int, stop: int) -> Tensor:
        index_M = torch.arange(-(-stop // page), device=bits_GWS.device)
        words_GMn = bits_GWS[:, index_M // WORD, start:stop]
        keep_GMn = ((words_GMn >> (index_M % WORD)[:, None]) & 1).bool()
        return keep_GMn.permute(2, 0, 1).repeat_interleave(page, dim=2)[:, :, :stop]

    return keep


def _keeping(
    scores: Scores, budgets: Tensor, dense: int, page: int, choose: Callable[..., Tensor]
) -> Keep:
    """The tokens that queries of one sequence keep."""

    def keep(start: int, stop: int) -> Tensor | None:
        if stop <= dense:
            return None
        keep_nGM = _kept(scores, budgets, dense, page, choose, start, stop)
        return keep_nGM.repeat_interleave(page, dim=2)[:, :, :stop]

    return keep


def _kept(
    scores: Scores,
    budgets: Tensor,
    dense: int,
    page: int,
    choose: Callable[..., Tensor],
    start: int,
    stop: int,
) -> Tensor:
    """The pages that the queries start to stop of one sequence keep, bool [n, G, M]."""
    scores_nGM = F.pad(scores(start, stop), (0, int(stop % page > 0)), value=float("-inf"))
    lengths_n = torch.arange(start + 1, stop + 1, device=scores_nGM.device)
    budgets_n = budgets[start:stop].to(lengths_n)
    prompt = (lengths_n <= dense).reshape(-1, *(1,) * (budgets_n.ndim - 1))
    return choose(scores_nGM, lengths_n, torch.where(prompt, DENSE, budgets_n))


@torch.no_grad()
def kept_pages(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    bounds: Tensor,
    dense_B: Tensor,
    budgets: Tensor,
    *,
    page: int,
    first: int,
    last: int,
    mass: float | None,
    scorer: Scorer,
) -> Tensor:
    """The pages that each token of `attend_sparse` keeps, bool [T, G, M]: M of the longest."""
    choose = partial(keep_pages, page=page, first=first, last=last, mass=mass)
    spans = list(_spans(bounds, len(q_THD)))
    most = max((-(-(span.stop - span.start) // page) for span in spans), default=0)
    kept_TGM = torch.zeros(
        (len(q_THD), k_TGD.shape[1], most), dtype=torch.bool, device=q_THD.device
    )
    for span, dense in zip(spans, dense_B.tolist(), strict=True):
        q_SHD, k_SGD, v_SGD = q_THD[span], k_TGD[span], v_TGD[span]
        scores = scorer(q_SHD, k_SGD, v_SGD, dense, budgets[span])
        size = _block_size(q_SHD, len(k_SGD))
        for start in range(0, len(q_SHD), size):
            stop = min(start + size, len(q_SHD))
            keep_nGM = _kept(scores, budgets[span], dense, page, choose, start, stop)
            begin = span.start + start
            kept_TGM[begin : begin + len(keep_nGM), :, : keep_nGM.shape[2]] = keep_nGM
    return kept_TGM


def _attend_sequence(
    q_nHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, offset: int, keep: Keep | None, scale: float
) -> Tensor:
    """Causal attention of the queries at positions offset.. of one sequence, by blocks."""
    attend: Callable[..., Tensor] = _attend_block
    if needs_gradients(q_nHD, k_SGD, v_SGD):
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    outputs = []
    size = _block_size(q_nHD, len(k_SGD))
    for begin in range(0, len(q_nHD), size):
        q_block = q_nHD[begin : begin + size]
        start, stop = offset + begin, offset + begin + len(q_block)
        arguments = (q_block, k_SGD[:stop], v_SGD[:stop], start, keep, scale)
        # With gradients, choice and weights are recomputed in backward: memory stays linear.
        outputs.append(attend(*arguments))
    return torch.cat([q_nHD[:0], *outputs])


def _block_size(q_nHD: Tensor, length: int) -> int:
    """Queries of a block: by shapes alone, so that dense and sparse calls have equal blocks."""
    if not q_nHD.is_cuda:
        return QUERY_BLOCK
    most = GPU_SCORES // (q_nHD.shape[1] * max(1, length))
    return max(QUERY_BLOCK, most // QUERY_BLOCK * QUERY_BLOCK)


def _attend_block(
    q_nHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, start: int, keep: Keep | None, scale: float
) -> Tensor:
    """Attention of the queries at start.. over the keys 0.., with causal mask and kept tokens."""
    n, heads, head_size = q_nHD.shape
    length, kv_heads, _ = k_SGD.shape
    wide = accumulator(q_nHD.dtype)
    q_GnRD = q_nHD.to(wide).unflatten(1, (kv_heads, -1)).transpose(0, 1)
    k_GDS = k_SGD.to(wide).permute(1, 2, 0).contiguous()
    v_GSD = v_SGD.to(wide).transpose(0, 1).contiguous()

    position_S = torch.arange(length, device=q_nHD.device)
    allowed_GnS = (position_S <= position_S[start : start + n, None]).unsqueeze(0)
    kept_nGS = keep(start, start + n) if keep is not None else None
    if kept_nGS is not None:
        allowed_GnS = allowed_GnS & kept_nGS.transpose(0, 1)
    score_GnRS = (q_GnRD.reshape(kv_heads, -1, head_size) @ k_GDS).view(kv_heads, n, -1, length)
    score_GnRS = (score_GnRS * scale).masked_fill(~allowed_GnS.unsqueeze(2), float("-inf"))
    weight_GnRS = score_GnRS.softmax(dim=3)
    out_GnRD = (weight_GnRS.view(kv_heads, -1, length) @ v_GSD).view(kv_heads, n, -1, head_size)
    return out_GnRD.transpose(0, 1).reshape(n, heads, head_size).to(q_nHD.dtype)


def _spans(bounds: Tensor, tokens: int) -> Iterator[slice]:
    edges = bounds.tolist()
    if edges[0] != 0 or edges[-1] != tokens or edges != sorted(edges):
        raise ValueError(f"bounds must rise from 0 to the {tokens} tokens, got {edges}")
    return (slice(start, stop) for start, stop in pairwise(edges))
