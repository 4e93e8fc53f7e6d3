"""Micro-batches by tokens: which samples go through the model together, and on which rank.

A micro-batch holds a limited number of tokens; a longer sample is alone. The gradient does not
depend on the split, so it is chosen for speed: best-fit decreasing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class MicroBatch(NamedTuple):
    """Sample numbers. A filler, for ranks with fewer batches than others, has no gradient."""

    numbers: list[int]
    filler: bool = False


def micro_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Split samples into micro-batches, every sample once."""
    batches: list[list[int]] = []
    filled: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        fitting = [b for b, used in enumerate(filled) if used + lengths[number] <= tokens]
        if fitting:
            best = max(fitting, key=lambda b: (filled[b], -b))
            batches[best].append(number)
            filled[best] += lengths[number]
        else:
            batches.append([number])
            filled.append(lengths[number])
    return batches


def split_by_rank(
    lengths: Sequence[int], ranks: int, owners: Mapping[int, int] | None = None
) -> list[list[int]]:
    """Split samples over ranks, with about equally many tokens: longest first to the emptiest.

    owners: samples that must go to a certain rank.
    """
    numbers_by_rank: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    owners = owners or {}
    order = sorted(range(len(lengths)), key=lambda n: (n not in owners, -lengths[n], n))
    for number in order:
        rank = owners.get(number, filled.index(min(filled)))
        numbers_by_rank[rank].append(number)
        filled[rank] += lengths[number]
    return [sorted(numbers) for numbers in numbers_by_rank]


def rank_batches(
    lengths: Sequence[int], tokens: int, ranks: int, owners: Mapping[int, int] | None = None
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, equally many: sharded weights are gathered in each."""
    by_rank = []
    for numbers in split_by_rank(lengths, ranks, owners):
        batches = micro_batches([lengths[number] for number in numbers], tokens)
        by_rank.append([[numbers[place] for place in batch] for batch in batches])
    most = max(len(batches) for batches in by_rank)
    shortest = min(range(len(lengths)), key=lambda n: lengths[n], default=0)
    return [_pad_batches(batches, most, shortest) for batches in by_rank]


def _pad_batches(batches: list[list[int]], count: int, shortest: int) -> list[MicroBatch]:
    """Reach `count` batches: halve the largest, then add fillers."""
    batches = list(batches)
    while len(batches) < count:
        largest = max(range(len(batches)), key=lambda b: (len(batches[b]), -b), default=None)
        if largest is None or len(batches[largest]) < 2:
            break
        batch = batches.pop(largest)
        batches[largest:largest] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    fillers = [MicroBatch([shortest], filler=True)] * (count - len(batches))
    return [*(MicroBatch(numbers) for numbers in batches), *fillers]
