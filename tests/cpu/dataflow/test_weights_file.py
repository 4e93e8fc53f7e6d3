"""Weights for other processes: what is read is what was given, views and odd shapes included."""

import torch

from sparrow.dataflow.asynchronous.workers import WeightsFile, read_weights


def test_weights_are_read_as_they_were_given() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    weights = {
        "rows": x[1:3],
        "turned": x.t(),
        "all": x,
        "again": x,
        "number": torch.tensor(3.5),
        "none": x[:0],
        "half": x[0, :3].to(torch.bfloat16),
        "behind": x,
    }
    file = WeightsFile(weights, 1)
    found = dict(read_weights(file.path))
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].dtype == weight.dtype
        assert torch.equal(found[name], weight)
    file.rewrite({"all": x * 2, "more": x}, 2, torch.bfloat16)
    found = dict(read_weights(file.path))
    assert file.version == 2
    assert found.keys() == {"all", "more"}
    assert torch.equal(found["all"], (x * 2).to(torch.bfloat16))
    file.close()
