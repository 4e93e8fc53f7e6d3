"""The paper's rule: score a page by the mean query of a group times the mean key of the page.

Legend of the dimension letters: sparrow/ops/types.py.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparrow import ops
from sparrow.sparse.schedule import Schedule

LANDMARK = "landmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMean:
    """Keep the first and the last pages, and the best of the others by block mean.

    A `Flow`; the contracts of the methods are there. Layers in `dense_layers` keep everything.
    """

    name: ClassVar[str] = "block-mean"
    first: int = 1
    last: int = 2
    dense_layers: frozenset[int] = frozenset((0, 1))

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < 1:
            raise ValueError(
                f"BlockMean: got first {self.first}, last {self.last}, allowed: "
                "first >= 0, last >= 1 (an unfinished page is always kept)"
            )

    @classmethod
    def of(cls, schedule: Schedule) -> "BlockMean":
        """The rule that a schedule was made for."""
        dense = frozenset(schedule.dense_layers)
        return cls(first=schedule.first, last=schedule.last, dense_layers=dense)

    def fields(self, head_size: int, dtype: torch.dtype) -> tuple[ops.Field, ...]:
        return (ops.Field(name=LANDMARK, shape=(head_size,), dtype=dtype),)

    def summarise(self, cache: ops.PageCache, layer: int, slots_T: Tensor) -> None:
        ops.summarise_pages(cache.field("k", layer), cache.field(LANDMARK, layer), slots_T)

    def append(
        self, cache: ops.PageCache, layer: int, k_BGD: Tensor, v_BGD: Tensor, slots_B: Tensor
    ) -> None:
        k_NGPD, v_NGPD = cache.field("k", layer), cache.field("v", layer)
        ops.append_pages(k_NGPD, v_NGPD, cache.field(LANDMARK, layer), k_BGD, v_BGD, slots_B)

    def select(
        self,
        cache: ops.PageCache,
        layer: int,
        q_BHD: Tensor,
        table_BM: Tensor,
        lengths_B: Tensor,
        budgets_B: Tensor,
    ) -> ops.PageLists | None:
        if layer in self.dense_layers:
            return None
        page, landmark_NGD = cache.page, cache.field(LANDMARK, layer)
        score_BGM = ops.score_pages(q_BHD, landmark_NGD, table_BM, lengths_B, page=page)
        return ops.select_pages(
            score_BGM, lengths_B, budgets_B, page=page, first=self.first, last=self.last
        )

    def check(self, schedule: Schedule, *, page: int) -> None:
        runs = (self.name, page, self.first, self.last, tuple(sorted(self.dense_layers)))
        made = (
            schedule.flow,
            schedule.page,
            schedule.first,
            schedule.last,
            schedule.dense_layers,
        )
        labels = ("flow", "page", "first", "last", "dense_layers")
        wrong = [
            f"{label} {have!r} (the engine runs {want!r})"
            for label, have, want in zip(labels, made, runs, strict=True)
            if have != want
        ]
        if wrong:
            raise ValueError(
                f"schedule {schedule.name!r} was made for another rule: {', '.join(wrong)}; "
                "run it with its own rule or give a schedule made for this one"
            )
