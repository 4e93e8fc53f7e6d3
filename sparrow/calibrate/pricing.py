"""What schedules cost: the rollout of a workload on a machine, by bins of length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparrow.calibrate.arms import schedule_of
from sparrow.calibrate.choosing import FloatArray
from sparrow.calibrate.cost import ByteModel, Limit, Trace, limit, rollout_seconds, trace
from sparrow.calibrate.hardware import Hardware, StepModel
from sparrow.calibrate.surface import Surface, Variant
from sparrow.calibrate.workload import Workload
from sparrow.sparse.schedule import Schedule

if TYPE_CHECKING:
    from sparrow.models.spec import ModelSpec

ITEMSIZE = 2  # bytes of a number where rollouts run


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
    """By bin and budget: seconds of the rows there, and bytes read of them; and, by bin alone,
    their parts of what steps cost whoever is in them."""

    seconds: FloatArray
    read: FloatArray
    fixed: FloatArray


def prices(
    ground: Ground, variant: Variant, edges: Sequence[int], budgets: Sequence[int]
) -> Prices:
    """Of a variant under each budget, over the trace of the workload."""
    over = ground.trace(variant)
    place = places(edges, int(over.lengths.max()))
    seconds, read = [], []
    visits, fixed = _visits(over, _steps(ground, variant, budgets[0]))
    lengths = np.arange(1, len(visits))
    for budget in budgets:
        model = _steps(ground, variant, budget)
        own = np.concatenate([[0], model.reads.rows(lengths).total])
        seconds.append(np.bincount(place, model.per_row(1, len(lengths)) * visits, len(edges) - 1))
        read.append(np.bincount(place, own * visits, len(edges) - 1))
    return Prices(
        seconds=np.array(seconds, np.float64).T,
        read=np.array(read, np.float64).T,
        fixed=np.bincount(place, fixed, len(edges) - 1).astype(np.float64),
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
    reads = ground.reads(variant, schedule_of(variant, [0], [budget]))
    return StepModel(ground.hardware, reads)


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
