"""The doctor's own checks: that they find what is wrong, and count what fits."""

import pytest
import torch

from sparrow import ops
from sparrow.benchmarks import doctor
from sparrow.models.spec import shape
from sparrow.schema.doctor import Gpu


def test_attention_is_right_on_this_cpu() -> None:
    result = doctor.attention("float32", "cpu")
    assert result.passed
    assert result.device == "cpu"
    assert doctor.attention("bfloat16", "cpu").passed


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.attend_decode
    for wrong in (float("nan"), 0.5):

        def attend(*args: torch.Tensor, scale: float, wrong: float = wrong) -> torch.Tensor:
            result = right(*args, scale=scale)
            return result + wrong if ops.optimised_kernels_allowed() else result

        monkeypatch.setattr(ops, "attend_decode", attend)
        result = doctor.attention("float32", "cpu")
        assert not result.passed
        assert result.error >= 0.49


def test_largest_models_by_bytes() -> None:
    nothing = doctor.largest_models("cpu", 10**6)
    assert nothing.rollout is nothing.training is None
    spec = shape("smollm2-135m")  # the smallest: 134 515 008 weights, 30 layers of 3 x 64
    assert spec.parameters() == 134_515_008
    least = 4 * 134_515_008 + 2 * 30 * 3 * 64 * 4 * 8192
    assert doctor.largest_models("cpu", least).rollout == "smollm2-135m"
    assert doctor.largest_models("cpu", least).training is None
    assert doctor.largest_models("cpu", least - 1).rollout is None
    assert doctor.largest_models("cpu", least, kv_limit=10**6).rollout is None
    large = doctor.largest_models("cuda:0", 140 * 2**30)
    assert shape(large.training).parameters() < shape(large.rollout).parameters()


def test_every_device_has_its_largest_models(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(index=1, name="H", total=80, free=70 * 2**30, capability="9.0", kernels=True)
    monkeypatch.setattr(doctor, "gpus", lambda: [gpu])
    cpu, cuda = doctor.fits()
    assert (cpu.device, cuda.device, cuda.bytes) == ("cpu", "cuda:1", 70 * 2**30)
    assert list(doctor.STAGES).index("fits") < list(doctor.STAGES).index("self_test")


def test_tiny_answers_with_the_same_bits() -> None:
    assert doctor.self_test().passed
