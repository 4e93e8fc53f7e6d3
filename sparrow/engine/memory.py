"""The memory plan of an engine, made before memory is allocated; and its allocation."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from sparrow import ops
from sparrow.engine.pool import PAGE, PagePool, Rows
from sparrow.engine.requests import pages_for
from sparrow.engine.speculation import DraftRoom, DraftRows
from sparrow.models import Decoder
from sparrow.sparse.rule import Rule

CPU_SHARE = 0.25  # of a host's memory, where the user names no number
GPU_SHARE = 0.9  # of what is free on a GPU
LOGITS_BYTES = 4


class MemoryPlan(NamedTuple):
    """Bytes of weights and of a page of keys and values, and how many pages there are."""

    weights: int
    page_bytes: int
    pages: int
    max_context: int
    drafts: int = 0  # bytes of what drafts of exact decoding keep
    int8: int = 0  # of the weights in 8 bits, for drafts

    def describe(self) -> str:
        tokens = self.pages * PAGE
        drafts = f", drafts {_gib(self.drafts)}" if self.drafts else ""
        drafts += f", weights in 8 bits {_gib(self.int8)}" if self.int8 else ""
        return (
            f"weights {_gib(self.weights)}{drafts}, "
            f"KV {self.page_bytes // PAGE / 1024:.3g} KiB a token, "
            f"{self.pages} pages of {PAGE} = {tokens} tokens "
            f"({_gib(self.pages * self.page_bytes)}): {tokens / self.max_context:.3g} sequences of "
            f"{self.max_context} fit"
        )


def allocate(
    model: Decoder,
    rule: Rule | None,
    max_running: int,
    max_context: int,
    kv_bytes: int | None,
    room: DraftRoom,
    int8_bytes: int,
) -> tuple[MemoryPlan, ops.PageCache, Rows, PagePool, DraftRows | None]:
    """Allocate the KV cache, with the page summaries of a rule, and room for drafts.

    Pages are those for which there is memory, or was named, once a rule's state of every row that
    may run is taken off (drafts come beside named bytes); ValueError if that holds no sequence.
    int8_bytes are those of weights in 8 bits, which are there already.
    """
    spec, device = model.spec, model.device
    sizes = {"layers": spec.layers, "kv_heads": spec.kv_heads}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch only keeps for later counts as free
    if rule is not None:
        group, dtype = spec.heads // spec.kv_heads, model.dtype
        size = spec.head_size
        rule.prepare(page=PAGE, head_size=size, group=group, dtype=dtype, device=device, **sizes)
    width = pages_for(max_context, PAGE)
    fields, states = _fields(model, rule, width)
    page_bytes = ops.page_bytes(fields, **sizes)
    free = _available(model, max_running, width, room) if kv_bytes is None else kv_bytes
    free -= (max_running + 1) * ops.page_bytes(states, **sizes)
    pages = max(0, min(max_running * width, free // page_bytes))  # more could never be used at once
    weights = sum(parameter.nbytes for parameter in model.parameters())
    drafts_bytes = room.bytes(spec, max_running, width)
    plan = MemoryPlan(weights, page_bytes, pages, max_context, drafts_bytes, int8_bytes)
    there = device_memory(device) - drafts_bytes
    if pages * page_bytes > there:
        raise ValueError(f"kv_bytes={kv_bytes} is more than {device} has left, {_gib(there)}")
    if pages * PAGE < max_context:
        raise ValueError(
            f"the model does not fit with one sequence of {max_context} tokens on {device}: lower "
            f"max_context or raise kv_bytes ({plan.describe()}; {_gib(max(0, free))} left for KV)"
        )
    cache = page_cache(model, rule, pages=pages, slots=max_running + 1, width=width)
    rows = Rows(max_running, width, device)
    drafts = DraftRows(rows, spec, room) if room.tokens else None
    return plan, cache, rows, PagePool(pages, PAGE), drafts


def page_cache(
    model: Decoder, rule: Rule | None, *, pages: int, slots: int, width: int
) -> ops.PageCache:
    """Pages of keys and values, and a rule's state of `slots` sequences of `width` pages each."""
    fields, states = _fields(model, rule, width)
    return ops.PageCache(
        layers=model.spec.layers,
        kv_heads=model.spec.kv_heads,
        page=PAGE,
        pages=pages,
        page_fields=fields,
        slots=slots,
        state_fields=states,
        device=model.device,
    )


Fields = tuple[ops.Field, ...]


def _fields(model: Decoder, rule: Rule | None, width: int) -> tuple[Fields, Fields]:
    """What is stored of a page, and of a sequence."""
    size, dtype = model.spec.head_size, model.dtype
    fields = ops.kv_fields(PAGE, size, dtype)
    if rule is None:
        return fields, ()
    return (*fields, *rule.fields(page=PAGE, head_size=size, dtype=dtype)), rule.states(width)


def _available(model: Decoder, max_running: int, width: int, room: DraftRoom) -> int:
    """Default bytes for keys and values."""
    vocabulary, drafts = model.spec.vocabulary, room.bytes(model.spec, max_running, width)
    if model.device.type != "cuda":
        return int(device_memory(model.device) * CPU_SHARE) - drafts
    # Logits of every query, prompts, graphs.
    work = max_running * (1 + room.tokens) * vocabulary * LOGITS_BYTES * 3 + 2**30
    return int(device_memory(model.device) * GPU_SHARE) - drafts - work


def device_memory(device: torch.device) -> int:
    """Available bytes: free memory of a GPU, all memory of a host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return host_memory()


def host_memory() -> int:
    """Bytes of the host, or fewer where a container is given fewer."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    limit_text = limit.read_text().strip() if limit.is_file() else "max"
    return min(whole, int(limit_text)) if limit_text.isdigit() else whole


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
