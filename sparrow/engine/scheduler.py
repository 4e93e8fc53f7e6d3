"""The scheduler: admission, chunked prefill, preemption, and which pages are used.

Older requests go first and are never preempted for younger ones. A step decodes every resident
sample that may draw, and beside that computes at most `chunk` prompt tokens, so long prompts do
not hold up the others. When pages run out the youngest sample is moved to host memory, whole.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from sparrow import ops
from sparrow.engine.pool import PAGE, PagePool, Rows, page_keys
from sparrow.engine.requests import Context, Request, Sample, pages_for
from sparrow.engine.runner import Chunk
from sparrow.schema.types import InFlight

CPU_CHUNK, GPU_CHUNK = 128, 4096  # prompt tokens of a step
Reuse = Literal["prompts", "none"]


class SwapFull(RuntimeError):
    """A sample has to be swapped out, but swap_bytes is used up. Nothing has been changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """How prompts are cut and shared, and what happens when pages run out.

    pack    whether chunks of several prompts share a pass of the model, on a GPU; on a CPU prompts
            are cut so that every chunk has the same shape wherever it runs
    """

    pack: bool
    reuse: Reuse
    swap_bytes: int

    @property
    def chunk(self) -> int:
        """Prompt tokens computed in a step; chunks of a prompt end at multiples of it."""
        return GPU_CHUNK if self.pack else CPU_CHUNK

    @property
    def quantum(self) -> int:
        """Tokens of which a shared prefix is a multiple."""
        return PAGE if self.pack else CPU_CHUNK

    def __post_init__(self) -> None:
        if self.reuse not in get_args(Reuse):
            raise ValueError(f"reuse={self.reuse!r}, expected one of {get_args(Reuse)}")
        if self.swap_bytes < 0:
            raise ValueError(f"swap_bytes={self.swap_bytes}, expected 0 or more")


class Decode(NamedTuple):
    """A decode of these samples. ahead: further decodes that may read the pages it selects.

    reuse: whether it reads those of an earlier decode itself.
    """

    samples: list[Sample]
    ahead: int = 0
    reuse: bool = False


@dataclass(slots=True)
class Work:
    """What a step does: passes over prompts, copies of pages, decode, verification, first draws.

    It decodes once, or as often as samples of exact decoding draft before they are verified.
    """

    passes: list[list[Chunk]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    starting: list[Sample] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    verify: list[Sample] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.passes or self.starting or self.decodes or self.verify)


