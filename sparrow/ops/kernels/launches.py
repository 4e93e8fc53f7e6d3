"""How the products of sparrow/ops/kernels/linear.py are launched, by shape.

The figures come from one kind of GPU, an H200, and whole decode steps; they change speed alone.
There every launch overlaps the one before, and that paid only where a program takes more than half
of a processor's shared memory (smaller ones were slower than without overlap, presumably because
two of one launch then crowd on the first processor with room).
"""

from dataclasses import dataclass
from typing import Any

import triton

PROCESSORS = 132
LEAST_SPAN = 256  # of the depth, for one of several splits


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a product is cut: columns of a program, depth of a step, programs along the depth."""

    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 3

    @property
    def options(self) -> dict[str, Any]:
        """As arguments of a kernel's launch."""
        return {
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "SPLITS": self.splits,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# (op, tokens of the tile, width, depth) -> what was fastest there. Other shapes go by the rule, of
# which only Qwen3-1.7B's shapes were measured.
LAUNCHES: dict[tuple[str, int, int, int], Launch] = {
    ("logits", 32, 151_936, 2048): Launch(columns=64, depth=128, stages=4),
    ("logits", 64, 151_936, 2048): Launch(columns=128, depth=64, stages=6),
}


def launch_for(op: str, tokens: int, width: int, depth: int) -> Launch:
    """The measured launch of a shape, or about one program per processor of a large GPU."""
    if (op, tile(tokens), width, depth) in LAUNCHES:
        return LAUNCHES[op, tile(tokens), width, depth]
    rows, programs, gated = tile(tokens), triton.cdiv(width, 64), op == "norm_gated"
    if programs > PROCESSORS:  # many rounds: two programs a processor take turns
        return Launch(columns=64, depth=128, stages=3 if gated or rows > 16 else 4)
    splits = max(1, min(PROCESSORS // programs, depth // LEAST_SPAN))
    if rows == 16 or (rows == 32 and not gated):
        return Launch(columns=64, depth=256, splits=splits)
    return Launch(columns=64, depth=128, splits=splits, stages=3 if gated and rows > 32 else 4)


def tile(tokens: int) -> int:
    """Rows of the token tile: a power of two that the matrix units take."""
    return max(16, triton.next_power_of_2(tokens))
