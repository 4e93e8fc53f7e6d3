"""What ranks share, as far as one process can tell."""

import pytest
import torch

from sparrow.train.world import World, dealt, join_world, own_device, own_rank


def ranks(monkeypatch: pytest.MonkeyPatch, size: int, rank: int) -> None:
    for name, value in {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_what_is_dealt_out_comes_back_in_order(count: int) -> None:
    things = list(range(count))
    parts = [World(rank=rank, size=3).mine(things) for rank in range(3)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert dealt(parts) == things


def test_one_process_is_the_first_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    world = join_world(torch.device("cpu"))
    assert world == World()
    assert world.first
    assert own_rank() is None
    assert world.collect([1]) == [[1]]
    assert world.only_first(lambda: 4) == 4
    world.leave()


def test_an_error_of_one_process_is_its_own() -> None:
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        World().together(fail)


def test_a_rank_knows_its_number_and_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, size=2, rank=1)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert own_rank() == 1
    assert own_device(torch.device("cpu")) == torch.device("cpu")
    assert own_device(torch.device("cuda")) == torch.device("cuda", 1)
    assert chosen == [1]


def test_ranks_that_would_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, size=2, rank=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="several ranks on it"):
        own_device(torch.device("cuda:0"))
    with pytest.raises(ValueError, match="rank 1 is number 1 on a machine with 1 GPUs"):
        own_device(torch.device("cuda"))
