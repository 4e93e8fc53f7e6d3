"""Pages are free, cached or owned: by hand, and under random traffic against a plain model."""

import random

import pytest

from sparrow.engine.pool import PagePool, page_keys

PAGE = 4


def keys(ids: list[int], root: bytes = b"root") -> list[bytes]:
    return list(page_keys(root, ids, PAGE))


def test_pages_are_taken_once_and_come_back() -> None:
    pool = PagePool(3, PAGE)
    first, second = pool.take(2), pool.take(1)
    assert sorted(first + second) == [0, 1, 2]
    assert pool.available == 0
    pool.check([*first, *second])
    pool.release(first)
    assert pool.available == 2
    assert pool.cached == 0
    pool.check(second)


def test_more_than_there_are_is_an_error_of_the_caller() -> None:
    pool = PagePool(2, PAGE)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 available"):
        pool.take(3)


def test_a_page_is_released_as_often_as_it_is_held() -> None:
    pool = PagePool(1, PAGE)
    (page,) = pool.take(1)
    pool.share([page])
    pool.release([page])
    pool.check([page])
    pool.release([page])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release([page])


def test_a_published_page_is_found_while_owned_and_while_cached() -> None:
    pool, (key,) = PagePool(2, PAGE), keys([1, 2, 3, 4])
    (page,) = pool.take(1)
    assert pool.find([key]) == []
    pool.publish(page, key)
    assert pool.find([key]) == [page]
    pool.release([page])
    assert (pool.cached, pool.available) == (1, 2)
    assert pool.find([key]) == [page]
    pool.share([page])
    assert (pool.cached, pool.available) == (0, 1)
    pool.check([page])


def test_the_first_page_of_a_key_stays() -> None:
    pool, (key,) = PagePool(2, PAGE), keys([1, 2, 3, 4])
    first, second = pool.take(2)
    pool.publish(first, key)
    pool.publish(second, key)
    assert pool.find([key]) == [first]
    pool.release([first, second])
    assert (pool.cached, pool.available) == (1, 2)
    pool.check([])


def test_cached_pages_are_given_away_oldest_first_and_after_free_ones() -> None:
    pool, names = PagePool(3, PAGE), keys(list(range(8)))
    pages = pool.take(2)
    for page, key in zip(pages, names, strict=True):
        pool.publish(page, key)
    pool.release(pages[1:])
    pool.release(pages[:1])
    (free,) = pool.take(1)
    assert free not in pages
    (taken,) = pool.take(1)
    assert taken == pages[1]
    assert pool.find(names[1:]) == []
    assert pool.find(names[:1]) == pages[:1]
    pool.check([free, taken])


def test_a_prefix_ends_at_the_first_unknown_page() -> None:
    pool, names = PagePool(3, PAGE), keys(list(range(12)))
    pages = pool.take(3)
    for index in (0, 2):
        pool.publish(pages[index], names[index])
    assert pool.find(names) == pages[:1]


def test_forgotten_pages_are_free_or_stay_with_their_owner() -> None:
    pool, names = PagePool(2, PAGE), keys(list(range(8)))
    pages = pool.take(2)
    for page, key in zip(pages, names, strict=True):
        pool.publish(page, key)
    pool.release(pages[:1])
    pool.forget()
    assert pool.find(names) == []
    assert (pool.cached, pool.available) == (0, 1)
    pool.check(pages[1:])
    pool.release(pages[1:])
    assert (pool.cached, pool.available) == (0, 2)


def test_keys_cover_everything_before_and_the_root() -> None:
    assert len(keys([1] * 11)) == 2
    assert keys([1, 2, 3]) == []
    one, two = keys([1, 2, 3, 4, 5, 6, 7, 8]), keys([9, 2, 3, 4, 5, 6, 7, 8])
    assert not set(one) & set(two)
    assert not set(one) & set(keys([1, 2, 3, 4, 5, 6, 7, 8], b"other"))
    assert keys([1, 2, 3, 4, 99]) == one[:1]


@pytest.mark.parametrize("breakage", ["lost", "twice", "wrong count"])
def test_the_check_notices(breakage: str) -> None:
    pool = PagePool(4, PAGE)
    (page,) = pool.take(1)
    if breakage == "lost":
        pool._free.pop()
    elif breakage == "twice":
        pool._free.append(page)
    with pytest.raises(AssertionError, match="page"):
        pool.check([] if breakage == "wrong count" else [page])


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_keeps_the_books(seed: int) -> None:
    dice, pool, holders = random.Random(seed), PagePool(12, PAGE), [[]]
    names = keys(list(range(80)))
    for _ in range(400):
        action = dice.choice(["take", "share", "release", "publish", "find", "forget"])
        if action == "take" and pool.available:
            holders.append(pool.take(dice.randint(1, pool.available)))
        elif action == "share":
            pages = dice.choice(holders)[:2]
            pool.share(pages)
            holders.append(list(pages))
        elif action == "release" and len(holders) > 1:
            pool.release(holders.pop(dice.randrange(1, len(holders))))
        elif action == "publish":
            for page in dice.choice(holders):
                pool.publish(page, dice.choice(names))
        elif action == "find":
            pages = pool.find(dice.sample(names, 3))
            pool.share(pages)
            holders.append(pages)
        elif action == "forget" and dice.random() < 0.1:
            pool.forget()
        pool.check(page for holder in holders for page in holder)
