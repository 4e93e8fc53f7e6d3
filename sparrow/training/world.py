"""The processes that train together: one alone, or the ranks of torch.distributed.

    torchrun --nproc_per_node=2 -m sparrow train CONFIG

Every rank knows the whole batch and works on its share; results are gathered, so all decide alike.
With one process nothing is sent and nothing waits. A barrier precedes every exchange of objects: if
a rank has ended (torchrun says which) or is late, the others end too. All ranks need access to the
same run directory.

What an exchange costs: objects are pickled and go through host memory (gloo, also beside NCCL), and
every rank receives every other's, padded to the largest. So large objects are exchanged twice a
step: trajectories without hidden states (about 20 bytes a token), and scores of the dense policy
(12 bytes a token). Everything else is flags and sums.

Who can send a pickle can run code in every rank, so ranks must trust each other: they are one
program, started by one torchrun or one driver of a Ray cluster for one user, and a trust boundary
lies around them, none between them. torch.distributed has no password: the rendezvous
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
# A rank that died is noticed at once; this is for one that hangs, and longer than any rollout.
DEADLINE = timedelta(hours=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """rank: number of this process; size: how many there are; group: who exchanges objects."""

    rank: int = 0
    size: int = 1
    group: Any = None  # of gloo; None: the default group
    deadline: timedelta = DEADLINE  # how long ranks wait for each other
    joined: bool = False  # whether we initialised the process group

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def local_items(self, items: Sequence[T]) -> list[T]:
        """This rank's share: every size-th item, from number `rank` on."""
        return list(items[self.rank :: self.size])

    def all_gather(self, item: T) -> list[T]:
        """The objects of all ranks, by rank, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        try:
            distributed.monitored_barrier(self.group, timeout=self.deadline, wait_all_ranks=True)
            distributed.all_gather_object(items, item, group=self.group)
        except RuntimeError as error:  # the only type that torch has for it
            raise ValueError(
                f"one of {self.size} ranks has ended, or did not respond within "
                f"{self.deadline.total_seconds():g} s: {error}"
            ) from error
        return items

    def on_all_ranks(
        self, work: Callable[[], T], shared: Sequence[type[Exception]] = ()
    ) -> list[T]:
        """Do work on every rank and return all results, by rank; if one fails, all raise.

        shared: exceptions that all ranks raise alike, the first of several; else a ValueError.
        """
        if self.size == 1:
            return [work()]
        result, problem = None, None
        try:
            result = work()
        except Exception as error:  # whatever it is: the others must not wait for this rank
            problem = error
        reason = None if problem is None else f"{type(problem).__name__}: {problem}"
        parts = self.all_gather((result, problem if type(problem) in shared else reason))
        if problem is not None and type(problem) not in shared:
            raise problem
        kinds: list[type] = [str, *shared]  # str: the reason of any other exception
        for kind in kinds:
            for rank, (_, failure) in enumerate(parts):
                if isinstance(failure, str) and kind is str:
                    raise ValueError(f"rank {rank} failed: {failure}")
                if isinstance(failure, kind):
                    raise kind(f"rank {rank}: {failure}" if str(failure) else "") from problem
        return [result for result, _ in parts]  # type: ignore[misc]

    def on_first_rank(self, work: Callable[[], T], shared: Sequence[type[Exception]] = ()) -> T:
        """Do work on the first rank and return its result on every rank."""
        return self.on_all_ranks(lambda: work() if self.is_first else None, shared)[0]  # type: ignore[return-value]

    def leave(self) -> None:
        if self.joined and distributed.is_initialized():
            distributed.destroy_process_group()


def interleave(parts: Sequence[Sequence[T]]) -> list[T]:
    """Inverse of `World.local_items`: the shares of all ranks in the original order."""
    turns = range(max((len(part) for part in parts), default=0))
    return [part[turn] for turn in turns for part in parts if turn < len(part)]


def current_rank() -> int | None:
    """The rank that torchrun gave this process; None for a single process."""
    return int(os.environ.get("RANK", "0")) if _size() > 1 else None


def _size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_device(device: torch.device) -> torch.device:
    """This rank's GPU, where a machine runs several ranks."""
    if device.type != "cuda" or _size() == 1:
        return device
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device.index is not None:
        raise ValueError(f"device: expected cuda (one GPU a rank), got {device} for several ranks")
    if local >= there:
        raise ValueError(f"rank {current_rank()} needs GPU {local}, this machine has {there}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def join_world(device: torch.device, *, deadline: timedelta = DEADLINE) -> World:
    """Join the ranks that torchrun started; a world of one without torchrun."""
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
