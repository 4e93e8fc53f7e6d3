"""Ops: tensors in, tensors out; a definition for each, and faster versions by device."""

from sparrow.ops.api import (
    TokenStats,
    TopK,
    acceptance,
    attend_causal,
    attend_causal_paged,
    attend_decode,
    attend_sparse,
    logits,
    score_pages,
    select_pages,
    summarise_pages,
    token_stats,
    top_k,
    write_pages,
)
from sparrow.ops.dispatch import using, versions
from sparrow.ops.types import Field, PageCache, PageLists, kv_fields, page_bytes

__all__ = [
    "Field",
    "PageCache",
    "PageLists",
    "TokenStats",
    "TopK",
    "acceptance",
    "attend_causal",
    "attend_causal_paged",
    "attend_decode",
    "attend_sparse",
    "kv_fields",
    "logits",
    "page_bytes",
    "score_pages",
    "select_pages",
    "summarise_pages",
    "token_stats",
    "top_k",
    "using",
    "versions",
    "write_pages",
]
