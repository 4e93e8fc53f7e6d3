"""Two processes against one: the same log-probs, gradients, updates and checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import PATIENCE, on_ranks
from support.sharded import CASES, CLIP, copied, everything, resumable, stating

from sparrow.training.world import World

Results = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    torch.save(stating(World())["state"], found / "alone.pt")
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> Results:
    return everything(World(), folder)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Results]:
    return on_ranks(everything, folder)


def assert_close(found: Results, wanted: Results, **tolerances: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, **tolerances, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_ranks_read_what_one_process_reads(alone: Results, ranks: list[Results]) -> None:
    """Alphas of watched samples too, whose states one rank alone has."""
    for found in ranks:
        assert len(found["read"]) == len(alone["read"]) == 7
        for one, other in zip(found["read"], alone["read"], strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    np.testing.assert_allclose(mine, theirs, atol=1e-5)
        assert [one[2] is not None for one in found["read"]] == [n in (1, 3, 4) for n in range(7)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(
    alone: Results, ranks: list[Results], case: str, recompute: bool
) -> None:
    for found in ranks:
        mine, wanted = (one["gradients"][case, recompute] for one in (found, alone))
        assert_close(mine, wanted, atol=1e-5, rtol=1e-4)
    assert max(float(value.abs().max()) for value in wanted.values()) > 0.01  # not all zero


def test_updates_are_those_of_one_process(alone: Results, ranks: list[Results]) -> None:
    """Three of them, clipped.

    AdamW divides a gradient by its size: where one is all but zero, its rounding decides the sign
    of a whole step. So nearly all weights agree closely, and none is off by more than three steps
    of 1e-3 there and back.
    """
    for found in ranks:
        for mine, theirs in zip(found["updates"]["stats"], alone["updates"]["stats"], strict=True):
            assert mine.gradient == pytest.approx(theirs.gradient, rel=1e-3)
            assert mine.gradient > 2 * CLIP
            assert mine.loss == pytest.approx(theirs.loss, abs=1e-4)
            assert mine.kl == pytest.approx(theirs.kl, abs=1e-4)
            assert (mine.rate, mine.skipped) == (theirs.rate, False)
        gaps = torch.cat(
            [
                (found["updates"]["weights"][name] - weight).abs().flatten()
                for name, weight in alone["updates"]["weights"].items()
            ]
        )
        assert gaps.max() < 6e-3
        assert gaps.quantile(0.99) < 1e-4
    first, second = (one["updates"] for one in ranks)
    assert first["stats"] == second["stats"]
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name])


def test_what_is_no_number_on_one_rank_is_skipped_on_all(
    alone: Results, ranks: list[Results]
) -> None:
    for found in (alone, *ranks):
        assert found["skipped"] == {"skipped": [True, True], "same": True, "after": False}


def test_an_update_without_a_gradient_moves_no_weight_on_any_rank(
    alone: Results, ranks: list[Results]
) -> None:
    for found in (alone, *ranks):
        assert found["no signal"] == {"no signal": True, "same": True}


def test_the_kl_term_is_that_of_one_process(alone: Results, ranks: list[Results]) -> None:
    for found in ranks:
        for mine, theirs in zip(found["kl"]["references"], alone["kl"]["references"], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        for name in ("kl", "gradient"):
            assert found["kl"][name] == pytest.approx(alone["kl"][name], rel=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_ranks_measure_how_far_an_update_moved_the_policy(
    alone: Results, ranks: list[Results], case: str
) -> None:
    wanted = alone["moved"][case]
    assert wanted[0] == 0
    assert wanted[1] > 1e-4
    first, second = (found["moved"][case] for found in ranks)
    assert first == second
    assert first == pytest.approx(wanted, rel=1e-2)


def test_ranks_take_up_the_state_of_one_process_and_the_reverse(
    folder: Path, ranks: list[Results]
) -> None:
    state = torch.load(folder / "alone.pt", weights_only=False)
    wanted = resumable(World(), copied(state))
    for found in ranks:
        mine = found["restored"]
        assert mine["taken"] == 2
        assert_close(mine["state"]["weights"], state["weights"], atol=0, rtol=0)
        for number, moments in state["moments"].items():
            assert_close(mine["state"]["moments"][number], moments, atol=0, rtol=0)
        assert_near(mine["weights"], wanted["weights"])
    own = resumable(World(), copied(ranks[1]["state"]["state"]))
    assert own["taken"] == 2
    assert_near(own["weights"], ranks[1]["state"]["weights"])


def assert_near(found: Results, wanted: Results) -> None:
    """After one update from equal states: see above for why not all are equal closely."""
    gaps = torch.cat([(found[name] - weight).abs().flatten() for name, weight in wanted.items()])
    assert gaps.max() < 2e-3
    assert gaps.quantile(0.99) < 1e-5


def test_16_bits_round_alike_and_weights_stay_float32(ranks: list[Results]) -> None:
    for found in ranks:
        assert found["rounding"] == {"equal": [True, True], "kinds": {"torch.float32"}}


def test_where_one_rank_fails_all_fail_and_name_it(ranks: list[Results]) -> None:
    first, second = (one["failing"] for one in ranks)
    assert first["second"] == "ValueError: rank 1 failed: OSError: the dog ate it"
    assert second["second"] == "OSError: the dog ate it"
    assert first["first"] == "ValueError: no space"
    assert second["first"] == "ValueError: rank 0 failed: ValueError: no space"
    assert first["shared"] == second["shared"] == "ValueError: rank 0: no space"
    assert first["none"] == second["none"] == "no error: 7"


@pytest.mark.parametrize(("fault", "seconds"), [("late", 1), ("ended", PATIENCE)])
def test_nobody_waits_for_a_rank_that_does_not_come(
    ranks: list[Results], fault: str, seconds: int
) -> None:
    told = ranks[0]["meeting"][fault]
    begin = f"ValueError: one of 2 ranks has ended, or did not respond within {seconds} s"
    assert told.startswith(begin)
    assert fault == "ended" or "anks 1 failed" in told
