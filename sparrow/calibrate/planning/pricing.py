"""What schedules cost: the rollout of a workload on a machine, by bins of length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparrow.calibrate.arms import schedule_of
from sparrow.calibrate.planning.choosing import FloatArray
from sparrow.calibrate.planning.cost import ByteModel, Limit, Trace, limit, rollout_seconds, trace
from sparrow.calibrate.planning.hardware import Hardware, StepModel
from sparrow.calibrate.planning.workload import Workload
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface, Variant

if TYPE_CHECKING:
    from sparrow.models.spec import ModelSpec

ITEMSIZE = 2  # bytes of a number where rollouts run
EVERYTHING = 2**24  # tokens: more than any context has, in every layer's share of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What plans of one surface share: the model, the machine, and who runs when."""

    surface: Surface
    spec: "ModelSpec"
    hardware: Hardware
    workload: Workload

    def reads(self, variant: Variant, schedule: Schedule | None) -> ByteModel:
        return ByteModel(
            spec=self.spec,
            schedule=schedule,
            itemsize=ITEMSIZE,
            page=variant.page,
            field_bytes=variant.field_bytes,
        )

    def trace(self, variant: Variant) -> Trace:
        """Who runs beside whom; memory holds the variant's landmarks too."""
        held = self.reads(variant, None)
        return trace(
            self.workload.lengths,
            prompt=self.workload.shortest_prompt,
            capacity=self.hardware.capacity(held),
            page=variant.page,
            most=self.workload.most,
        )


class Prices(NamedTuple):
    """By bin and budget: seconds of the rows there, and bytes read of them. By bin alone: their
    parts of what steps cost whoever is in them, and the bytes that dense rows would read."""

    seconds: FloatArray
    read: FloatArray
    fixed: FloatArray
    dense_read: FloatArray


def prices(
    ground: Ground, variant: Variant, edges: Sequence[int], budgets: Sequence[int]
) -> Prices:
    """Of a variant under each budget, over the trace of the workload."""
    over = ground.trace(variant)
    place = places(edges, int(over.lengths.max()))
    visits, fixed = _visits(over, _steps(ground, variant, budgets[0]))
    lengths = np.arange(1, len(visits))

    def by_bin(figures: FloatArray) -> FloatArray:
        return np.bincount(place, figures, len(edges) - 1).astype(np.float64)

    def bytes_of(reads: ByteModel) -> FloatArray:
        return by_bin(np.concatenate([[0], reads.rows(lengths).total]) * visits)

    models = [_steps(ground, variant, budget) for budget in budgets]
    return Prices(
        seconds=np.array([by_bin(m.per_row(1, len(lengths)) * visits) for m in models]).T,
        read=np.array([bytes_of(model.reads) for model in models]).T,
        fixed=by_bin(fixed),
        dense_read=bytes_of(ground.reads(variant, None)),
    )


def dense_seconds(ground: Ground, variant: Variant, edges: Sequence[int]) -> FloatArray:
    """Seconds of the same trace by an engine that is dense, by bin."""
    over = ground.trace(variant)
    model = StepModel(ground.hardware, ground.reads(variant, None))
    visits, fixed = _visits(over, model)
    longest = int(over.lengths.max())
    spent = model.per_row(1, longest) * visits + fixed
    return np.bincount(places(edges, longest), spent, len(edges) - 1).astype(np.float64)


def places(edges: Sequence[int], longest: int) -> np.ndarray:
    """The bin of every total length from 0 on; lengths beyond the edges are in the last one."""
    found = np.searchsorted(edges, np.arange(longest + 1), side="right") - 1
    return np.clip(found, 0, len(edges) - 2)


def _steps(ground: Ground, variant: Variant, budget: int) -> StepModel:
    """Rows under a budget; those that keep everything are priced as lists of all their pages."""
    made = schedule_of(variant, [0], [min(budget, EVERYTHING)])
    return StepModel(ground.hardware, ground.reads(variant, made))


def _visits(over: Trace, model: StepModel) -> tuple[FloatArray, FloatArray]:
    """By total length: steps that rows make there, and their parts of the steps' fixed seconds."""
    longest = int(over.lengths.max())
    visits, fixed = np.zeros(longest + 1), np.zeros(longest + 1)
    for lengths in over.chunks():
        rows = lengths.shape[1]
        alone = model(lengths) - model.per_row(rows, longest)[lengths].sum(axis=1)
        np.add.at(visits, lengths, 1.0)
        np.add.at(fixed, lengths, (alone / rows)[:, None])
    return visits, fixed


def rollout(ground: Ground, variant: Variant, schedule: Schedule) -> float:
    """Seconds that the workload takes under any schedule."""
    model = StepModel(ground.hardware, ground.reads(variant, schedule))
    return rollout_seconds(ground.trace(variant), model)


def limit_of(ground: Ground, variant: Variant, schedule: Schedule) -> Limit:
    """What bytes alone allow, at the machine's published rate."""
    hardware, workload = ground.hardware, ground.workload
    return limit(
        ground.spec,
        schedule,
        workload.lengths,
        prompt=workload.shortest_prompt,
        memory=hardware.memory,
        reserve=hardware.reserve,
        bytes_per_s=hardware.bytes_per_s,
        itemsize=ITEMSIZE,
        field_bytes=variant.field_bytes,
        most=workload.most,
    )
