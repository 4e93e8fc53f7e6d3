"""Flows: programmable sparse attention, a formula in a few lines with an interpreter and kernels.

    from sparrow.sparse.flows import D, Flow, bf16

See `flow.Flow` for what a flow is, docs/flows.md for a tour, and `library` for those that ship.
"""

from sparrow.sparse.flows.flow import Fields, Flow, Position
from sparrow.sparse.flows.formats import D, P, as_keys, bf16, fp8, fp16, fp32, int4
from sparrow.sparse.flows.tensor import (
    FlowError,
    Tensor,
    among_best,
    constant,
    convolve_over_pages,
    full,
    kron,
    logsumexp,
    mask,
    max_over_pages,
    maximum,
    mean_over_pages,
    min_over_pages,
    minimum,
    norm_over_pages,
    normalise_over_pages,
    softmax_over_pages,
    sum_over_pages,
    take,
    two_stage,
    union,
    weights,
    where,
)
