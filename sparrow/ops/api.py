"""The ops: contracts, argument checks, dispatch. Tensors in, tensors out.

Each op here has a definition of the same name in `sparrow.ops.reference`. Legend of the dimension
letters: sparrow/ops/types.py. Integer tensors may be int32 or int64. A page is P tokens; a *slot*
is page * P + offset; a negative slot or a length of 0 is padding and has no effect.
"""

import torch
from torch import Tensor

from sparrow.ops.dispatch import run
from sparrow.ops.reference import attention as _attention
from sparrow.ops.reference import logprob as _logprob
from sparrow.ops.reference import pages as _pages
from sparrow.ops.reference.logprob import TokenStats, TopK
from sparrow.ops.types import PageLists


def write_pages(
    k_NGPD: Tensor, v_NGPD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor
) -> None:
    """Write the keys and values of T tokens into their slots, in place.

    Slots that are not negative must differ from each other.
    """
    _same_shape("k pages", k_NGPD, "v pages", v_NGPD)
    _same_shape("k", k_TGD, "v", v_TGD)
    _tokens_fit_pool(k_TGD, k_NGPD)
    _rows("slots", slots_T, len(k_TGD))
    run("write_pages", _pages.write_pages, k_NGPD, v_NGPD, k_TGD, v_TGD, slots_T)


def summarise_pages(k_NGPD: Tensor, landmark_NGD: Tensor, slots_T: Tensor) -> None:
    """Store the landmark of every page that one of these slots finishes, in place.

    Call after `write_pages` with the same slots. The landmark is the mean key of the page, summed
    in fp32. Pages fill from the front, so a token in a page's last slot finishes it; other pages
    keep what landmark they had.
    """
    _rows("slots", slots_T, len(slots_T))
    if landmark_NGD.shape != k_NGPD.shape[:2] + k_NGPD.shape[3:]:
        raise ValueError(f"landmarks {_dims(landmark_NGD)} do not fit k pages {_dims(k_NGPD)}")
    run("summarise_pages", _pages.summarise_pages, k_NGPD, landmark_NGD, slots_T)


def score_pages(
    q_BHD: Tensor, landmark_NGD: Tensor, table_BM: Tensor, lengths_B: Tensor, *, page: int
) -> Tensor:
    """Score every finished page by the block-mean rule, fp32 [B, G, M].

    The score is the mean query of the group times the landmark. An unfinished page, and a table
    entry beyond the sequence, scores -inf.
    """
    _groups(q_BHD, landmark_NGD.shape[1])
    _rows("tables", table_BM, len(q_BHD), ndim=2)
    _rows("lengths", lengths_B, len(q_BHD))
    _page_size(page)
    return run(
        "score_pages", _pages.score_pages, q_BHD, landmark_NGD, table_BM, lengths_B, page=page
    )


