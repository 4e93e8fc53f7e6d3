"""Arms: what is measured side by side. A variant under a budget, a whole schedule, or dense."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparrow.models import ModelSpec
from sparrow.schema.base import to_dict
from sparrow.schema.schedule import Schedule
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


def arm(
    variant: Variant,
    flow: Flow,
    budget: int | None,
    *,
    name: str | None = None,
    schedule: Schedule | None = None,
    given: bool = False,
) -> Arm:
    """A variant under one budget at every length, or under another schedule of its rule."""
    if schedule is None:
        assert budget is not None
        schedule = variant.schedule([0], [budget])
    return Arm(
        name=name or f"{variant.name}, {budget} tokens",
        flow=flow,
        variant=variant.name,
        budget=budget,
        schedule=schedule,
        digest=variant.digest,
        given=given,
    )


def layers_alone(
    variant: Variant, flow: Flow, budget: int, group: Sequence[int], layers: int
) -> Arm:
    """The variant with every layer dense but these, on sequences that are given."""
    dense = tuple(layer for layer in range(layers) if layer not in group)
    alone = variant.replace(dense_layers=dense, shares=())
    name = f"layers {group[0]} to {group[-1]} alone, {budget} tokens"
    return arm(alone, flow, budget, name=name, given=True)
