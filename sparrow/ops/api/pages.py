"""Contracts of the page operations: write, summarise, append, score, select.

Legend of the dimension letters: sparrow/ops/types.py. Integer tensors may be int32 or int64. A page
is P tokens; a *slot* is page * P + offset; a negative slot or a length of 0 is padding and has no
effect.
"""

from torch import Tensor

from sparrow.ops.api.checks import (
    budgets_fit,
    groups,
    landmarks_fit,
    page_size,
    reserved,
    rows,
    same_shape,
    share_of_mass,
    tokens_fit_pool,
)
from sparrow.ops.dispatch import run
from sparrow.ops.reference import pages as _pages
from sparrow.ops.types import PageLists


def write_pages(
    k_NGPD: Tensor, v_NGPD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor
) -> None:
    """Write the keys and values of T tokens into their slots, in place.

    Slots that are not negative must differ from each other.
    """
    same_shape("k pages", k_NGPD, "v pages", v_NGPD)
    same_shape("k", k_TGD, "v", v_TGD)
    tokens_fit_pool(k_TGD, k_NGPD)
    rows("slots", slots_T, len(k_TGD))
    run("write_pages", _pages.write_pages, k_NGPD, v_NGPD, k_TGD, v_TGD, slots_T)


def summarise_pages(k_NGPD: Tensor, landmark_NGD: Tensor, slots_T: Tensor) -> None:
    """Store the landmark of every page that one of these slots finishes, in place.

    Call after `write_pages` with the same slots. The landmark is the mean key of the page, summed
    in fp32. Pages fill from the front, so a token in a page's last slot finishes it; other pages
    keep what landmark they had.
    """
    rows("slots", slots_T, len(slots_T))
    landmarks_fit(landmark_NGD, k_NGPD)
    run("summarise_pages", _pages.summarise_pages, k_NGPD, landmark_NGD, slots_T)


def append_pages(
    k_NGPD: Tensor,
    v_NGPD: Tensor,
    landmark_NGD: Tensor,
    k_BGD: Tensor,
    v_BGD: Tensor,
    slots_B: Tensor,
) -> None:
    """Write one token per sequence and store the landmarks of the pages they finish, in place.

    `write_pages` and `summarise_pages` in one, for decoding: no two slots may lie in one page.
    """
    same_shape("k pages", k_NGPD, "v pages", v_NGPD)
    same_shape("k", k_BGD, "v", v_BGD)
    tokens_fit_pool(k_BGD, k_NGPD)
    landmarks_fit(landmark_NGD, k_NGPD)
    rows("slots", slots_B, len(k_BGD))
    run(
        "append_pages",
        _pages.append_pages,
        k_NGPD,
        v_NGPD,
        landmark_NGD,
        k_BGD,
        v_BGD,
        slots_B,
    )


def score_pages(
    q_BHD: Tensor, landmark_NGD: Tensor, table_BM: Tensor, lengths_B: Tensor, *, page: int
) -> Tensor:
    """Score every finished page by the block-mean rule, fp32 [B, G, M].

    The score is the mean query of the group times the landmark. An unfinished page, and a table
    entry beyond the sequence, scores -inf.
    """
    groups(q_BHD, landmark_NGD.shape[1])
    rows("tables", table_BM, len(q_BHD), ndim=2)
    rows("lengths", lengths_B, len(q_BHD))
    page_size(page)
    return run(
        "score_pages", _pages.score_pages, q_BHD, landmark_NGD, table_BM, lengths_B, page=page
    )


def select_pages(
    score_BGM: Tensor,
    lengths_B: Tensor,
    budgets: Tensor,
    *,
    page: int,
    first: int = 1,
    last: int = 2,
    width: int | None = None,
    mass: float | None = None,
) -> PageLists:
    """Choose the pages that each row and KV head keeps under a budget of tokens.

    budgets are per row, [B], or per row and KV head, [B, G].

    **The budget counts every kept token**: reserved pages and the unfinished page included. The
    `first` pages and the `last` pages (the unfinished one is the very last) are always kept, even
    under a smaller budget; of the others the best-scored ones, as many whole pages as the budget
    still pays. Kept tokens therefore never exceed max(budget, reserved tokens), and a budget of
    at least the length keeps everything. Equal scores go to the earlier page; NaN scores last.
    Lists are ascending and padded with -1 to `width` (default: M). A list longer than `width`
    is an error.

    With `mass`, a share above 0 and up to 1, scores are masses (a negative or NaN score is none,
    and an unfinished page has none), and the choice may end earlier: after the reserved pages, the
    best others are added until what is kept, reserved pages included, holds at least that share of
    the mass of all finished pages, or the budget is spent. A budget of 2**31 - 1 (DENSE) is that of
    a dense row in a batch of sparse ones: it keeps everything, whatever the mass. Sums are in fp32,
    so versions may differ by a page where the share is met within rounding.
    """
    reserved(first, last)
    page_size(page)
    share_of_mass(mass)
    rows("lengths", lengths_B, len(score_BGM))
    budgets_fit(budgets, *score_BGM.shape[:2])
    return run(
        "select_pages",
        _pages.select_pages,
        score_BGM,
        lengths_B,
        budgets,
        page=page,
        first=first,
        last=last,
        width=width,
        mass=mass,
    )
