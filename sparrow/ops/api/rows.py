"""Contracts of a decode step's first and last act: read the rows of its sequences, move them on.

R rows; other letters as in sparrow/ops/types.py.
"""

import torch
from torch import Tensor

from sparrow.ops.api.checks import rows as check_rows
from sparrow.ops.dispatch import run
from sparrow.ops.reference import rows as _rows
from sparrow.ops.reference.sampling import Draws
from sparrow.ops.types import RowState, StepInputs


@torch.no_grad()
def step_inputs(at_B: Tensor, rows: RowState, *, page: int, width: int) -> StepInputs:
    """What one decode step needs of the rows that take part, with tables cut to `width` pages.

    A row's newest token is at position `length` and goes to the slot that the table names there;
    lengths include it. A row of length -1 is padding: length 0, slot -1.
    """
    check_rows("rows", at_B, len(at_B))
    return run("step_inputs", _rows.step_inputs, at_B, rows, page=page, width=width)


@torch.no_grad()
def step_outputs(at_B: Tensor, draws: Draws, rows: RowState, *, advance: bool) -> Tensor:
    """Remember the draws as the rows' newest tokens, count them, and pack them as int32 [4, B].

    With `advance` the token before has gone into the cache: lengths grow by one, but those of
    padding rows stay. Packed are tokens, log-probs, entropies (floats by their bits) and ok.
    """
    check_rows("rows", at_B, len(at_B))
    return run("step_outputs", _rows.step_outputs, at_B, draws, rows, advance=advance)
