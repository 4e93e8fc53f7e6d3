"""Rollouts from prompts to completions, in tokens per second, beside transformers in the same run.

Both sides have the same weights, dtype, device and prompts, sample at temperature 1 and ignore end
tokens, so every sequence has the full length. Both are warmed up alike first: on a GPU by the whole
workload, which captures every graph and leaves the allocator its blocks (ours on other prompts, as
it would share these). Where transformers is given fewer new tokens, for its time, ours is measured
on those as well, and the ratio is between the two.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from sparrow import models
from sparrow.bench import timing
from sparrow.calibrate.tables import figures
from sparrow.engine.engine import Engine
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import pages_for
from sparrow.models import Decoder, ModelSpec
from sparrow.models.checkpoint import pick_device, pick_dtype
from sparrow.models.fetch import fetched, known
from sparrow.models.spec import Rope
from sparrow.schema.bench import Benchmark
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.sparse.rule import Rule

DENSE = "dense"
WARM_TOKENS = 4  # on a CPU, where only compiling has to be out of the way

# 2 976 576 weights.
TINY = ModelSpec(
    family="qwen3",
    layers=6,
    hidden=192,
    intermediate=576,
    heads=6,
    kv_heads=2,
    head_size=32,
    vocabulary=2048,
    max_positions=4096,
    tied=True,
    rope=Rope(theta=1e6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of equal length, one rollout each; transformers may be given fewer new tokens."""

    model: str
    device: str
    rollouts: int
    prompt_tokens: int
    new_tokens: int
    peer_tokens: int
    schedules: tuple[str, ...]
    batching_tokens: int = 0  # also transformers' continuous batching, of so many new tokens

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.new_tokens


WORKLOADS = {
    "gpu": Workload(
        model="qwen3-1.7b",
        device="cuda",
        rollouts=32,
        prompt_tokens=128,
        new_tokens=2048,
        peer_tokens=2048,
        schedules=(DENSE, "qwen3-1.7b-0.86"),
        batching_tokens=256,
    ),
    "cpu-tiny": Workload(
        model="tiny",
        device="cpu",
        rollouts=64,
        prompt_tokens=32,
        new_tokens=1024,
        peer_tokens=128,
        schedules=(DENSE, "fixed-256"),
    ),
    "cpu-smollm2": Workload(
        model="smollm2-135m",
        device="cpu",
        rollouts=32,
        prompt_tokens=32,
        new_tokens=256,
        peer_tokens=256,
        schedules=(DENSE,),
    ),
}


def run(
    *,
    preset: str = "cpu-tiny",
    peer: bool = True,
    dtype: str | None = None,
    progress: Callable[[str], None] | None = None,
    **changes: Any,
) -> Benchmark:
    """Measure a workload.

    preset   gpu, cpu-tiny or cpu-smollm2
    peer     also run transformers
    dtype    bf16, fp32 (default: bf16 on a GPU, fp32 on a CPU)
    changes  replace fields of the preset's workload (rollouts, new_tokens, peer_tokens, ...)
    """
    if preset not in WORKLOADS:
        raise ValueError(f"no workload {preset!r}; known are {', '.join(WORKLOADS)}")
    work = replace(WORKLOADS[preset], **changes)
    report = progress or (lambda text: None)
    model = _model(work, dtype)
    rows = [_ours(model, work, name, report) for name in work.schedules]
    if peer:
        for tokens in sorted({work.peer_tokens, work.batching_tokens} - {0, work.new_tokens}):
            rows.append(_ours(model, replace(work, new_tokens=tokens), DENSE, report))
        rows += _theirs(model, work, report)
    weights = "random" if model.source is None else "real"
    about = timing.of_model(model, work.model, preset=preset, workload=asdict(work))
    return Benchmark(**about, weights=weights, rows=_with_ratios(rows))


def table(result: Benchmark) -> Table:
    """The result for a terminal; ratios are to transformers' generate on as many new tokens."""
    work, size = result["workload"], f"{result['parameters'] / 1e6:.1f} M, {result['dtype']}"
    title = f"Rollout, {work['model']} ({size}), {work['rollouts']} rollouts"
    return figures(
        f"{title}, {result.machine.describe()}",
        result["rows"],
        "who new_tokens seconds tokens_per_s ratio split",
        split=lambda row: row["failed"] or timing.shares(row["split"] or {}),
    )


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its speed relative to transformers' generate on as many new tokens."""
    plain = {
        row["new_tokens"]: row["tokens_per_s"]
        for row in rows
        if row["who"] == "transformers generate" and row["tokens_per_s"]
    }
    for row in rows:
        base, own = plain.get(row["new_tokens"]), row["tokens_per_s"]
        row["ratio"] = own / base if base and own else None
    return rows


def _row(
    who: str,
    new_tokens: int,
    *,
    seconds: float | None = None,
    tokens: int = 0,
    split: timing.Split | None = None,
    failed: str | None = None,
) -> dict[str, Any]:
    speed = tokens / seconds if seconds else None
    return {
        "who": who,
        "new_tokens": new_tokens,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": speed,
        "split": split,
        "failed": failed,
    }


