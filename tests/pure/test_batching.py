"""Which samples go through the model together, and on which rank."""

import pytest

from sparrow.training.batching import MicroBatch, micro_batches, rank_batches, split_by_rank


def test_longest_first_each_into_the_fullest_that_has_room() -> None:
    assert micro_batches([3, 9, 5, 4], tokens=10) == [[1], [2, 3], [0]]
    assert micro_batches([3, 9, 5, 4], tokens=1) == [[1], [2], [3], [0]]
    assert micro_batches([], tokens=10) == []


def test_ranks_have_about_equally_many_tokens() -> None:
    """9 | 8; then 5 to the 8, 4 to the 9, 2 to 13 tokens, the first of two."""
    assert split_by_rank([4, 9, 2, 8, 5], ranks=2) == [[0, 1, 2], [3, 4]]
    assert split_by_rank([4], ranks=3) == [[0], [], []]


def test_what_a_rank_must_have_it_gets_and_the_others_make_up_for_it() -> None:
    assert split_by_rank([9, 2, 3, 4], ranks=2, owners={0: 1}) == [[1, 2, 3], [0]]
    assert split_by_rank([9, 9], ranks=2, owners={0: 1, 1: 1}) == [[], [0, 1]]


def test_every_rank_has_equally_many_micro_batches() -> None:
    """The first rank has the 9 and the 2 in two of them; the other's one is halved."""
    assert rank_batches([9, 5, 4, 2], tokens=10, ranks=2) == [
        [MicroBatch([0]), MicroBatch([3])],
        [MicroBatch([1]), MicroBatch([2])],
    ]


def test_where_nothing_can_be_halved_the_shortest_fills_and_counts_for_nothing() -> None:
    assert rank_batches([9, 5, 3], tokens=1, ranks=2) == [
        [MicroBatch([0]), MicroBatch([2], filler=True)],
        [MicroBatch([1]), MicroBatch([2])],
    ]
    assert rank_batches([7], tokens=10, ranks=2)[1] == [MicroBatch([0], filler=True)]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_sample_counts_once(ranks: int) -> None:
    lengths = [7, 31, 2, 2, 19, 40, 11, 5]
    found = rank_batches(lengths, tokens=32, ranks=ranks, owners={3: ranks - 1, 5: 0})
    assert len({len(batches) for batches in found}) == 1
    counted = [
        n for batches in found for batch in batches if not batch.filler for n in batch.numbers
    ]
    assert sorted(counted) == list(range(8))
    assert all(3 in batch.numbers for batch in found[-1] if 3 in batch.numbers)


def test_no_samples_no_batches() -> None:
    assert rank_batches([], tokens=10, ranks=2) == [[], []]
