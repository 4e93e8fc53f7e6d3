"""The rate along its three lines, and decay for matrices alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

from sparrow import models
from sparrow.schema.train import OptimiserConfig
from sparrow.train.optimiser import adamw, rate_at

RATE = 0.5  # exact in binary, as are the powers of two below


def config(**changes: Any) -> OptimiserConfig:
    return OptimiserConfig(**{"rate": RATE, "warm_up": 4, "decay": 8, "final": 0.5, **changes})


def rates(steps: int, **changes: Any) -> list[float]:
    return [rate_at(config(**changes), step, steps) / RATE for step in range(steps)]


def model() -> models.Decoder:
    sizes = {"layers": 1, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1}
    return models.random("qwen3-0.6b", **sizes, head_size=8, vocabulary=32, max_positions=64)


def test_up_level_and_down() -> None:
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    expected += [1 - eighths / 16 for eighths in range(1, 9)]
    assert rates(16) == expected


def test_the_first_step_moves_and_the_last_has_the_final_rate() -> None:
    found = rates(100, warm_up=10, decay=20, final=0.125)
    assert found[0] == 0.1
    assert found[9:80] == [1.0] * 71
    assert found[-1] == 0.125
    assert all(a > b for a, b in pairwise(found[79:]))


def test_no_warm_up() -> None:
    assert rates(16, warm_up=0)[:9] == [1.0] * 8 + [1 - 1 / 16]


def test_no_decay() -> None:
    assert rates(8, decay=0) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_neither() -> None:
    assert rates(5, warm_up=0, decay=0) == [1.0] * 5


def test_a_decay_longer_than_the_run_begins_below_the_rate() -> None:
    """The line ends at the last step; its beginning lies before the first."""
    assert rates(4, warm_up=0, decay=8, final=0.0) == [3 / 8, 2 / 8, 1 / 8, 0]
    assert rates(1, warm_up=0, decay=8, final=0.25) == [0.25]


def test_where_the_lines_cross_the_lower_one_counts() -> None:
    found = rates(8, warm_up=8, decay=8, final=0.0)
    assert found == [eighths / 8 for eighths in (1, 2, 3, 4, 3, 2, 1, 0)]


def test_a_warm_up_longer_than_the_run() -> None:
    assert rates(4, warm_up=16, decay=0) == [1 / 16, 2 / 16, 3 / 16, 4 / 16]


def test_matrices_decay_and_vectors_do_not() -> None:
    """With gradients of 0, the decay is all that is left of a step."""
    own = model()
    before = {name: weight.detach().clone() for name, weight in own.named_parameters()}
    optimiser = adamw(own, config(weight_decay=0.25))
    for weight in own.parameters():
        weight.grad = torch.zeros_like(weight)
    optimiser.step()
    kinds = set()
    for name, weight in own.named_parameters():
        kinds.add(weight.ndim)
        share = 1 - RATE * 0.25 if weight.ndim > 1 else 1.0
        torch.testing.assert_close(weight.detach(), before[name] * share, msg=name)
    assert kinds == {1, 2}


def test_every_parameter_is_in_one_group() -> None:
    own = model()
    optimiser = adamw(own, config(beta1=0.5, beta2=0.75))
    grouped = [id(weight) for group in optimiser.param_groups for weight in group["params"]]
    assert sorted(grouped) == sorted(id(weight) for weight in own.parameters())
    assert {group["betas"] for group in optimiser.param_groups} == {(0.5, 0.75)}
