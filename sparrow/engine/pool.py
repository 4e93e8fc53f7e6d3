"""Which pages of the cache are free, cached or owned: reference counts and the prefix cache.

A page is free, or owned (referenced by one holder or more), or cached: nobody refers to it, but it
holds a page of some prompt that a later request may share. Cached pages are given away, least
recently used first, when free ones run out.

A prefix is found by a chain of digests, one for each full page: the digest of a page covers its
tokens and everything before it, back to a root that names whatever else the contents depend on
(weights, adapter).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

PAGE = 16  # tokens; the method's choice: finer pages dominate coarser ones at equal cost


class PagePool:
    """Owns the numbers of `pages` pages of `page` tokens; the memory itself is the cache's."""

    def __init__(self, pages: int, page: int) -> None:
        self.pages = pages
        self.page = page
        self.reset()

    def reset(self) -> None:
        """All pages are free."""
        self._free = list(range(self.pages - 1, -1, -1))
        self._references = [0] * self.pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, oldest first

    @property
    def available(self) -> int:
        """Pages that can be taken now, cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        return len(self._idle)

    def take(self, count: int) -> list[int]:
        """`count` pages of one's own. The caller has looked at `available`."""
        assert count <= self.available, f"{count} pages asked for, {self.available} available"
        while len(self._free) < count:
            self._forget_page(next(iter(self._idle)))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One reference more to each page, which is owned or cached."""
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """One reference less; a page that nobody holds is cached if it has a key, else free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released, but nobody holds it"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Let others find this full page by its key; the first page of a key stays."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix. They are not held yet: `share` them at once."""
        found = []
        for key in keys:
            if key not in self._page_of:
                break
            found.append(self._page_of[key])
        return found

    def forget(self) -> None:
        """Drop every key: what pages hold is no longer valid for anybody new."""
        for page in list(self._key_of):
            self._forget_page(page)

    def _forget_page(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """Every page is free, cached, or held exactly as often as it is referenced."""
        expected = _counts(held, self.pages)
        references = np.array(self._references, dtype=np.int64)
        free, idle = _counts(self._free, self.pages), _counts(self._idle, self.pages)
        wrong = (free + idle + (references > 0) != 1).nonzero()[0]
        assert not len(wrong), f"pages {wrong[:5]} are not exactly one of free, cached, owned"
        wrong = (references != expected).nonzero()[0]
        assert not len(wrong), (
            f"pages {wrong[:5]} have {references[wrong[:5]]} references, "
            f"but are held {expected[wrong[:5]]} times"
        )
        for key, page in self._page_of.items():
            assert self._key_of[page] == key, (
                f"page {page} is found under a key that is not its own"
            )
        assert len(self._page_of) == len(self._key_of)
        assert self._idle.keys() <= self._key_of.keys(), "a cached page has no key"


def _counts(pages: Iterable[int], size: int) -> npt.NDArray[np.int64]:
    """How often each page is named."""
    return np.bincount(np.fromiter(pages, dtype=np.int64), minlength=size)


def page_keys(root: bytes, ids: Sequence[int], page: int) -> Iterator[bytes]:
    """The key of every full page of these tokens, in order."""
    tokens = np.asarray(ids, dtype=np.int32)
    key = root
    for start in range(0, len(tokens) - page + 1, page):
        key = blake2b(key + tokens[start : start + page].tobytes(), digest_size=16).digest()
        yield key
