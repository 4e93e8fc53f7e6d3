"""What fits: the memory plan of an engine, made before memory is taken; and its memory."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from sparrow import ops
from sparrow.engine.pool import PAGE, PagePool
from sparrow.engine.requests import pages_for
from sparrow.engine.rows import Rows
from sparrow.models import Decoder
from sparrow.sparse.rule import Rule

CPU_SHARE = 0.25  # of a host's memory, where the user names no number
GPU_SHARE = 0.9  # of what is free on a GPU
LOGITS_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Weights, and what one token of keys and values costs, against what there is."""

    weights: int
    page_bytes: int
    page: int
    pages: int
    max_context: int
    device: str
    free: int  # bytes that keys and values may take

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page

    @property
    def sequences(self) -> float:
        """How many sequences of the full context the pages hold."""
        return self.pages * self.page / self.max_context

    def describe(self) -> str:
        return (
            f"weights {_gib(self.weights)}, KV {self.token_bytes / 1024:.3g} KiB a token, "
            f"{self.pages} pages of {self.page} = {self.pages * self.page} tokens "
            f"({_gib(self.pages * self.page_bytes)}): {self.sequences:.3g} sequences of "
            f"{self.max_context} fit"
        )


def plan_memory(
    model: Decoder,
    fields: tuple[ops.Field, ...],
    states: tuple[ops.Field, ...],
    max_context: int,
    max_running: int,
    kv_bytes: int | None,
) -> MemoryPlan:
    """Pages for the memory that is there, or was named; ValueError if that holds no sequence.

    A rule's state of every row that may run is taken off first.
    """
    spec = model.spec
    page_bytes = ops.page_bytes(fields, layers=spec.layers, kv_heads=spec.kv_heads)
    free = _available(model, max_running) if kv_bytes is None else kv_bytes
    free -= (max_running + 1) * ops.page_bytes(states, layers=spec.layers, kv_heads=spec.kv_heads)
    most = max_running * pages_for(max_context, PAGE)  # more could never be used at once
    plan = MemoryPlan(
        weights=sum(parameter.nbytes for parameter in model.parameters()),
        page_bytes=page_bytes,
        page=PAGE,
        pages=max(0, min(most, free // page_bytes)),
        max_context=max_context,
        device=str(model.device),
        free=free,
    )
    there = device_memory(model.device)
    if plan.pages * page_bytes > there:
        raise ValueError(f"kv_bytes={kv_bytes} is more than {model.device} has left, {_gib(there)}")
    if plan.pages * PAGE < max_context:
        raise ValueError(
            f"the model does not fit with one sequence of {max_context} tokens on {plan.device}: "
            f"{plan.describe()}; {_gib(max(0, free))} are left for KV. Give a smaller max_context, "
            "more memory (kv_bytes), or a smaller model"
        )
    return plan


def _available(model: Decoder, max_running: int) -> int:
    """Bytes for keys and values where the user names none."""
    if model.device.type != "cuda":
        return int(device_memory(model.device) * CPU_SHARE)
    spec = model.spec
    work = max_running * spec.vocabulary * LOGITS_BYTES * 3 + 2**30  # logits, prompts, graphs
    return int(device_memory(model.device) * GPU_SHARE) - work


def device_memory(device: torch.device) -> int:
    """Bytes that can be had: free ones of a GPU, all of a host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return host_memory()


def host_memory() -> int:
    """Bytes of the host, or fewer where a container is given fewer."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    given = limit.read_text().strip() if limit.is_file() else "max"
    return min(whole, int(given)) if given.isdigit() else whole


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


class Memory(NamedTuple):
    """What lies on the device beside weights, and which pages of it are free."""

    plan: MemoryPlan
    cache: ops.PageCache
    rows: Rows
    pool: PagePool


def allocate(
    model: Decoder, rule: Rule | None, max_running: int, max_context: int, kv_bytes: int | None
) -> Memory:
    """Take the memory for keys and values, and for what the rule keeps of them."""
    spec = model.spec
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # what torch only keeps for later counts as free
    width = pages_for(max_context, PAGE)
    fields = ops.kv_fields(PAGE, spec.head_size, model.dtype) + _rule_fields(model, rule)
    states = rule.states(width) if rule else ()
    plan = plan_memory(model, fields, states, max_context, max_running, kv_bytes)
    cache = ops.PageCache(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        page=PAGE,
        pages=plan.pages,
        page_fields=fields,
        slots=max_running + 1,
        state_fields=states,
        device=model.device,
    )
    rows = Rows(max_running, width, model.device)
    return Memory(plan, cache, rows, PagePool(plan.pages, PAGE))


def _rule_fields(model: Decoder, rule: Rule | None) -> tuple[ops.Field, ...]:
    """What a rule that can run with this model stores of a page."""
    if rule is None:
        return ()
    spec = model.spec
    rule.prepare(
        page=PAGE,
        head_size=spec.head_size,
        group=spec.heads // spec.kv_heads,
        dtype=model.dtype,
        device=model.device,
        layers=spec.layers,
        kv_heads=spec.kv_heads,
    )
    return rule.fields(page=PAGE, head_size=spec.head_size, dtype=model.dtype)
