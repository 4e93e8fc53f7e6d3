"""CUDA graphs of decode steps, captured on first use and replayed.

A graph has one shape: a batch bucket, a width of page tables, and which parts of the step take
part. Everything it reads and writes has a fixed address; its one input is copied in before the
replay. Capturing runs the step on spare rows alone, so no sequence notices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Captured page-table widths: attention is launched for this many pages, so a short context does
# not pay for the longest one.
PAGES = (32, 128, 512, 1024, 1536, 2048)


def batch_bucket(batch: int) -> int:
    """1, 2, 4, 8, 16, then also the sizes halfway between powers of two."""
    size = 1
    while size < batch:
        size *= 2
    between = size * 3 // 4
    return between if size > 16 and batch <= between else size


def pages_bucket(pages: int, most: int) -> int:
    return min(next((width for width in PAGES if width >= pages), most), most)


@dataclass(slots=True)
class Captured:
    """A graph, its input and output, and the rows that the input names now."""

    graph: torch.cuda.CUDAGraph
    input_B: Tensor
    output: Any
    rows: list[int]


class Graphs:
    """Captured steps by kind."""

    def __init__(self, device: torch.device, spare: int) -> None:
        self.device, self.spare = device, spare
        self._captured: dict[Any, Captured] = {}
        self._memory: Any = None

    def run(
        self,
        kind: Any,
        rows: list[int],
        upload: Callable[[list[int]], Tensor],
        step: Callable[[Any, Tensor], Any],
    ) -> Any:
        """Replay the step of this kind for these rows; capture it first if it is new.

        Rows are uploaded only where they differ from the last time. What comes back is overwritten
        by the next replay.
        """
        if kind not in self._captured:
            self._captured[kind] = self._capture(kind, step)
        captured = self._captured[kind]
        if captured.rows != rows:
            captured.input_B.copy_(upload(rows))
            captured.rows = rows
        captured.graph.replay()
        return captured.output

    def _capture(self, kind: Any, step: Callable[[Any, Tensor], Any]) -> Captured:
        input_B = torch.full((kind.batch,), self.spare, dtype=torch.int64, device=self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            step(kind, input_B)  # compiles kernels, which a capture must not
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = step(kind, input_B)
        self._memory = graph.pool()
        return Captured(graph, input_B, output, [self.spare] * kind.batch)
