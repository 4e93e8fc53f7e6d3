"""The row kernels, in the interpreter."""

import pytest

pytest.importorskip("triton")

from support.rowstates import check_steps

from sparrow.ops.kernels import rows


def test_row_kernels_do_what_the_definitions_do() -> None:
    check_steps(rows, device="cuda" if _gpu() else "cpu")


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()