def select_pages(
    score_BGM: Tensor,
    lengths_B: Tensor,
    budgets_B: Tensor,
    *,
    page: int,
    first: int = 1,
    last: int = 2,
    width: int | None = None,
) -> PageLists:
    """Choose the pages that each row and KV head keeps under a budget of tokens.

    **The budget counts every kept token**: reserved pages and the unfinished page included. The
    `first` pages and the `last` pages (the unfinished one is the very last) are always kept, even
    under a smaller budget; of the others the best-scored ones, as many whole pages as the budget
    still pays. Kept tokens therefore never exceed max(budget, reserved tokens), and a budget of
    at least the length keeps everything. Equal scores go to the earlier page; NaN scores last.
    Lists are ascending and padded with -1 to `width` (default: M). A list longer than `width`
    is an error.
    """
    _reserved(first, last)
    _page_size(page)
    _rows("lengths", lengths_B, len(score_BGM))
    _rows("budgets", budgets_B, len(score_BGM))
    return run(
        "select_pages",
        _pages.select_pages,
        score_BGM,
        lengths_B,
        budgets_B,
        page=page,
        first=first,
        last=last,
        width=width,
    )


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
    _same_shape("k pages", k_NGPD, "v pages", v_NGPD)
    _groups(q_BHD, k_NGPD.shape[1])
    _rows("tables", table_BM, len(q_BHD), ndim=2)
    _rows("lengths", lengths_B, len(q_BHD))
    _same_head_size(q_BHD, k_NGPD)
    if lists is not None:
        _lists_fit(lists, len(q_BHD), k_NGPD.shape[1])
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
    _packed(q_THD, k_TGD, v_TGD)
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
    _same_shape("k pages", k_NGPD, "v pages", v_NGPD)
    _groups(q_THD, k_NGPD.shape[1])
    _same_head_size(q_THD, k_NGPD)
    _rows("tables", table_BM, len(lengths_B), ndim=2)
    _rows("bounds", bounds, len(lengths_B) + 1)
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
    budgets_T: Tensor,
    *,
    page: int,
    first: int = 1,
    last: int = 2,
    scale: float,
) -> Tensor:
    """Sparse causal attention of whole packed sequences at once, [T, H, D], with gradients.

    The first dense[b] tokens of sequence b (its prompt) see everything before them. Each later
    token keeps the pages that decoding would have kept when it was the newest token: scored by
    the rule of `score_pages` and chosen by that of `select_pages` under its own budget, budgets[t].
    Pages are counted from the start of each sequence. The choice itself carries no gradient. Scores
    of one token and of many are equal up to rounding, so a near tie may fall to either page.
    """
    _packed(q_THD, k_TGD, v_TGD)
    _rows("budgets", budgets_T, len(q_THD))
    _rows("bounds", bounds, len(dense_B) + 1)
    _reserved(first, last)
    _page_size(page)
    return run(
        "attend_sparse",
        _attention.attend_sparse,
        q_THD,
        k_TGD,
        v_TGD,
        bounds,
        dense_B,
        budgets_T,
        page=page,
        first=first,
        last=last,
        scale=scale,
    )


def logits(hidden_TC: Tensor, head_VC: Tensor) -> Tensor:
    """Hidden states times the LM head, [T, V] in fp32 whatever the inputs' dtype.

    For a handful of tokens; whole sequences go through the chunked ops below.
    """
    _head(hidden_TC, head_VC)
    return run("logits", _logprob.logits, hidden_TC, head_VC)


def token_stats(
    hidden_TC: Tensor,
    head_VC: Tensor,
    ids_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
) -> TokenStats:
    """Log-prob of each given token and entropy of its distribution, with gradients.

    The one log-prob function for tokens that are given. (A sampler reports the log-prob of its
    draw itself, under what it drew from; without truncation the two are equal up to rounding.)
    Works through `chunk` tokens at a time (default: 64 MiB of logits). temperature divides the
    logits; one number or one per token, above 0, without gradient.
    """
    _head(hidden_TC, head_VC)
    _rows("ids", ids_T, len(hidden_TC))
    _known_ids(ids_T, len(head_VC))
    _chunking(temperature, chunk)
    return run(
        "token_stats",
        _logprob.token_stats,
        hidden_TC,
        head_VC,
        ids_T,
        temperature=temperature,
        chunk=chunk,
    )


def top_k(
    hidden_TC: Tensor,
    head_VC: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
) -> TopK:
    """The k most likely tokens and their log-probs, best first, by chunks. No gradients."""
    _head(hidden_TC, head_VC)
    _chunking(temperature, chunk)
    if not 1 <= k <= len(head_VC):
        raise ValueError(f"k must be between 1 and the vocabulary {len(head_VC)}, got {k}")
    return run("top_k", _logprob.top_k, hidden_TC, head_VC, k, temperature=temperature, chunk=chunk)