class Scheduler:
    """Queues of requests and samples over one pool of pages.

    The queues outlive the pool: `attach` gives the scheduler memory to plan with, and before that
    memory goes away `vacate` moves everything out of it.
    """

    pool: PagePool
    rows: Rows
    cache: ops.PageCache

    def __init__(self, policy: SchedulerPolicy, drain: Callable[[], None]) -> None:
        self.policy = policy
        self.waiting: deque[Request] = deque()  # prompt not computed, or samples yet to start
        self.returning: list[Sample] = []  # out of the cache, oldest first
        self.running: list[Sample] = []  # resident, oldest first
        self._drain = drain  # reads what was launched, so that samples may end

    def attach(self, pool: PagePool, rows: Rows, cache: ops.PageCache) -> None:
        self.pool, self.rows, self.cache = pool, rows, cache

    def reset(self) -> None:
        """Drop all requests, and everything that pages hold."""
        self.waiting.clear()
        self.returning.clear()
        self.running.clear()
        self.pool.reset()
        self.rows.reset()

    def vacate(self) -> None:
        """Swap every sample to host memory, drop what can be recomputed, and release the pool."""
        for sample in reversed(self.running[:]):
            self.preempt(sample)
        self._drop_beginnings()
        del self.pool, self.rows, self.cache

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.returning or self.running)

    def plan(self) -> Work:
        """Plan the next step. Pages and rows are allocated here; the caller runs it at once."""
        work = self._plan()
        if not work and not self.idle and not self.running:
            # Whoever waits holds pages that the oldest needs: it goes first, they begin again.
            self._drop_beginnings(spared=next(iter(self.returning), None))
            work = self._plan()
        return work

    def _plan(self) -> Work:
        """Decode resident samples, then resume swapped ones, then start prompts."""
        work = Work()
        self._plan_decode(work)
        tokens = self._bring_back(work, self.policy.chunk)
        if not self.returning:
            self._start_prompts(work, tokens)
        return work

    # Decoding: every resident sample gets room for its next tokens.

    def _plan_decode(self, work: Work) -> None:
        """Plan as many decodes as the longest round drafts; who is not verified decodes in all.

        A shorter round begins later, so that all are verified together.
        """
        for sample in self.running:
            if (speculative := sample.request.speculative) is not None:
                sample.drafts = max(0, min(speculative.draft_tokens, sample.left - 1))
        decodes = self._longest_round() or 1
        self._allocate_pages(decodes)
        ready = [sample for sample in self.running if sample.can_draw]
        work.verify = [sample for sample in ready if sample.request.speculative is not None]
        for number in range(decodes):
            drafts_left = decodes - number
            samples = [sample for sample in ready if _decodes(sample, number, drafts_left)]
            if samples:
                before = work.decodes[-1] if work.decodes else None
                work.decodes.append(_decode(samples, drafts_left, before))

    def _longest_round(self) -> int:
        return max((sample.drafts for sample in self.running), default=0)

    def _allocate_pages(self, decodes: int) -> None:
        """Allocate pages for the tokens that the next step writes."""
        page = self.pool.page
        places: list[tuple[int, int, int]] = []
        growing = [sample for sample in self.running if sample.lacks_pages(decodes, page) > 0]
        try:
            for sample in growing:
                if sample.row is not None and sample.can_draw:
                    self._grow(sample, sample.lacks_pages(decodes, page), places)
        finally:  # tables hold what samples hold, even if there was no room for one of them
            self.rows.grow([place for place in places if place[0] not in self.rows.free])

    def _grow(self, sample: Sample, missing: int, places: list[tuple[int, int, int]]) -> None:
        pages = sample.context.pages
        for _ in range(missing):
            self._make_room(sample)
            if sample.row is None or not sample.can_draw:
                return
            pages += self.pool.take(1)
            places.append((sample.row, len(pages) - 1, pages[-1]))

    def _make_room(self, sample: Sample) -> None:
        """Free at least one page for this sample; the youngest, maybe itself, is swapped out."""
        if not self.pool.available:
            self._drain()
        if not self.pool.available:
            self._drop_beginnings()
        while not self.pool.available and sample.row is not None:
            self.preempt(self.running[-1])

    def _drop_beginnings(self, spared: Sample | None = None) -> None:
        """Drop the prompts of requests that do not run yet: they can be recomputed."""
        for request in self.waiting:
            self.drop_prompt(request)
        for sample in self.returning:
            if sample is not spared:
                self.evict(sample)

    def drop_prompt(self, request: Request) -> None:
        """Release the prompt's pages of a request; it is recomputed later."""
        if request.context.pages:  # without pages there may be no pool: the engine sleeps
            self.pool.release(request.context.pages)
        request.context = Context()
        request.logits_V = request.hidden_C = None

    # Leaving and coming back.

    def preempt(self, sample: Sample, *, swap: bool = True) -> None:
        """Swap a resident sample out; everything launched for it has been read.

        Without swapping the contents of its pages are dropped, and recomputed later.
        """
        assert sample.drawn == len(sample.tokens), "a sample leaves while its draw is on its way"
        sample.context.computed = sample.length - 1
        if swap:
            self._swap_out(sample)
        else:
            sample.recomputed.append(sample.context.computed)
        self.evict(sample)
        insort(self.returning, sample, key=_age)

    def renew(self, request: Request, in_flight: InFlight) -> None:
        """Go on with a request under other weights or another adapter; all launched has been read.

        Samples that have begun keep what was computed, are recomputed, or restart. For the others
        the prompt is computed anew. Pages are published while prompts are computed or samples
        recomputed, and whatever is half-way through that begins anew: so no kept page ever is.
        """
        for sample in (sample for sample in request.samples if sample.live and sample.started):
            if in_flight == "keep":
                if sample.row is None:
                    self.evict(sample)  # unless it is swapped out, which stays
                continue
            self._invalidate(sample)
            if in_flight == "restart":
                self.returning.remove(sample)
                sample.restart()
        self.drop_prompt(request)
        if request.unstarted and request not in self.waiting:
            self.waiting = deque(sorted((*self.waiting, request), key=lambda waiting: waiting.id))

    def _invalidate(self, sample: Sample) -> None:
        """Drop what was computed for a sample, to be recomputed."""
        if sample.row is not None:
            self.preempt(sample, swap=False)
        elif sample.swapped is not None:
            sample.swapped = None
            sample.recomputed.append(sample.context.computed)
        self.evict(sample)

    def _swap_out(self, sample: Sample) -> None:
        """Copy the pages of a resident sample to host memory."""
        held = sum(copy.nbytes for out in self.returning for copy in (out.swapped or {}).values())
        pages = sample.context.pages[: pages_for(sample.context.computed, self.pool.page)]
        size = self.cache.bytes // self.pool.pages * len(pages)
        if held + size > self.policy.swap_bytes:
            needed, allowed = (held + size) / 2**30, self.policy.swap_bytes / 2**30
            problem = f"pages ran out, and {needed:.3g} GiB to swap out exceed {allowed:.3g} GiB"
            raise SwapFull(f"{problem} (swap_bytes): run fewer sequences at once, or allow more")
        sample.swapped = self.cache.read(self.rows.upload(pages), sample.row)
        sample.swaps += 1

    def evict(self, sample: Sample) -> None:
        """Release the row and pages of a resident sample, or of one that is being recomputed."""
        if sample.row is not None:
            self.rows.leave(sample)
            self.running.remove(sample)
        if sample.context.pages:
            self.pool.release(sample.context.pages)
        sample.context.pages = []
        if sample.swapped is None:
            sample.context.computed = 0

    def _bring_back(self, work: Work, tokens: int) -> int:
        """Resume swapped samples, oldest first, as room allows; return the prompt tokens left."""
        for sample in list(self.returning):
            if not self.rows.free:
                break
            if sample.swapped is None:
                tokens = self._extend(sample, work, tokens)
                if sample.context.computed < len(sample.ids):
                    break
                self.cache.begin(self.rows.free[-1])  # the row that `enter` gives it
            elif not self._swap_in(sample):
                break
            self.returning.remove(sample)
            self.rows.enter(sample)
            insort(self.running, sample, key=_age)
        return tokens

    def _swap_in(self, sample: Sample) -> bool:
        """Copy a sample's pages back; False if there is no room for them."""
        count = pages_for(sample.context.computed, self.pool.page)
        if self.pool.available < pages_for(sample.length, self.pool.page) + self._reserve():
            return False
        assert sample.swapped is not None
        sample.context.pages = self.pool.take(count)
        row = self.rows.free[-1]  # the one that `enter` gives it
        self.cache.write(sample.swapped, self.rows.upload(sample.context.pages), row)
        sample.swapped = None
        return True

    def _reserve(self) -> int:
        """Pages reserved for running samples, so that none is admitted only to be swapped out."""
        return len(self.running) * pages_for(self._longest_round() + 1, self.pool.page)

    # Prompts.

    def _start_prompts(self, work: Work, tokens: int) -> None:
        """Compute waiting prompts and start their samples, oldest first, as room allows."""
        for request in list(self.waiting):
            if not self.rows.free or tokens <= 0:
                break
            if request.logits_V is None:
                tokens = self._extend(request, work, tokens)
                if request.context.computed < len(request.prompt):
                    break
            self._start_samples(request, work)
            if request.unstarted:
                break
            self.waiting.remove(request)

    def _extend(self, owner: Request | Sample, work: Work, tokens: int) -> int:
        """Plan chunks of an owner's tokens as far as tokens and pages allow."""
        context, length = owner.context, len(owner.ids)
        if not context.pages:
            self._share_prefix(owner)
        while context.computed < length and tokens > 0:
            start = context.computed
            stop = min(length, (start // self.policy.chunk + 1) * self.policy.chunk)
            if self.policy.pack:
                stop = min(stop, start + tokens)
            missing = pages_for(stop, self.pool.page) - len(context.pages)
            if self.pool.available < missing + self._reserve():
                break
            context.pages += self.pool.take(missing)
            context.computed = stop
            pages = tuple(context.pages)
            self._add(work, Chunk(owner=owner, start=start, stop=stop, pages=pages))
            if self.policy.reuse != "none":
                full = context.pages[: stop // self.pool.page]
                for page, key in zip(full, _keys(owner, self.pool.page), strict=False):
                    self.pool.publish(page, key)
            tokens -= stop - start
        return tokens

    def _add(self, work: Work, chunk: Chunk) -> None:
        """Chunks of several owners may share a pass; those of one owner follow each other."""
        if self.policy.pack and work.passes and work.passes[-1][-1].owner is not chunk.owner:
            work.passes[-1].append(chunk)
        else:
            work.passes.append([chunk])

    def _share_prefix(self, owner: Request | Sample) -> None:
        """Share cached pages of the owner's prefix; its last token is always computed."""
        if self.policy.reuse == "none":
            return
        page, most = self.pool.page, len(owner.ids) - 1
        cached = self.pool.find(_keys(owner, page))
        shared = min(len(cached) * page, most) // self.policy.quantum * self.policy.quantum
        owner.context.pages = cached[: shared // page]
        owner.context.computed = shared
        if owner is owner.request:
            owner.request.cached = shared
        self.pool.share(owner.context.pages)

    def _start_samples(self, request: Request, work: Work) -> None:
        """Start samples from the computed prompt while there is room."""
        partial = len(request.prompt) % self.pool.page > 0
        unstarted = request.unstarted
        for left, sample in zip(range(len(unstarted), 0, -1), unstarted, strict=True):
            # The last one takes over what the request holds; so does one without room beside it.
            takes_over = left == 1 or not (self.pool.available or self.running)
            cost = int(partial and not takes_over)
            room = self.pool.available >= cost + self._reserve()
            if not (request.context.pages and self.rows.free and room):
                return
            pages = request.context.pages if takes_over else self._fork(request, work)
            sample.context = Context(pages=pages, computed=len(request.prompt))
            if takes_over:
                request.context = Context()
            sample.started = True
            self.cache.begin(self.rows.enter(sample))
            insort(self.running, sample, key=_age)
            work.starting.append(sample)

    def _fork(self, request: Request, work: Work) -> list[int]:
        """Pages for one sample: full ones are shared, an unfinished one is copied."""
        full = len(request.prompt) // self.pool.page
        pages, unfinished = request.context.pages[:full], request.context.pages[full:]
        self.pool.share(pages)
        copies = self.pool.take(len(unfinished))
        work.copies += zip(unfinished, copies, strict=True)
        return pages + copies

    # The end.

    def retire(self, sample: Sample) -> None:
        """Release everything of a sample that has ended."""
        if sample in self.returning:
            self.returning.remove(sample)
        sample.swapped = None
        self.evict(sample)
        request = sample.request
        if request in self.waiting and not request.unstarted:
            self.waiting.remove(request)
            self.drop_prompt(request)

    def held_pages(self) -> Iterator[int]:
        """Yield every reference to a page that requests and samples hold."""
        holders: list[Request | Sample] = [*self.waiting, *self.returning, *self.running]
        for holder in holders:
            yield from holder.context.pages

    def check(self) -> None:
        """Rows are free or belong to one running sample; queues are in order and disjoint."""
        rows = [sample.row for sample in self.running]
        assert sorted([*self.rows.free, *rows]) == list(range(self.rows.spare)), "rows are lost"  # type: ignore[type-var]
        assert all(sample.row is None for sample in self.returning)
        for queue in (self.running, self.returning):
            assert all(sample.live for sample in queue), "a sample that has ended is still queued"
            assert queue == sorted(queue, key=_age), "samples are out of order"
        assert not set(self.running) & set(self.returning)


def _decodes(sample: Sample, number: int, drafts_left: int) -> bool:
    """Whether a sample takes part in decode `number` of a step with so many drafts to go.

    A round starts as late as its drafts allow; others decode from the first on.
    """
    if sample.request.speculative is not None:
        return sample.drafts >= drafts_left
    return sample.left > number


def _decode(samples: list[Sample], drafts_left: int, before: Decode | None) -> Decode:
    """A decode selects pages if any of its samples needs it, or if the one before held none."""
    held = 1
    same = before is not None and len(before.samples) == len(samples)  # more may join, none leaves
    reuse = before is not None and same and (before.ahead > 0 or before.reuse)
    for sample in samples:
        speculative = sample.request.speculative
        if speculative is None:
            return Decode(samples)
        held = max(held, speculative.reselect)
        reuse = reuse and (sample.drafts - drafts_left) % speculative.reselect > 0
    return Decode(samples, 0 if reuse else min(held, drafts_left) - 1, reuse)


def _age(sample: Sample) -> tuple[int, int]:
    return sample.request.id, sample.number


def _keys(owner: Request | Sample, page: int) -> Iterator[bytes]:
    return page_keys(owner.request.policy_slot.root, owner.ids, page)
