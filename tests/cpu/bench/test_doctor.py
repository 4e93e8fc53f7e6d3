"""The doctor's own checks: that they find what is wrong, and count what fits."""

import pytest
import torch

from sparrow import ops
from sparrow.bench.doctor import stages
from sparrow.models.spec import shape


def test_attention_is_right_on_this_cpu() -> None:
    found = stages.attention("float32", "cpu")
    assert found["passed"]
    assert found["device"] == "cpu"
    assert stages.attention("bfloat16", "cpu")["passed"]


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.attend_decode
    for wrong in (float("nan"), 0.5):

        def attend(*args: torch.Tensor, scale: float, wrong: float = wrong) -> torch.Tensor:
            found = right(*args, scale=scale)
            return found + wrong if ops.fastest() else found

        monkeypatch.setattr(ops, "attend_decode", attend)
        found = stages.attention("float32", "cpu")
        assert not found["passed"]
        assert found["error"] >= 0.49


def test_what_fits_by_bytes() -> None:
    nothing = stages.largest("cpu", 10**6)
    assert nothing["rollout"] is nothing["train"] is None
    spec = shape("smollm2-135m")  # the smallest: 134 515 008 weights, 30 layers of 3 x 64
    assert spec.parameters() == 134_515_008
    least = 4 * 134_515_008 + 2 * 30 * 3 * 64 * 4 * 8192
    assert stages.largest("cpu", least)["rollout"] == "smollm2-135m"
    assert stages.largest("cpu", least - 1)["rollout"] is None
    assert stages.largest("cpu", least, kv=10**6)["rollout"] is None
    large = stages.largest("cuda:0", 140 * 2**30)
    assert shape(large["train"]).parameters() <= shape(large["rollout"]).parameters()


def test_tiny_answers_with_the_same_bits() -> None:
    assert stages.self_test({})["passed"]
