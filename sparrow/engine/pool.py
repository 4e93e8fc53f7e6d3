"""Pages and rows of the device: which pages are free, cached or owned, and what each row runs.

A page is free, or owned (referenced by one holder or more), or cached: without references, but it
holds a page of some prompt that a later request may share. Cached pages are given away, least
recently used first, when free ones run out.

A prefix is found by a chain of digests, one for each full page: the digest of a page covers its
tokens and everything before it, back to a root that names whatever else the contents depend on
(weights, adapter).

Each resident sample has a row: the state that a decode step needs without asking the host. R rows,
M pages of a table, S stop ids; other letters as in sparrow/ops/types.py.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparrow import ops
from sparrow.engine.requests import STOPS, Sample
from sparrow.schema.sampling import Acceptance

NO_STOP = -1
ACCEPTANCE: tuple[Acceptance | None, ...] = (None, "shared_noise", "rejection")
PAGE = 16  # tokens; the method's choice: finer pages dominate coarser ones at equal cost
EXACT_BATCH = 16  # least batch of decode steps on a CPU; see Engine: exact_batches


class PagePool:
    """Allocates page ids: `pages` pages of `page` tokens. The memory is the cache's."""

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
        """Allocate `count` pages. The caller has checked `available`."""
        assert count <= self.available, f"{count} pages requested, {self.available} available"
        while len(self._free) < count:
            self._forget_page(next(iter(self._idle)))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, which is owned or cached."""
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reference; a page without references is cached if it has a key, else free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released, but has no reference"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Make a full page shareable by its key; the first page of a key stays."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest cached prefix, not held yet: `share` them at once."""
        pages = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def forget(self) -> None:
        """Drop every key: the contents of pages are no longer valid for new requests."""
        for page in list(self._key_of):
            self._forget_page(page)

    def _forget_page(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """Every page is free, cached, or held exactly as often as it is referenced."""
        owned = Counter(held)
        wrong = [page for page, count in enumerate(self._references) if count != owned[page]]
        assert not wrong, f"pages {wrong[:5]} are held more or less often than referenced"
        once = sorted([*self._free, *self._idle, *owned]) == list(range(self.pages))
        assert once, "a page is not exactly one of free, cached, owned"
        keys = {page: key for key, page in self._page_of.items()}
        assert keys == self._key_of, "a page is found under a key that is not its own"
        assert self._idle.keys() <= self._key_of.keys(), "a cached page has no key"


def page_keys(root: bytes, ids: Sequence[int], page: int) -> Iterator[bytes]:
    """The key of every full page of these tokens, in order."""
    tokens = np.asarray(ids, dtype=np.int32)
    key = root
    for start in range(0, len(tokens) - page + 1, page):
        key = blake2b(key + tokens[start : start + page].tobytes(), digest_size=16).digest()
        yield key


def batch_bucket(batch: int) -> int:
    """1, 2, 4, 8, 16, then also the sizes halfway between powers of two."""
    size = 1
    while size < batch:
        size *= 2
    between = size * 3 // 4
    return between if size > 16 and batch <= between else size


def widest_batch(max_running: int) -> int:
    """Rows of the largest decode step, with those that only pad it."""
    return max(EXACT_BATCH, batch_bucket(max_running))


class Rows:
    """Tensors [R] or [R, ...], one row for each resident sample and a spare one.

    A step gets only the row numbers; tokens, lengths, page tables, seeds and settings are
    here, and the step moves them on. The last row is a spare one for padding: its length stays -1,
    so it reads and writes nothing.
    """

    def __init__(self, count: int, pages: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count + 1, *shape, dtype=dtype, device=device)

        self.spare = count
        self.device = device
        self.state = ops.RowState(  # what a step reads and moves on
            token_R=zeros(),
            length_R=zeros(),
            seed_R=zeros(),
            drawn_R=zeros(),
            temperature_R=zeros(dtype=torch.float32),
            table_RM=zeros(pages, dtype=torch.int32),
        )
        self.length_R, self.table_RM = self.state.length_R, self.state.table_RM
        self.top_k_R, self.top_p_R = zeros(), zeros(dtype=torch.float32)
        self.least_R = zeros()  # tokens before which stop ids are forbidden
        self.stops_RS = zeros(STOPS)
        self.schedule_R, self.adapter_R = zeros(), zeros()
        self.policy_adapter_R = zeros()  # that of verifications
        self.acceptance_R = zeros()  # of drafts: the number of its rule in ACCEPTANCE
        self.drafted_R = zeros()  # drafts since the last verification
        self.length_R[self.spare] = -1
        self.reset()

    def reset(self) -> None:
        """All rows are free, and none has drafts."""
        self.free = list(range(self.spare - 1, -1, -1))
        self.drafted_R.zero_()

    def enter(self, sample: Sample) -> int:
        """Give a sample a row: it has `context.computed` tokens in its pages."""
        state, request, params = self.state, sample.request, sample.request.params
        sample.row = row = self.free.pop()
        state.length_R[row] = sample.context.computed
        state.token_R[row] = sample.tokens[-1] if sample.tokens else 0
        state.seed_R[row] = sample.seed
        state.drawn_R[row] = sample.drawn
        state.temperature_R[row] = params.temperature
        self.top_k_R[row] = params.top_k
        self.top_p_R[row] = params.top_p
        self.least_R[row] = params.min_tokens
        self.schedule_R[row] = request.schedule_slot
        self.adapter_R[row] = request.adapter_slot.slot
        self.policy_adapter_R[row] = request.policy_slot.slot
        speculative = request.speculative
        rule = None if speculative is None else speculative.acceptance
        self.acceptance_R[row] = ACCEPTANCE.index(rule)
        if params.min_tokens:
            stops = sorted(request.stop_ids) + [NO_STOP] * (STOPS - len(request.stop_ids))
            self.stops_RS[row].copy_(self.upload(stops))
        self.table_RM[row, : len(sample.context.pages)].copy_(self.upload(sample.context.pages))
        return row

    def leave(self, sample: Sample) -> None:
        assert sample.row is not None
        self.free.append(sample.row)
        sample.row = None

    def grow(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Enter new pages into tables: (row, index in the table, page)."""
        if places:
            row_n, index_n, page_n = self.upload(places).T.unbind(0)
            self.table_RM.index_put_((row_n, index_n), page_n.int())

    def upload(self, values: npt.ArrayLike) -> Tensor:
        """Copy integers to the device without synchronising."""
        host = torch.from_numpy(np.asarray(values, dtype=np.int64))
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host

    def sample(
        self, logits_BV: Tensor, at_B: Tensor, step: ops.StepInputs, *, truncated: bool
    ) -> ops.Draws:
        """Sample a token for these rows. Only truncated distributions take the longer way.

        So the bits of the others do not depend on the settings of their neighbours.
        """
        draw_inputs = (logits_BV, step.seeds_B, step.counters_B, step.temperature_B)
        plain = ops.sample(*draw_inputs)
        if not truncated:
            return plain
        top_k_B, top_p_B, stops_BS = self.cuts(at_B, step.counters_B)
        cut = ops.sample(*draw_inputs, top_k_B, top_p_B, stops_BS)
        cuts_B = (top_k_B > 0) | (top_p_B < 1) | (stops_BS >= 0).any(1)
        return ops.Draws(*(torch.where(cuts_B, a, b) for a, b in zip(cut, plain, strict=True)))

    def cuts(self, at_B: Tensor, counters_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """top-k, top-p and forbidden ids of these rows for the draws of these numbers."""
        early_B = counters_B < self.least_R[at_B]
        stops_BS = self.stops_RS[at_B].masked_fill(~early_B[:, None], NO_STOP)
        return self.top_k_R[at_B], self.top_p_R[at_B], stops_BS
