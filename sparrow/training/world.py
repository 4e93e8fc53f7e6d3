"""The processes that train together: one alone, or the ranks of torch.distributed.

    torchrun --nproc_per_node=2 -m sparrow train CONFIG

Every rank knows the whole batch and works on its share; what it finds is gathered, so all decide
alike. With one process nothing is sent and nothing waits. Ranks meet before they exchange objects:
where one has ended (torchrun says which), or does not come in time, the others end too. They work
on one run directory, which all of them must see.

What an exchange costs: objects are pickled and go through host memory (gloo, also beside NCCL), and
every rank receives every other's, each padded to the largest. So big things are exchanged twice a
step: trajectories without hidden states (about 20 bytes a token), and what the dense policy read
(12 bytes a token). Everything else is flags and sums.

This is the only pickle between our processes. Who can send one can run code in every rank, so ranks
must trust each other: they are one program, started by one torchrun for one user, and a trust
boundary lies around them, none between them. torch.distributed has no password: the rendezvous
(MASTER_ADDR, MASTER_PORT) and the ports that ranks open to each other must not be reachable by
anybody else. One machine, or a network of the job's own.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")
# One that has died is noticed at once; this is for one that hangs, and longer than any rollout.
DEADLINE = timedelta(hours=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """rank: number of this process; size: how many there are; group: who exchanges objects."""

    rank: int = 0
    size: int = 1
    group: Any = None  # of gloo; None: the default one
    deadline: timedelta = DEADLINE  # how long ranks wait for each other
    joined: bool = False  # whether it is ours to leave

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def mine(self, things: Sequence[T]) -> list[T]:
        """Every size-th thing, from the rank's own on."""
        return list(things[self.rank :: self.size])

    def collect(self, own: T) -> list[T]:
        """Every rank's thing, by rank, on every rank."""
        if self.size == 1:
            return [own]
        found: list[Any] = [None] * self.size
        try:
            distributed.monitored_barrier(self.group, timeout=self.deadline, wait_all_ranks=True)
            distributed.all_gather_object(found, own, group=self.group)
        except RuntimeError as error:  # the only type that torch has for it
            raise ValueError(
                f"one of {self.size} ranks has ended, or did not come within "
                f"{self.deadline.total_seconds():g} s: {error}"
            ) from error
        return found

    def together(self, work: Callable[[], T]) -> list[T]:
        """Every rank does its work; all results, by rank. Where one fails all fail, and name it."""
        if self.size == 1:
            return [work()]
        own, problem = None, None
        try:
            own = work()
        except Exception as error:  # whatever it is: the others must not wait for this rank
            problem = error
        told = None if problem is None else f"{type(problem).__name__}: {problem}"
        parts = self.collect((own, told))
        if problem is not None:
            raise problem
        for rank, (_, said) in enumerate(parts):
            if said is not None:
                raise ValueError(f"rank {rank} failed: {said}")
        return [found for found, _ in parts]  # type: ignore[misc]

    def only_first(self, work: Callable[[], T]) -> T:
        """What the first rank's work gives, on every rank; the others wait."""
        return self.together(lambda: work() if self.first else None)[0]  # type: ignore[return-value]

    def leave(self) -> None:
        if self.joined and distributed.is_initialized():
            distributed.destroy_process_group()


def dealt(parts: Sequence[Sequence[T]]) -> list[T]:
    """What `World.mine` dealt out to ranks, in its order again."""
    turns = range(max((len(part) for part in parts), default=0))
    return [part[turn] for turn in turns for part in parts if turn < len(part)]


def own_rank() -> int | None:
    """The rank that torchrun gave this process; None where it is alone."""
    return int(os.environ.get("RANK", "0")) if _size() > 1 else None


def _size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_device(device: torch.device) -> torch.device:
    """This rank's GPU, where a machine runs several ranks."""
    if device.type != "cuda" or _size() == 1:
        return device
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device.index is not None:
        raise ValueError(f"device {device}: got several ranks on it, allowed: cuda, a GPU a rank")
    if local >= there:
        raise ValueError(f"rank {own_rank()} is number {local} on a machine with {there} GPUs")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def join_world(device: torch.device, *, deadline: timedelta = DEADLINE) -> World:
    """The world that torchrun describes, or that of one process."""
    size = _size()
    if size == 1:
        return World()
    joined = not distributed.is_initialized()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if joined:
        distributed.init_process_group(backend, timeout=deadline)
    group = distributed.new_group(backend="gloo", timeout=deadline)
    return World(
        rank=distributed.get_rank(), size=size, group=group, deadline=deadline, joined=joined
    )
