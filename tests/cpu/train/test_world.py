"""What ranks share, as far as one process can tell."""

import pytest
import torch

from sparrow.training.world import World, current_rank, interleave, join_world, rank_device


def test_what_is_dealt_out_comes_back_in_order() -> None:
    for things in map(range, (0, 1, 2, 3, 7)):
        parts = [World(rank=rank, size=3).local_items(things) for rank in range(3)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert interleave(parts) == list(things)


def test_one_process_is_the_first_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    world = join_world(torch.device("cpu"))
    assert world == World()
    assert world.is_first
    assert current_rank() is None
    assert world.all_gather([1]) == [[1]]
    assert world.on_first_rank(lambda: 4) == 4
    world.leave()


def test_a_rank_knows_its_number_and_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert current_rank() == 1
    assert rank_device(torch.device("cpu")) == torch.device("cpu")
    assert rank_device(torch.device("cuda")) == torch.device("cuda", 1)
    assert chosen == [1]
    with pytest.raises(ValueError, match="several ranks"):
        rank_device(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"rank 1\b"):
        rank_device(torch.device("cuda"))