# Ours.


def _model(work: Workload, dtype: str | None) -> Decoder:
    """Real weights where they have been fetched, else random ones in the shape."""
    device = pick_device(work.device)
    kind = pick_dtype(timing.torch_dtype(dtype), device, {})
    if work.model in known() and fetched(work.model) is not None:
        return models.load(work.model, dtype=kind, device=device)
    name = TINY if work.model == "tiny" else work.model
    return models.random(name, dtype=kind, device=device)


def _prompts(work: Workload, vocabulary: int, seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return draw.integers(vocabulary, size=(work.rollouts, work.prompt_tokens)).tolist()


def _ours(
    model: Decoder, work: Workload, name: str, report: Callable[[str], None]
) -> dict[str, Any]:
    """One run of the engine under a schedule, with its time split on a CPU."""
    report(f"sparrow {name}, {work.new_tokens} new tokens")
    timing.free_memory(model.device)  # of the engine before
    device, engine = model.device, _engine(model, work)
    schedule = timing.schedule_named(None if name == DENSE else name)

    def generate(new_tokens: int, seed: int) -> list[Completion]:
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=seed)
        prompts = _prompts(work, model.spec.vocabulary, seed)
        return engine.generate(prompts, params, schedule=schedule)

    generate(_warm_tokens(model, work.new_tokens), seed=1)
    done: list[Completion] = []
    split: timing.Split = {}
    with timing.timed_ops(split):
        took = timing.seconds(lambda: done.extend(generate(work.new_tokens, seed=0)), device)
    split["python"] = took - sum(split.values())
    tokens = sum(len(completion.token_ids) for completion in done)
    parts = split if device.type == "cpu" else None  # a GPU's ops have not run when they return
    return _row(f"sparrow {name}", work.new_tokens, seconds=took, tokens=tokens, split=parts)


def _warm_tokens(model: Decoder, new_tokens: int) -> int:
    """All of them on a GPU, where graphs are captured on the way."""
    return new_tokens if model.device.type == "cuda" else min(WARM_TOKENS, new_tokens)


def _engine(model: Decoder, work: Workload) -> Engine:
    """Room for every rollout at once, and no more."""
    rule = Rule()
    rows = work.rollouts * (pages_for(work.context, PAGE) + 1)
    return Engine(
        model,
        max_running=work.rollouts,
        max_context=work.context,
        kv_bytes=rows * timing.pages_bytes(model, rule),
        rule=rule,
    )


# Theirs.


def _theirs(model: Decoder, work: Workload, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """transformers on the same weights: `generate`, and its continuous batching."""
    timing.free_memory(model.device)
    with tempfile.TemporaryDirectory(prefix="sparrow-bench-") as scratch:
        folder = models.save(model, Path(scratch) / "model")
        peer = _load_peer(folder, model)
    prompts = _prompts(work, model.spec.vocabulary, seed=0)
    ways: list[tuple[str, Callable[..., int], int]] = [
        ("transformers generate", _generate, work.peer_tokens)
    ]
    if work.batching_tokens:
        ways += [
            ("transformers generate", _generate, work.batching_tokens),
            ("transformers generate_batch", _generate_batch, work.batching_tokens),
        ]
    rows = []
    for who, way, tokens in ways:
        report(f"{who}, {tokens} new tokens")
        rows.append(_attempt(who, partial(way, peer, prompts), tokens, work.rollouts, model))
    return rows


def _attempt(
    who: str, generate: Callable[[int], int], tokens: int, rollouts: int, model: Decoder
) -> dict[str, Any]:
    """A row for the peer; that it cannot run here is a result too, with its reason."""
    drawn: list[int] = []
    try:
        generate(_warm_tokens(model, tokens))
        took = timing.seconds(lambda: drawn.append(generate(tokens)), model.device)
    except Exception as error:  # whatever another package raises
        return _row(who, tokens, failed=f"{type(error).__name__}: {error}"[:300])
    wanted = rollouts * tokens
    if drawn != [wanted]:
        return _row(who, tokens, failed=f"{drawn[0]} tokens came, {wanted} were asked")
    return _row(who, tokens, seconds=took, tokens=drawn[0])


def _load_peer(folder: Path, model: Decoder) -> Any:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=model.dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    return peer.to(model.device).eval()


def _settings(new_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )


def _generate(peer: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """How many tokens `generate` drew."""
    peer.generation_config = _settings(new_tokens)
    ids = torch.tensor(prompts, device=peer.device)
    with torch.inference_mode():
        out = peer.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    return int(out[:, ids.shape[1] :].numel())


def _generate_batch(peer: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """How many tokens continuous batching drew; memory and graphs are kept for the next call."""
    peer.generation_config = _settings(new_tokens)
    inputs = [list(prompt) for prompt in prompts]
    done = peer.generate_batch(
        inputs=inputs, generation_config=_settings(new_tokens), persistent_manager=True
    )
    return sum(len(output.generated_tokens) for output in done.values())
