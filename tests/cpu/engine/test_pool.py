"""Pages are free, cached or owned: by hand, and under random traffic against a plain model."""

import random

import pytest

from sparrow.engine.pool import PagePool, page_keys

PAGE = 4


def keys(ids: list[int], root: bytes = b"root") -> list[bytes]:
    return list(page_keys(root, ids, PAGE))


def test_cached_pages_are_given_away_oldest_first_and_after_free_ones() -> None:
    """A prefix ends at the first page that is unknown; the first page of a key stays."""
    pool, names = PagePool(3, PAGE), keys(list(range(8)))
    pages = pool.take(2)
    for page, key in zip(pages, names, strict=True):
        pool.publish(page, key)
        pool.publish(pages[0], key)  # nothing new
    assert pool.find([*names[:1], b"unknown", *names[1:]]) == pages[:1]
    pool.release(pages[1:])
    pool.release(pages[:1])
    with pytest.raises(AssertionError, match="page 0"):
        pool.release(pages[:1])
    (free,) = pool.take(1)
    assert free not in pages
    (taken,) = pool.take(1)
    assert taken == pages[1]
    assert pool.find(names[1:]) == []
    assert pool.find(names[:1]) == pages[:1]
    pool.check([free, taken])
    pool.forget()
    assert pool.find(names) == []
    assert (pool.cached, pool.available) == (0, 1)
    pool.check([free, taken])


def test_keys_cover_everything_before_and_the_root() -> None:
    assert len(keys([1] * 11)) == 2
    assert keys([1, 2, 3]) == []
    one, two = keys([1, 2, 3, 4, 5, 6, 7, 8]), keys([9, 2, 3, 4, 5, 6, 7, 8])
    assert not set(one) & {*two, *keys([1, 2, 3, 4, 5, 6, 7, 8], b"other")}
    assert keys([1, 2, 3, 4, 99]) == one[:1]


def test_the_check_notices() -> None:
    for breakage in ("lost", "twice", "wrong count"):
        pool = PagePool(4, PAGE)
        (page,) = pool.take(1)
        if breakage == "lost":
            pool._free.pop()
        elif breakage == "twice":
            pool._free.append(page)
        with pytest.raises(AssertionError, match="page"):
            pool.check([] if breakage == "wrong count" else [page])


@pytest.mark.parametrize("seed", range(3))
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
