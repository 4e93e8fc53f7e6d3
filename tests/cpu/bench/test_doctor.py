"""The doctor's own checks: that they find what is wrong."""

import pytest
import torch

from sparrow import ops
from sparrow.benchmarks import doctor


def test_attention_is_right_on_this_cpu() -> None:
    found = doctor.attention("float32", "cpu")
    assert found.passed
    assert found.device == "cpu"
    assert doctor.attention("bfloat16", "cpu").passed


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.attend_decode
    for wrong in (float("nan"), 0.5):

        def attend(*args: torch.Tensor, scale: float, wrong: float = wrong) -> torch.Tensor:
            found = right(*args, scale=scale)
            return found + wrong if ops.fastest() else found

        monkeypatch.setattr(ops, "attend_decode", attend)
        found = doctor.attention("float32", "cpu")
        assert not found.passed
        assert found.error >= 0.49


def test_tiny_answers_with_the_same_bits() -> None:
    assert doctor.self_test().passed
