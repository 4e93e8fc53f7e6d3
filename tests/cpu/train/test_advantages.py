"""Advantages, the penalty on long answers, and dynamic sampling, by hand."""

import numpy as np
import pytest

from sparrow.train.objectives import advantages
from sparrow.train.objectives.advantages import (
    Advantage,
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


def test_grpo_of_one_right_in_four() -> None:
    # mean 0.25, squares 3 * 0.0625 + 0.5625 = 0.75, over 3: 0.25, std 0.5
    (found,) = grpo([group(1, 0, 0, 0)])
    np.testing.assert_allclose(found, [1.5, -0.5, -0.5, -0.5], atol=1e-5)


def test_groups_do_not_see_each_other() -> None:
    first, second = grpo([group(0, 2, 4), group(10, 14, 12)])
    np.testing.assert_allclose(first, [-1, 0, 1], atol=1e-6)
    np.testing.assert_allclose(second, [-1, 1, 0], atol=1e-6)


def test_mean_centred() -> None:
    (found,) = mean_centred([group(1, 0, 0, 1, 0.5)])  # mean 0.5
    assert found.tolist() == [0.5, -0.5, -0.5, 0.5, 0.0]


def test_rloo() -> None:
    # others' means: (2 + 6) / 2 = 4, (1 + 6) / 2 = 3.5, (1 + 2) / 2 = 1.5
    (found,) = rloo([group(1, 2, 6)])
    np.testing.assert_allclose(found, [-3, -1.5, 4.5], rtol=1e-12)


def test_remax() -> None:
    found = remax([group(1, 0, baseline=0.25), group(1, 1, baseline=1.0)])
    assert [each.tolist() for each in found] == [[0.75, -0.25], [0.0, 0.0]]


def test_remax_names_the_group_without_baseline() -> None:
    with pytest.raises(ValueError, match="group 1 has no baseline"):
        remax([group(1, baseline=0.0), group(1)])


def test_batch_normalised() -> None:
    # All of 0, 2, 4: mean 2, std 2, whatever the groups
    found = batch_normalised([group(0), group(2, 4)])
    np.testing.assert_allclose(np.concatenate(found), [-1, 0, 1], atol=1e-6)
    assert [len(each) for each in found] == [1, 2]


@pytest.mark.parametrize("advantage", COMPARING)
@pytest.mark.parametrize("rewards", [(0.1, 0.1, 0.1), (0.3, 0.1 + 0.2), (0, 0, 0, 0), (1,)])
def test_equal_rewards_give_exactly_nothing(
    advantage: Advantage, rewards: tuple[float, ...]
) -> None:
    """0.1 + 0.2 is not 0.3, and the mean of three 0.1 is not 0.1: no gradient is made of that."""
    (found,) = advantage([group(*rewards)])
    assert found.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("advantage", ALL)
def test_shapes_and_types(advantage: Advantage) -> None:
    assert advantage([]) == []
    found = advantage([group(1, 0, baseline=0.0), group(0, 0, 1, baseline=0.0)])
    assert [(each.dtype, each.shape) for each in found] == [(np.float64, (2,)), (np.float64, (3,))]


@pytest.mark.parametrize("advantage", COMPARING)
def test_a_group_without_rewards_is_refused(advantage: Advantage) -> None:
    with pytest.raises(ValueError, match="without rewards"):
        advantage([group()])


def test_integers_are_rewards() -> None:
    found = advantages.remax([Rewards(np.array([1, 0]), 1.0)])
    assert found[0].tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0.0),
        (16384, 0.0),  # 20480 - 4096
        (17408, -0.25),  # 1024 of 4096
        (18432, -0.5),
        (20480, -1.0),
        (20481, -1.0),
        (10**9, -1.0),
    ],
)
def test_overlong_penalty_of_the_paper(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=20480, cushion=4096) == penalty


def test_without_cushion_the_penalty_is_a_step() -> None:
    assert overlong_penalty(100, limit=100, cushion=0) == 0.0
    assert overlong_penalty(101, limit=100, cushion=0) == -1.0


@pytest.mark.parametrize("cushion", [-1, 101])
def test_cushions_that_are_refused(cushion: int) -> None:
    with pytest.raises(ValueError, match=f"got cushion {cushion}"):
        overlong_penalty(1, limit=100, cushion=cushion)


@pytest.mark.parametrize(
    ("acc", "told"),
    [
        ((1, 0), True),
        ((1.0, 1.0), False),
        ((0, 0), False),
        ((0.5, 0.9), False),  # nearly right is not right
        ((0.9, 1.0), True),
        ((1,), False),
        ((), False),
    ],
)
def test_informative(acc: tuple[float, ...], told: bool) -> None:
    assert informative(acc) is told
