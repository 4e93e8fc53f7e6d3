"""Contracts of attention: one new token, many tokens dense, many tokens sparse.

Legend of the dimension letters: sparrow/ops/types.py. Integer tensors may be int32 or int64. A page
is P tokens; a *slot* is page * P + offset; a negative slot or a length of 0 is padding and has no
effect.
"""

import torch
from torch import Tensor

from sparrow.ops.api.checks import (
    budgets_fit,
    groups,
    lists_fit,
    packed,
    page_size,
    reserved,
    rows,
    same_head_size,
    same_shape,
    share_of_mass,
)
from sparrow.ops.dispatch import run
from sparrow.ops.reference import attention as _attention
from sparrow.ops.types import PageLists, Scorer


@torch.no_grad()
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
    a sequence, in unused slots and in pages off the list is never looked at. A row's result does
    not depend on the other rows. Rows of length 0 give zeros. No gradients.
    """
    same_shape("k pages", k_NGPD, "v pages", v_NGPD)
    groups(q_BHD, k_NGPD.shape[1])
    rows("tables", table_BM, len(q_BHD), ndim=2)
    rows("lengths", lengths_B, len(q_BHD))
    same_head_size(q_BHD, k_NGPD)
    if lists is not None:
        lists_fit(lists, len(q_BHD), k_NGPD.shape[1])
    return run(
        "attend_decode",
        _attention.attend_decode,
        q_BHD,
        k_NGPD,
        v_NGPD,
        table_BM,
        lengths_B,
        lists,
        scale=scale,
    )


def attend_causal(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, bounds: Tensor, *, scale: float
) -> Tensor:
    """Causal attention over packed sequences, [T, H, D], with gradients.

    bounds [B + 1] are the edges of the sequences: sequence b is tokens bounds[b] to bounds[b+1].
    """
    packed(q_THD, k_TGD, v_TGD)
    return run("attend_causal", _attention.attend_causal, q_THD, k_TGD, v_TGD, bounds, scale=scale)


@torch.no_grad()
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
    same_shape("k pages", k_NGPD, "v pages", v_NGPD)
    groups(q_THD, k_NGPD.shape[1])
    same_head_size(q_THD, k_NGPD)
    rows("tables", table_BM, len(lengths_B), ndim=2)
    rows("bounds", bounds, len(lengths_B) + 1)
    return run(
        "attend_causal_paged",
        _attention.attend_causal_paged,
        q_THD,
        k_NGPD,
        v_NGPD,
        table_BM,
        lengths_B,
        bounds,
        scale=scale,
    )


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
    scorer: Scorer | None = None,
) -> Tensor:
    """Sparse causal attention of whole packed sequences at once, [T, H, D], with gradients.

    The first dense[b] tokens of sequence b (its prompt) see everything before them. Each later
    token keeps the pages that decoding would have kept when it was the newest token: scored by
    `scorer` (None: the rule of `score_pages`) and chosen by the rule of `select_pages` under its
    own budget, budgets[t] or, by KV head, budgets[t, g].
    Pages are counted from the start of each sequence. The choice itself carries no gradient. Scores
    of one token and of many are equal up to rounding, so a near tie may fall to either page.
    """
    packed(q_THD, k_TGD, v_TGD)
    budgets_fit(budgets, len(q_THD), k_TGD.shape[1])
    share_of_mass(mass)
    rows("bounds", bounds, len(dense_B) + 1)
    reserved(first, last)
    page_size(page)
    return run(
        "attend_sparse",
        _attention.attend_sparse,
        q_THD,
        k_TGD,
        v_TGD,
        bounds,
        dense_B,
        budgets,
        page=page,
        first=first,
        last=last,
        scale=scale,
        mass=mass,
        scorer=scorer,
    )
