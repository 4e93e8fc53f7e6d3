"""What an engine is put together from: its settings made whole, and the memory that it runs in."""

from typing import NamedTuple

import torch

from sparrow import ops
from sparrow.engine.memory import MemoryPlan, host_memory, plan_memory
from sparrow.engine.pool import PAGE, PagePool
from sparrow.engine.requests import pages_for
from sparrow.engine.rows import Rows
from sparrow.engine.scheduler import Policy, Preempt, Reuse
from sparrow.models import Decoder
from sparrow.sparse.rule import Rule

CPU_CHUNK, GPU_CHUNK = 128, 4096  # prompt tokens of a step

RULE_OPS = frozenset({"select_pages"})
GRAPH_OPS = RULE_OPS | {"attend_decode", "write_pages", "sample", "step_inputs", "step_outputs"}


class Memory(NamedTuple):
    """What lies on the device beside weights, and which pages of it are free."""

    plan: MemoryPlan
    cache: ops.PageCache
    rows: Rows
    pool: PagePool


def allocate(
    model: Decoder, rule: Rule | None, *, max_running: int, max_context: int, kv_bytes: int | None
) -> Memory:
    """Take the memory for keys and values, and for what the rule keeps of them."""
    spec = model.spec
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # what torch only keeps for later counts as free
    width = pages_for(max_context, PAGE)
    fields = ops.kv_fields(PAGE, spec.head_size, model.dtype) + _rule_fields(model, rule)
    states = rule.states(width) if rule else ()
    plan = plan_memory(
        model,
        fields,
        states,
        page=PAGE,
        max_context=max_context,
        max_running=max_running,
        kv_bytes=kv_bytes,
    )
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


def without_kernel(model: Decoder, rule: Rule | None) -> set[str]:
    """Ops of a decode step that have no kernel for this model: no graph can hold those."""
    fast = ops.versions(model.device.type, model.dtype, model.spec.head_size)
    needed = GRAPH_OPS if rule is not None else GRAPH_OPS - RULE_OPS
    return set(needed - fast.keys())


def policy_of(on_gpu: bool, preempt: Preempt, reuse: Reuse, swap_bytes: int | None) -> Policy:
    """On a CPU prompts are cut so that every chunk has the same shape wherever it runs."""
    return Policy(
        chunk=GPU_CHUNK if on_gpu else CPU_CHUNK,
        pack=on_gpu,
        quantum=PAGE if on_gpu else CPU_CHUNK,
        preempt=preempt,
        reuse=reuse,
        swap_bytes=host_memory() // 2 if swap_bytes is None else swap_bytes,
    )


def check_preempt(preempt: Preempt, rule: Rule | None) -> None:
    """Keys and values can be computed anew, what a flow remembers of earlier steps cannot."""
    if preempt == "recompute" and rule is not None and rule.flow.state:
        raise ValueError(
            f"preempt='recompute' with the flow {rule.name!r}: its state "
            f"({', '.join(rule.flow.state)}) comes from the steps of a sample and cannot be "
            "computed anew; use preempt='swap'"
        )


def context_of(model: Decoder, wanted: int | None) -> int:
    most = model.spec.max_positions
    if wanted is not None and not 1 <= wanted <= most:
        raise ValueError(f"max_context={wanted}, but the model's context is {most}")
    return wanted or most
