"""The device's own state of resident sequences: what a decode step needs without asking the host.

Each resident sample has a row. A step is told only which rows take part; tokens, lengths, page
tables, seeds and settings are here, and the step moves them on. The last row is a spare one for
padding: its length stays -1, so it reads and writes nothing.

R rows, M pages of a table, S stop ids; other letters as in sparrow/ops/types.py.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparrow import ops
from sparrow.engine.requests import STOPS, Sample

NO_STOP = -1


class Rows:
    """Tensors [R] or [R, ...], one row for each resident sample and a spare one."""

    def __init__(self, count: int, pages: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count + 1, *shape, dtype=dtype, device=device)

        self.spare = count
        self.device = device
        self.reset()
        self.state = ops.RowState(  # what a step reads and moves on
            token_R=zeros(),
            length_R=zeros(),
            seed_R=zeros(),
            drawn_R=zeros(),
            temperature_R=zeros(dtype=torch.float32),
            table_RM=zeros(pages, dtype=torch.int32),
        )
        self.length_R, self.table_RM = self.state.length_R, self.state.table_RM
        self.top_k_R, self.top_p_R = zeros(), zeros(dtype=torch.float32)
        self.least_R = zeros()  # tokens before which stop ids are forbidden
        self.stops_RS = zeros(STOPS)
        self.schedule_R, self.adapter_R = zeros(), zeros()
        self.length_R[self.spare] = -1

    def reset(self) -> None:
        """All rows are free."""
        self.free = list(range(self.spare - 1, -1, -1))

    def enter(self, sample: Sample) -> int:
        """Give a sample a row: it has `context.computed` tokens in its pages."""
        state, request, params = self.state, sample.request, sample.request.params
        sample.row = row = self.free.pop()
        state.length_R[row] = sample.context.computed
        state.token_R[row] = sample.tokens[-1] if sample.tokens else 0
        state.seed_R[row] = sample.seed
        state.drawn_R[row] = sample.drawn
        state.temperature_R[row] = params.temperature
        self.top_k_R[row] = params.top_k
        self.top_p_R[row] = params.top_p
        self.least_R[row] = params.min_tokens
        self.schedule_R[row] = request.schedule_slot
        self.adapter_R[row] = request.adapter_slot.slot
        if params.min_tokens:
            stops = sorted(request.stop_ids) + [NO_STOP] * (STOPS - len(request.stop_ids))
            self.stops_RS[row].copy_(self.upload(stops))
        self.table_RM[row, : len(sample.context.pages)].copy_(self.upload(sample.context.pages))
        return row

    def leave(self, sample: Sample) -> None:
        assert sample.row is not None
        self.free.append(sample.row)
        sample.row = None

    def grow(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Enter new pages into tables: (row, index in the table, page)."""
        if places:
            row_n, index_n, page_n = self.upload(places).T.unbind(0)
            self.table_RM.index_put_((row_n, index_n), page_n.int())

    def upload(self, values: npt.ArrayLike) -> Tensor:
        """Whole numbers to the device, without waiting for it."""
        host = torch.from_numpy(np.asarray(values, dtype=np.int64))
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host

    def sample(
        self, logits_BV: Tensor, at_B: Tensor, step: ops.StepInputs, *, truncated: bool
    ) -> ops.Draws:
        """Draw for these rows. Only those that cut their distribution take the longer way.

        So the bits of the others do not depend on what their neighbours asked for.
        """
        given = (logits_BV, step.seeds_B, step.counters_B, step.temperature_B)
        plain = ops.sample(*given)
        if not truncated:
            return plain
        top_k_B, top_p_B = self.top_k_R[at_B], self.top_p_R[at_B]
        early_B = step.counters_B < self.least_R[at_B]
        stops_BS = self.stops_RS[at_B].masked_fill(~early_B[:, None], NO_STOP)
        cut = ops.sample(*given, top_k_B, top_p_B, stops_BS)
        cuts_B = (top_k_B > 0) | (top_p_B < 1) | (stops_BS >= 0).any(1)
        return ops.Draws(*(torch.where(cuts_B, a, b) for a, b in zip(cut, plain, strict=True)))
