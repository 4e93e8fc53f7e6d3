"""The doctor's own checks: that they find what is wrong, and count what fits."""

import pytest
import torch

from sparrow import ops
from sparrow.bench.doctor import stages
from sparrow.models.spec import shape


def test_attention_is_right_on_this_cpu() -> None:
    found = stages.attention(torch.float32, "cpu")
    assert found["passed"]
    assert found["device"] == "cpu"
    assert stages.attention(torch.bfloat16, "cpu")["passed"]


@pytest.mark.parametrize("wrong", [float("nan"), 0.5])
def test_wrong_attention_is_found(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.attend_decode

    def attend(*args: torch.Tensor, scale: float) -> torch.Tensor:
        found = right(*args, scale=scale)
        return found + wrong if ops.fastest() else found

    monkeypatch.setattr(ops, "attend_decode", attend)
    found = stages.attention(torch.float32, "cpu")
    assert not found["passed"]
    assert found["error"] >= 0.49


def test_what_fits_by_bytes() -> None:
    nothing = stages._largest("cpu", 10**6)
    assert nothing["rollout"] is nothing["train"] is None
    spec = shape("smollm2-135m")  # the smallest: 134 515 008 weights, 30 layers of 3 x 64
    assert spec.parameters() == 134_515_008
    least = 4 * 134_515_008 + 2 * 30 * 3 * 64 * 4 * 8192
    assert stages._largest("cpu", least)["rollout"] == "smollm2-135m"
    assert stages._largest("cpu", least - 1)["rollout"] is None
    assert stages._largest("cpu", least, kv=10**6)["rollout"] is None
    large = stages._largest("cuda:0", 140 * 2**30)
    assert shape(large["train"]).parameters() <= shape(large["rollout"]).parameters()


def test_tiny_answers_with_the_same_bits() -> None:
    assert stages.self_test()["passed"]
