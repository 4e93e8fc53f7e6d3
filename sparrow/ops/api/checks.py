"""Checks of shapes and types that contracts share; values only where that waits for no GPU."""

import torch
from torch import Tensor

from sparrow.ops.types import PageLists


def dims(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def same_shape(left_name: str, left: Tensor, right_name: str, right: Tensor) -> None:
    if left.shape != right.shape:
        raise ValueError(
            f"{left_name} {dims(left)} and {right_name} {dims(right)} must have one shape"
        )


def rows(name: str, tensor: Tensor, expected: int, *, ndim: int = 1) -> None:
    """Whole numbers, one (or one row of them) for each of the expected rows."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tensor.ndim != ndim or len(tensor) != expected:
        raise ValueError(f"{name} must have {expected} rows, got shape {dims(tensor)}")


def budgets_fit(budgets: Tensor, row_count: int, kv_heads: int) -> None:
    """Whole numbers, one for each row, or one for each row and KV head."""
    rows("budgets", budgets, row_count, ndim=2 if budgets.ndim == 2 else 1)
    if budgets.ndim == 2 and budgets.shape[1] != kv_heads:
        raise ValueError(
            f"budgets {dims(budgets)} must be for {row_count} rows, or for these and "
            f"{kv_heads} KV heads"
        )


def share_of_mass(mass: float | None) -> None:
    if mass is not None and not 0 < mass <= 1:
        raise ValueError(f"mass must be above 0 and at most 1, got {mass}")


def page_size(page: int) -> None:
    if page < 1:
        raise ValueError(f"page must be at least 1 token, got {page}")


def groups(q: Tensor, kv_heads: int) -> None:
    if q.ndim != 3 or q.shape[1] % kv_heads:
        raise ValueError(
            f"queries {dims(q)} must be [rows, heads, head size] with heads a multiple of "
            f"the {kv_heads} KV heads"
        )


def same_head_size(q: Tensor, k: Tensor) -> None:
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries {dims(q)} and keys {dims(k)} must have one head size")


def lists_fit(lists: PageLists, rows: int, kv_heads: int) -> None:
    if lists.counts.shape != (rows, kv_heads) or lists.pages.shape[:2] != (rows, kv_heads):
        raise ValueError(
            f"page lists {dims(lists.pages)} with counts {dims(lists.counts)} must be for "
            f"{rows} rows and {kv_heads} KV heads"
        )


def packed(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
    same_shape("k", k_TGD, "v", v_TGD)
    groups(q_THD, k_TGD.shape[1])
    same_head_size(q_THD, k_TGD)
    if len(k_TGD) != len(q_THD):
        raise ValueError(f"queries {dims(q_THD)} and keys {dims(k_TGD)} must be of the same tokens")


def tokens_fit_pool(k_TGD: Tensor, k_NGPD: Tensor) -> None:
    if k_TGD.shape[1:] != (k_NGPD.shape[1], k_NGPD.shape[3]):
        raise ValueError(f"keys {dims(k_TGD)} do not fit pages {dims(k_NGPD)}")


def landmarks_fit(landmark_NGD: Tensor, k_NGPD: Tensor) -> None:
    if landmark_NGD.shape != k_NGPD.shape[:2] + k_NGPD.shape[3:]:
        raise ValueError(f"landmarks {dims(landmark_NGD)} do not fit k pages {dims(k_NGPD)}")


def reserved(first: int, last: int) -> None:
    if first < 0 or last < 1:
        raise ValueError(
            f"first must be at least 0 and last at least 1 (an unfinished page has no landmark "
            f"and is always kept), got first={first}, last={last}"
        )


def head(hidden_TC: Tensor, head_VC: Tensor) -> None:
    if hidden_TC.ndim != 2 or head_VC.ndim != 2 or hidden_TC.shape[1] != head_VC.shape[1]:
        raise ValueError(
            f"hidden states {dims(hidden_TC)} and LM head {dims(head_VC)} must be "
            f"[tokens, width] and [vocabulary, width] of one width"
        )


def known_ids(ids_T: Tensor, vocabulary: int) -> None:
    """On a GPU they are not looked at: that would wait for it."""
    if (
        len(ids_T)
        and not ids_T.is_cuda
        and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < vocabulary
    ):
        raise ValueError(f"ids must be in 0..{vocabulary - 1}, got {ids_T.min()} to {ids_T.max()}")


def chunking(temperature: float | Tensor, chunk: int | None) -> None:
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
