"""Rollout benchmark: prompts to completions in tokens per second, against transformers.

Both have the same weights, dtype, device and prompts, sample at temperature 1 and ignore end
tokens, so every sequence has the full length. Both are warmed up in the same way: on a GPU by the
whole workload, which captures every graph and fills the allocator (sparrow on other prompts, as it
would reuse the prefixes). Where transformers generates fewer tokens, to save time, sparrow is
measured on that number as well, and the ratio compares the two.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow import models
from sparrow.benchmarks import timing
from sparrow.engine.engine import Engine
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import pages_for
from sparrow.models import Decoder, shipped
from sparrow.models.checkpoint import pick_device, pick_dtype
from sparrow.models.fetch import fetched, known
from sparrow.schema.bench import RolloutBenchmark, RolloutRow, RolloutWorkload, Split
from sparrow.schema.sampling import SamplingParams
from sparrow.sparse.rule import Rule

DENSE, PEER = "dense", "transformers generate"
WARM_TOKENS = 4  # on a CPU, where the warm-up is compilation alone
# Model, device, rollouts, prompt tokens, new tokens, those of transformers, schedules.
PRESETS: dict[str, tuple[Any, ...]] = {
    "gpu": ("qwen3-1.7b", "cuda", 32, 128, 2048, 2048, (DENSE, "qwen3-1.7b-0.86")),
    "cpu-tiny": ("tiny", "cpu", 64, 32, 1024, 128, (DENSE, "fixed-256")),
    "cpu-smollm2": ("smollm2-135m", "cpu", 32, 32, 256, 256, (DENSE,)),
}
WORKLOADS = {
    name: RolloutWorkload(**dict(zip(RolloutWorkload.model_fields, values, strict=True)))
    for name, values in PRESETS.items()
}


def run(
    *,
    workload: str | None = None,
    peer: bool = True,
    peer_tokens: int | None = None,
    dtype: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **changes: Any,
) -> RolloutBenchmark:
    """Measure a workload.

    workload     gpu, cpu-tiny or cpu-smollm2 (default: by the machine)
    peer         also run transformers
    peer_tokens  its new tokens (default: by the workload)
    dtype        bf16, fp32 (default: bf16 on a GPU, fp32 on a CPU)
    changes      replace fields of the workload (rollouts, new_tokens, ...)
    """
    preset = workload or ("gpu" if pick_device("auto").type == "cuda" else "cpu-tiny")
    if preset not in WORKLOADS:
        raise ValueError(f"unknown workload {preset!r}; expected one of {', '.join(WORKLOADS)}")
    work = WORKLOADS[preset]
    work = work.model_copy(update={"peer_tokens": peer_tokens or work.peer_tokens, **changes})
    model = _model(work, dtype)
    cases = [(name, work.new_tokens) for name in work.schedules]
    if peer and work.peer_tokens != work.new_tokens:
        cases.append((DENSE, work.peer_tokens))
    rows = []
    for name, tokens in cases:
        progress(f"sparrow {name}, {tokens} new tokens")
        rows.append(_run_sparrow(model, work.model_copy(update={"new_tokens": tokens}), name))
    if peer:
        progress(f"{PEER}, {work.peer_tokens} new tokens")
        rows.append(_run_transformers(model, work))
    peers = {row.new_tokens: row.tokens_per_s for row in rows if row.who == PEER}
    return RolloutBenchmark(
        **timing.model_fields(model, work.model),
        preset=preset,
        workload=work,
        weights="random" if model.source is None else "real",
        rows=tuple(_with_ratio(row, peers.get(row.new_tokens)) for row in rows),
    )


def _with_ratio(row: RolloutRow, peer: float | None) -> RolloutRow:
    """Add the ratio to transformers at the same number of new tokens."""
    ratio = row.tokens_per_s / peer if peer and row.tokens_per_s else None
    return row.model_copy(update={"ratio": ratio})


# sparrow.


def _model(work: RolloutWorkload, dtype: str | None) -> Decoder:
    """Real weights where they are available, else random ones."""
    device = pick_device(work.device)
    kind = pick_dtype(timing.torch_dtype(dtype), device, {})
    if work.model in shipped() or (work.model in known() and fetched(work.model) is not None):
        return models.load(work.model, dtype=kind, device=device)
    return models.random(work.model, dtype=kind, device=device)


def _prompts(work: RolloutWorkload, vocabulary: int, seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return draw.integers(vocabulary, size=(work.rollouts, work.prompt_tokens)).tolist()


def _run_sparrow(model: Decoder, work: RolloutWorkload, name: str) -> RolloutRow:
    """Run the engine under a schedule; on a CPU its time is split by part."""
    device, rule = model.device, Rule()
    timing.free_memory(device)  # of the previous engine
    pages = work.rollouts * (pages_for(work.context, PAGE) + 1)  # room for all, and no more
    engine = Engine(
        model,
        max_running=work.rollouts,
        max_context=work.context,
        kv_bytes=pages * timing.cache_page_bytes(model, rule),
    )
    schedule = timing.schedule_named(None if name == DENSE else name)

    def generate(new_tokens: int, seed: int) -> int:
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=seed)
        prompts = _prompts(work, model.spec.vocabulary, seed)
        completions = engine.generate(prompts, params, schedule=schedule)
        return sum(len(completion.token_ids) for completion in completions)

    generate(_warm_tokens(model, work.new_tokens), seed=1)
    split: Split = {}
    with timing.timed_ops(split):
        tokens, seconds = timing.timed(lambda: generate(work.new_tokens, seed=0), device)
    split["python"] = seconds - sum(split.values())
    return RolloutRow(
        who=f"sparrow {name}",
        new_tokens=work.new_tokens,
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        split=split if device.type == "cpu" else None,  # a GPU's ops return before they have run
    )


def _warm_tokens(model: Decoder, new_tokens: int) -> int:
    """Tokens of the warm-up: on a GPU all of them, to capture every graph."""
    return new_tokens if model.device.type == "cuda" else min(WARM_TOKENS, new_tokens)


# transformers.


def _run_transformers(model: Decoder, work: RolloutWorkload) -> RolloutRow:
    """Run `generate` of transformers on the same weights."""
    from transformers import AutoModelForCausalLM

    timing.free_memory(model.device)
    how: Any = {"dtype": model.dtype, "attn_implementation": "sdpa", "use_safetensors": True}
    with tempfile.TemporaryDirectory(prefix="sparrow-bench-") as scratch:
        folder = models.save(model, Path(scratch) / "model")
        peer = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **how
        )
    peer = peer.to(model.device).eval()
    prompts = _prompts(work, model.spec.vocabulary, seed=0)
    return _attempt(partial(_generate, peer, prompts), work.peer_tokens, work.rollouts, model)


def _attempt(
    generate: Callable[[int], int], tokens: int, rollouts: int, model: Decoder
) -> RolloutRow:
    """A row for transformers; a failure is a row with its reason."""
    expected, generated, seconds, failed = rollouts * tokens, 0, None, None
    try:
        generate(_warm_tokens(model, tokens))
        generated, seconds = timing.timed(lambda: generate(tokens), model.device)
        if generated != expected:
            failed = f"expected {expected} tokens, got {generated}"
    except RuntimeError as error:  # out of memory, or an operation that this device lacks
        failed = f"{type(error).__name__}: {error}"[:300]
    return RolloutRow(
        who=PEER,
        new_tokens=tokens,
        tokens=generated,
        seconds=seconds,
        tokens_per_s=generated / seconds if seconds and not failed else None,
        failed=failed,
    )


def _generate(peer: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """Generate with transformers; returns the number of new tokens."""
    from transformers import GenerationConfig

    peer.generation_config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )
    ids = torch.tensor(prompts, device=peer.device)
    with torch.inference_mode():
        out = peer.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    return int(out[:, ids.shape[1] :].numel())
