"""The sampling and row kernels against their definitions: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from support.rowstates import check_sampler, check_steps, rows_to_draw_from

pytest.importorskip("triton")
from sparrow.ops.kernels import sampling as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of NaN in interpreters


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch) -> None:
    """Several chunks in a vocabulary that the interpreter can stand."""
    monkeypatch.setattr(kernel, "CHUNK", 16)


def test_draws_are_those_of_the_definition() -> None:
    for vocabulary, spread in ((1, 1.0), (16, 30.0), (17, 0.1), (101, 3.0)):
        rows = [part.to(DEVICE) for part in rows_to_draw_from(vocabulary, spread)]
        check_sampler(kernel, rows)
    check_sampler(kernel, [rows[0].half(), *rows[1:]])


def test_cuts_are_left_to_the_definition() -> None:
    logits, ints, floats = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), torch.ones(2)
    assert kernel.supports("sample", logits, ints, ints, floats)
    assert not kernel.supports("sample", logits, ints, ints, floats, ints)
    assert not kernel.supports("sample", logits, ints, ints, floats, None, floats)
    assert not kernel.supports("sample", logits, ints, ints, floats, None, None, ints[:, None])
    assert not kernel.supports("sample", logits.double(), ints, ints, floats)


def test_row_kernels_do_what_the_definitions_do() -> None:
    check_steps(kernel, device=DEVICE)
