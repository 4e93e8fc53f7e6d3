"""Arms: what is measured side by side. A variant under a budget, a whole schedule, or dense.

A variant's budget becomes a schedule of one bin; with shares, each layer gets its multiple of it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparrow.models import ModelSpec
from sparrow.schema.base import Int32Array, to_dict
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.schema.surface import Variant
from sparrow.sparse.flows.flow import Flow, trace
from sparrow.sparse.flows.library import block_mean

DENSE_ARM = "dense"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arm:
    """One way to attend; dense without a schedule. Arms of equal content, `key`, are equal."""

    name: str
    flow: Flow = block_mean
    variant: str = DENSE_ARM
    budget: int | None = None
    schedule: Schedule | None = None
    digest: str = ""  # of the flow's program
    given: bool = False  # measured on given sequences, whatever the calibration's mode
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _key(self.schedule, self.digest, self.given))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arm) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _key(schedule: Schedule | None, digest: str, given: bool) -> str:
    if schedule is None:
        return DENSE_ARM
    about = to_dict(schedule) | {"name": "", "provenance": [], "digest": digest}
    text = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return f"given-{text}" if given else text


DENSE = Arm(name=DENSE_ARM)


def variant_of(
    flow: Flow, source: str, spec: ModelSpec, *, name: str | None = None, **configuration: Any
) -> Variant:
    """A flow for a model, in a configuration: page, first, last, dense_layers, shares."""
    plain = Variant(
        name=name or flow.name,
        flow=flow.name,
        source=source,
        digest="",
        field_bytes=0,
        **configuration,
    )
    program = trace(flow, plain.page, spec.head_size, spec.heads // spec.kv_heads)
    stored = program.bytes(torch.bfloat16)
    return plain.replace(digest=program.digest, flow_digest=flow.digest, field_bytes=stored)


def arm(variant: Variant, flow: Flow, budget: int) -> Arm:
    """A variant under one budget at every length."""
    return Arm(
        name=f"{variant.name}, {budget} tokens",
        flow=flow,
        variant=variant.name,
        budget=budget,
        schedule=schedule_of(variant, [0], [budget]),
        digest=variant.digest,
    )


def schedule_of(
    variant: Variant, lengths: Sequence[int], budgets: Sequence[int], **fields: Any
) -> Schedule:
    """A variant's schedule; budgets of single layers follow from its shares."""
    common = np.asarray(budgets, dtype=np.int32)
    fields = {"name": f"{variant.name}-{budgets[0]}"} | fields
    return Schedule(
        lengths=np.asarray(lengths),
        budgets=common,
        layers=tuple(
            LayerBudgets(layer=layer, budgets=share_of(variant, common, share))
            for layer, share in enumerate(variant.shares)
            if layer not in variant.dense_layers and share != 1
        ),
        flow=variant.flow,
        flow_digest=variant.flow_digest,
        page=variant.page,
        first=variant.first,
        last=variant.last,
        dense_layers=variant.dense_layers,
        **fields,
    )


def share_of(variant: Variant, budgets: Int32Array, share: float) -> Int32Array:
    """A multiple of budgets in whole pages, never less than the pages that are always kept."""
    page, most = variant.page, 2**31 - 1
    least = (variant.first + variant.last) * page
    pages = np.rint(budgets.astype(np.float64) * share / page).astype(np.int64) * page
    return np.where(budgets == most, most, np.clip(pages, least, most)).astype(np.int32)
