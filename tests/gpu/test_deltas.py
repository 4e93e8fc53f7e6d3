"""Weight deltas on the device that has the weights: the same digests and bytes as on the host."""

import pytest
import torch

from sparrow.models import deltas
from sparrow.models.deltas import Delta, digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_delta_is_the_same_on_both_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "CHUNK", 1000)  # several, and one that is not full
    generator = torch.Generator().manual_seed(0)
    base = {n: torch.randn(s, generator=generator).bfloat16() for n, s in (("a", 5003), ("b", 7))}
    new = {n: torch.where(torch.rand(w.shape) < 0.1, w * 1.5, w) for n, w in base.items()}
    there = [{n: w.cuda() for n, w in weights.items()} for weights in (base, new)]
    assert [digest(weights) for weights in there] == [digest(base), digest(new)]
    host = Delta.between(base, new, base_version=0, version=1)
    device = Delta.between(*there, base_version=0, version=1)
    assert device.encode() == host.encode()
    assert Delta.decode(host.encode()).apply(there[0]) == digest(new)
    assert all(torch.equal(there[0][name].cpu(), new[name]) for name in new)
    whole = {name: torch.zeros_like(weight) for name, weight in there[1].items()}
    Delta.whole(new, version=1).apply(whole)
    assert all(torch.equal(whole[name].cpu(), new[name]) for name in new)
