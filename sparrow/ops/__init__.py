"""Ops: functions of tensors, each with a reference definition and optimised kernels by device."""

from sparrow.ops.dispatch import optimised_kernels_allowed, settled_weights, using, versions
from sparrow.ops.reference.acceptance import Comparison, acceptance, compare
from sparrow.ops.reference.attention import (
    attend_causal,
    attend_causal_paged,
    attend_decode,
    attend_kept,
    attend_sparse,
    attend_verify,
)
from sparrow.ops.reference.divergence import divergence
from sparrow.ops.reference.layers import gate, linear_add, norm_gated, norm_linear, split_heads
from sparrow.ops.reference.logprob import TokenStats, logits, token_stats
from sparrow.ops.reference.pages import page_bits, select_pages, write_pages
from sparrow.ops.reference.sampling import (
    Draws,
    log_distribution,
    sample,
    step_inputs,
    step_outputs,
)
from sparrow.ops.reference.speculation import (
    Verification,
    accept_by_ratio,
    accept_equal,
    record_drafts,
    resample,
    verify_inputs,
    verify_outputs,
)
from sparrow.ops.types import (
    DraftState,
    Field,
    Int8Weight,
    LowRank,
    PageCache,
    PageLists,
    RowSlots,
    RowState,
    Scorer,
    Scores,
    StepInputs,
    Weight,
    kv_fields,
    page_bytes,
)