def acceptance(
    p_TC: Tensor,
    q_TC: Tensor,
    head_VC: Tensor,
    *,
    q_head_VC: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """Exact per-token acceptance alpha = sum_v min(p(v), q(v)), [T] in [0, 1]. No gradients.

    p and q are given by final hidden states at the same positions of the same sequence, with one
    LM head or, where the two sides differ in it, with q_head for q.
    """
    _same_shape("p", p_TC, "q", q_TC)
    _head(p_TC, head_VC)
    if q_head_VC is not None:
        _same_shape("head", head_VC, "q_head", q_head_VC)
    _chunking(temperature, chunk)
    return run(
        "acceptance",
        _logprob.acceptance,
        p_TC,
        q_TC,
        head_VC,
        q_head_VC=q_head_VC,
        temperature=temperature,
        chunk=chunk,
    )


def _dims(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _same_shape(left_name: str, left: Tensor, right_name: str, right: Tensor) -> None:
    if left.shape != right.shape:
        raise ValueError(
            f"{left_name} {_dims(left)} and {right_name} {_dims(right)} must have one shape"
        )


def _rows(name: str, tensor: Tensor, expected: int, *, ndim: int = 1) -> None:
    """Whole numbers, one (or one row of them) for each of the expected rows."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tensor.ndim != ndim or len(tensor) != expected:
        raise ValueError(f"{name} must have {expected} rows, got shape {_dims(tensor)}")


def _page_size(page: int) -> None:
    if page < 1:
        raise ValueError(f"page must be at least 1 token, got {page}")


def _groups(q: Tensor, kv_heads: int) -> None:
    if q.ndim != 3 or q.shape[1] % kv_heads:
        raise ValueError(
            f"queries {_dims(q)} must be [rows, heads, head size] with heads a multiple of "
            f"the {kv_heads} KV heads"
        )


def _same_head_size(q: Tensor, k: Tensor) -> None:
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries {_dims(q)} and keys {_dims(k)} must have one head size")


def _lists_fit(lists: PageLists, rows: int, kv_heads: int) -> None:
    if lists.counts.shape != (rows, kv_heads) or lists.pages.shape[:2] != (rows, kv_heads):
        raise ValueError(
            f"page lists {_dims(lists.pages)} with counts {_dims(lists.counts)} must be for "
            f"{rows} rows and {kv_heads} KV heads"
        )


def _packed(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
    _same_shape("k", k_TGD, "v", v_TGD)
    _groups(q_THD, k_TGD.shape[1])
    _same_head_size(q_THD, k_TGD)
    if len(k_TGD) != len(q_THD):
        raise ValueError(
            f"queries {_dims(q_THD)} and keys {_dims(k_TGD)} must be of the same tokens"
        )


def _tokens_fit_pool(k_TGD: Tensor, k_NGPD: Tensor) -> None:
    if k_TGD.shape[1:] != (k_NGPD.shape[1], k_NGPD.shape[3]):
        raise ValueError(f"keys {_dims(k_TGD)} do not fit pages {_dims(k_NGPD)}")


def _reserved(first: int, last: int) -> None:
    if first < 0 or last < 1:
        raise ValueError(
            f"first must be at least 0 and last at least 1 (an unfinished page has no landmark "
            f"and is always kept), got first={first}, last={last}"
        )


def _head(hidden_TC: Tensor, head_VC: Tensor) -> None:
    if hidden_TC.ndim != 2 or head_VC.ndim != 2 or hidden_TC.shape[1] != head_VC.shape[1]:
        raise ValueError(
            f"hidden states {_dims(hidden_TC)} and LM head {_dims(head_VC)} must be "
            f"[tokens, width] and [vocabulary, width] of one width"
        )


def _known_ids(ids_T: Tensor, vocabulary: int) -> None:
    """On a GPU they are not looked at: that would wait for it."""
    if (
        len(ids_T)
        and not ids_T.is_cuda
        and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < vocabulary
    ):
        raise ValueError(f"ids must be in 0..{vocabulary - 1}, got {ids_T.min()} to {ids_T.max()}")


def _chunking(temperature: float | Tensor, chunk: int | None) -> None:
    """Values of a tensor on a GPU are not looked at: that would wait for the GPU."""
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise ValueError("temperature carries a gradient, which is not computed")
        wrong = not temperature.is_cuda and not bool((temperature > 0).all())
    else:
        wrong = not temperature > 0
    if wrong:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
