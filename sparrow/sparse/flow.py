"""The seam between an engine and a rule that says what to keep.

Legend of the dimension letters: sparrow/ops/types.py.
"""

from typing import Protocol

import torch
from torch import Tensor

from sparrow import ops
from sparrow.sparse.schedule import Schedule


class Flow(Protocol):
    """A selection rule: what it stores with each finished page, and which pages a token attends to.

    A flow is immutable and keeps nothing of its own between calls; all it remembers lies in the
    fields it asks for. Every method but `check` and `fields` runs inside CUDA graphs: tensors stay
    on their device, nothing waits for it, and what runs depends on shapes and the layer alone.
    """

    @property
    def name(self) -> str:
        """How schedules and completions name the rule."""

    def fields(self, head_size: int, dtype: torch.dtype) -> tuple[ops.Field, ...]:
        """Page fields that the cache must have beyond "k" and "v"; `dtype` is that of the keys."""

    def summarise(self, cache: ops.PageCache, layer: int, slots_T: Tensor) -> None:
        """Fill the fields of every page that one of these slots finishes.

        For prefill: keys and values of the slots are written already. A negative slot is padding.
        """

    def append(
        self, cache: ops.PageCache, layer: int, k_BGD: Tensor, v_BGD: Tensor, slots_B: Tensor
    ) -> None:
        """Write one token per row and fill the fields of the pages they finish: decoding.

        No two slots lie in one page, and a negative slot is padding.
        """

    def select(
        self,
        cache: ops.PageCache,
        layer: int,
        q_BHD: Tensor,
        table_BM: Tensor,
        lengths_B: Tensor,
        budgets_B: Tensor,
    ) -> ops.PageLists | None:
        """The pages that each row and KV head attends to; None where the whole layer is dense.

        Called after `append`: lengths include the current token. A budget counts every kept token,
        and one of at least the length keeps every page. None depends on the layer alone.
        """

    def check(self, schedule: Schedule, *, page: int) -> None:
        """Raise ValueError if a schedule was made for another rule than this one at this page size.

        Budgets measured with one rule say nothing about another, so none is ever adapted.
        """
