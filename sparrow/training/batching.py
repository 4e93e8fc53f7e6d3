"""Micro-batches by tokens: which samples go through the model together, and on which rank.

A micro-batch holds at most so many tokens; a longer sample is alone. The gradient does not depend
on the cut, so it is made for speed: longest first, each into the fullest batch that has room.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class MicroBatch(NamedTuple):
    """Samples by number. A filler keeps step with ranks that have more, and counts for nothing."""

    numbers: list[int]
    filler: bool = False


def micro_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Sample numbers of each micro-batch, every sample once."""
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


def shares(
    lengths: Sequence[int], ranks: int, owners: Mapping[int, int] | None = None
) -> list[list[int]]:
    """Sample numbers of each rank, about equally many tokens each: longest first to the least.

    owners: samples that must go to a certain rank.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    owners = owners or {}
    order = sorted(range(len(lengths)), key=lambda n: (n not in owners, -lengths[n], n))
    for number in order:
        rank = owners.get(number, filled.index(min(filled)))
        found[rank].append(number)
        filled[rank] += lengths[number]
    return [sorted(numbers) for numbers in found]


def rank_batches(
    lengths: Sequence[int], tokens: int, ranks: int, owners: Mapping[int, int] | None = None
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, equally many: shards of the weights meet in each of them."""
    cut = []
    for numbers in shares(lengths, ranks, owners):
        batches = micro_batches([lengths[number] for number in numbers], tokens)
        cut.append([[numbers[place] for place in batch] for batch in batches])
    most = max(len(batches) for batches in cut)
    shortest = min(range(len(lengths)), key=lambda n: lengths[n], default=0)
    return [_as_many(batches, most, shortest) for batches in cut]


def _as_many(batches: list[list[int]], count: int, shortest: int) -> list[MicroBatch]:
    """The same samples in `count` batches: the largest are halved, then fillers are added."""
    batches = list(batches)
    while len(batches) < count:
        largest = max(range(len(batches)), key=lambda b: (len(batches[b]), -b), default=None)
        if largest is None or len(batches[largest]) < 2:
            break
        batch = batches.pop(largest)
        batches[largest:largest] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    fillers = [MicroBatch([shortest], filler=True)] * (count - len(batches))
    return [*(MicroBatch(numbers) for numbers in batches), *fillers]
