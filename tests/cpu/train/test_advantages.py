"""Advantages, the penalty on long answers, and dynamic sampling, by hand."""

import numpy as np
import pytest

from sparrow.training.objectives.advantages import (
    Rewards,
    batch_normalised,
    grpo,
    informative,
    mean_centred,
    overlong_penalty,
    remax,
    rloo,
)

COMPARING = [grpo, mean_centred, rloo, batch_normalised]
ALL = [*COMPARING, remax]


def group(*rewards: float, baseline: float | None = None) -> Rewards:
    return Rewards(np.array(rewards, np.float64), baseline)


def test_grpo() -> None:
    # mean 2, squared distances 4 + 0 + 4 = 8 over G - 1 = 2: std 2
    (found,) = grpo([group(0, 2, 4)])
    np.testing.assert_allclose(found, [-1, 0, 1], atol=1e-6)
    assert found[2] == 2 / 2.000001
    first, second = grpo([group(0, 2, 4), group(10, 14, 12)])
    np.testing.assert_allclose([*first, *second], [-1, 0, 1, -1, 1, 0], atol=1e-6)


def test_mean_centred_and_rloo() -> None:
    """Mean 0.5; others' means: (2 + 6) / 2 = 4, (1 + 6) / 2 = 3.5, (1 + 2) / 2 = 1.5."""
    assert mean_centred([group(1, 0, 0, 1, 0.5)])[0].tolist() == [0.5, -0.5, -0.5, 0.5, 0.0]
    np.testing.assert_allclose(rloo([group(1, 2, 6)])[0], [-3, -1.5, 4.5], rtol=1e-12)


def test_remax() -> None:
    found = remax([group(1, 0, baseline=0.25), group(1, 1, baseline=1.0)])
    assert [each.tolist() for each in found] == [[0.75, -0.25], [0.0, 0.0]]
    with pytest.raises(ValueError, match="baseline"):
        remax([group(1, baseline=0.0), group(1)])


def test_batch_normalised() -> None:
    # All of 0, 2, 4: mean 2, std 2, whatever the groups
    found = batch_normalised([group(0), group(2, 4)])
    np.testing.assert_allclose(np.concatenate(found), [-1, 0, 1], atol=1e-6)
    assert [len(each) for each in found] == [1, 2]


def test_equal_rewards_give_exactly_nothing_and_none_are_refused() -> None:
    """0.1 + 0.2 is not 0.3, and the mean of three 0.1 is not 0.1: no gradient is made of that."""
    for advantage in COMPARING:
        for rewards in ((0.1, 0.1, 0.1), (0.3, 0.1 + 0.2), (0, 0, 0, 0), (1,)):
            (found,) = advantage([group(*rewards)])
            assert found.tolist() == [0.0] * len(rewards)
        with pytest.raises(ValueError, match="reward"):
            advantage([group()])


def test_shapes_and_types() -> None:
    for advantage in ALL:
        assert advantage([]) == []
        found = advantage([group(1, 0, baseline=0.0), group(0, 0, 1, baseline=0.0)])
        assert [(x.dtype, x.shape) for x in found] == [(np.float64, (2,)), (np.float64, (3,))]


def test_overlong_penalty() -> None:
    """The paper's 20480 - 4096; without a cushion it is a step."""
    points = {0: 0.0, 16384: 0.0, 17408: -0.25, 18432: -0.5, 20480: -1.0, 20481: -1.0, 10**9: -1.0}
    for length, penalty in points.items():
        assert overlong_penalty(length, limit=20480, cushion=4096) == penalty
    assert overlong_penalty(100, limit=100, cushion=0) == 0.0
    assert overlong_penalty(101, limit=100, cushion=0) == -1.0


def test_informative() -> None:
    """Nearly right is not right."""
    for accuracies in ((1, 0), (0.9, 1.0)):
        assert informative(accuracies)
    for accuracies in ((1.0, 1.0), (0, 0), (0.5, 0.9), (1,), ()):
        assert not informative(accuracies)
