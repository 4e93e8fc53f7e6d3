"""Compares the dense and the sparse policy token by token, on rollouts or teacher-forced.

An arm is a setting that is measured: a variant under a budget, a whole schedule, or dense.

    teacher_force  a given sequence, as sparse decoding would have seen it (nothing is sampled)
    roll_out       the engine writes under an arm's budgets, the dense policy reads the answers

Rolled out, the actor's distributions are those of the engine itself, by the hidden states its
completions carry: no second sparse pass, and no assumption that one would choose the same pages.
Legend of the dimension letters: sparrow/ops/types.py.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.calibration.store import MeasuredSequence
from sparrow.engine.answer import Query, outputs
from sparrow.engine.engine import Engine
from sparrow.engine.memory import page_cache
from sparrow.engine.pool import PAGE
from sparrow.models import Attention, Decoder, ModelSpec
from sparrow.models.attention import Packed, PackedSparse, PagedPrefill, fastest_sparse
from sparrow.models.decoder import Lora
from sparrow.schema.base import to_dict
from sparrow.schema.sampling import OutputOptions, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Variant
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.flows.flow import Flow, trace
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule

CHUNK = 512  # tokens of a dense pass through the page cache
TOP_K = 20  # log-probs of each side that the cheap bounds know, as in the paper
AHEAD = 2  # requests that wait in the engine, as a multiple of those that run
WRONG = 1e-4  # by which bounds may miss what they bracket before rounding is no excuse
MOST_ARMS = 14  # that run together: an engine looks up so many schedules at once
DENSE_ARM = "dense"


# Arms.


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A setting that is measured: a variant under a schedule, or dense. Compared by `key`."""

    key: str = DENSE_ARM
    name: str = field(default=DENSE_ARM, compare=False)
    flow: Flow = field(default=block_mean, compare=False)
    variant: str = field(default=DENSE_ARM, compare=False)
    budget: int | None = field(default=None, compare=False)
    schedule: Schedule | None = field(default=None, compare=False)


DENSE = Arm()


def make_variant(
    flow: Flow, source: str, spec: ModelSpec, *, name: str | None = None, **configuration: Any
) -> Variant:
    """Make a variant: a flow for a model, with page, first, last, dense_layers and shares."""
    page = configuration.get("page", PAGE)
    program = trace(flow, page, spec.head_size, spec.heads // spec.kv_heads)
    return Variant(
        name=name or flow.name,
        flow=flow.name,
        source=source,
        digest=program.digest,
        flow_digest=flow.digest,
        field_bytes=program.bytes(torch.bfloat16),
        **configuration,
    )


def make_arm(
    variant: Variant,
    flow: Flow,
    budget: int | None,
    *,
    schedule: Schedule | None = None,
    given: bool = False,
) -> Arm:
    """A variant under one budget at every length, or under another schedule of its rule.

    given: it is measured on given sequences, whatever the calibration's mode.
    """
    if schedule is None:
        assert budget is not None
        schedule = variant.schedule([0], [budget])
    about = to_dict(schedule) | {"name": "", "provenance": [], "digest": variant.digest}
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return Arm(
        key=f"given-{key}" if given else key,
        name=variant.name if budget is None else f"{variant.name}, {budget} tokens",
        flow=flow,
        variant=variant.name,
        budget=budget,
        schedule=schedule,
    )


# Passes over a whole sequence.


class DensePass(NamedTuple):
    """A dense pass over a sequence: run once, compared with any number of rules."""

    ids_T: Tensor
    hidden_TC: Tensor


@torch.no_grad()
def read(model: Decoder, ids: Sequence[int], attention: Attention | None = None) -> DensePass:
    """Run a dense pass over a sequence; `attention` may observe, but must be dense."""
    ids_T = torch.tensor(ids, device=model.device)
    hidden_TC = _hidden(model, ids_T, attention or Packed(bounds=_bounds(ids_T)))
    return DensePass(ids_T=ids_T, hidden_TC=hidden_TC)


@torch.no_grad()
def sparse_hidden(
    model: Decoder,
    dense: DensePass,
    prompt: int,
    schedule: Schedule,
    flow: Flow = block_mean,
    actor: Lora | None = None,
) -> Tensor:
    """Hidden states of the whole sequence where tokens after the prompt attend sparsely.

    actor: the adapter of the sparse actor.
    """
    bounds = _bounds(dense.ids_T)
    definition = PackedSparse(
        bounds=bounds,
        dense_B=torch.tensor([prompt]),
        budgets=_budgets(model, schedule, len(dense.ids_T)),
        page=schedule.page,
        rule=Rule.of(schedule, flow),
    )
    sparse = fastest_sparse(definition, Packed(bounds=bounds), model.dtype)
    return _hidden(model, dense.ids_T, sparse, actor)


@torch.no_grad()
def acceptances(
    model: Decoder, dense: DensePass, prompt: int, schedule: Schedule, flow: Flow = block_mean
) -> Tensor:
    """Exact acceptance of every token after the prompt; keys and values by the sparse stream."""
    sources = slice(prompt - 1, -1)
    sparse_TC = sparse_hidden(model, dense, prompt, schedule, flow)[sources]
    return ops.acceptance(dense.hidden_TC[sources], sparse_TC, model.head)


def _hidden(
    model: Decoder, ids_T: Tensor, attention: Attention, actor: Lora | None = None
) -> Tensor:
    return model(ids_T, torch.arange(len(ids_T), device=ids_T.device), attention, actor)


def _bounds(ids_T: Tensor) -> Tensor:
    return torch.tensor([0, len(ids_T)], device=ids_T.device)


def _budgets(model: Decoder, schedule: Schedule, tokens: int) -> Tensor:
    """The budget of each token in every layer and KV head, by the length that includes it."""
    spec, sizes = model.spec, {"schedules": 1, "bins": len(schedule.lengths)}
    table = BudgetTable(layers=spec.layers, kv_heads=spec.kv_heads, device=model.device, **sizes)
    slot = table.add(schedule)
    lengths_T = torch.arange(1, tokens + 1, device=model.device)
    return table.lookup(torch.full_like(lengths_T, slot), lengths_T)


# Prompts of a calibration, and what is kept of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt in tokens; or, in forced mode, a whole sequence of which `start` are the prompt."""

    number: int
    name: str
    ids: tuple[int, ...]
    start: int | None = None


@torch.no_grad()
def _compare(
    model: Decoder, dense: DensePass, actor_TC: Tensor, start: int, temperature: float
) -> dict[str, Any]:
    """Compare actor and dense policy from token start + 1 on; fields of a `MeasuredSequence`."""
    tokens = (dense.hidden_TC[start:-1], actor_TC, model.head, dense.ids_T[start + 1 :])
    top_k = min(TOP_K, model.spec.vocabulary)
    parts = ops.compare(*tokens, temperature=temperature, top_k=top_k)
    comparison = ops.Comparison(*(part.float().cpu() for part in parts))
    missed = torch.maximum(comparison.lower - comparison.alpha, comparison.alpha - comparison.upper)
    if (missed > WRONG).any():
        raise ArithmeticError(f"top-K bounds miss the acceptance by up to {missed.max():.2g}")
    alpha = comparison.alpha.numpy()
    return {
        "prompt_tokens": start,
        "first": start + 1,
        "ids": dense.ids_T.cpu().numpy(),
        "alpha": alpha,
        "entropy": comparison.entropy.numpy(),
        "below": np.maximum(alpha - comparison.lower.numpy(), 0),
        "above": np.maximum(comparison.upper.numpy() - alpha, 0),
        "ratio": (comparison.logp - comparison.logq).exp().clamp(max=1.0).numpy(),
    }


# Given sequences.


def teacher_force(
    model: Decoder,
    prompt: Prompt,
    arms: Sequence[Arm],
    temperature: float = 1.0,
    actor: Lora | None = None,
) -> Iterator[tuple[Arm, MeasuredSequence]]:
    """Measure a given sequence under every arm; the dense pass is run once.

    Tokens before the start are a prompt; from there on keys and values are written by the sparse
    stream, and every position counts.
    """
    start = 1 if prompt.start is None else prompt.start
    if not 1 <= start <= len(prompt.ids) - 2:
        raise ValueError(
            f"{prompt.name}: got {len(prompt.ids)} tokens and a start of {start}, expected a start "
            "of 1 at least and two tokens after it"
        )
    dense = read(model, prompt.ids)
    for arm in arms:
        if arm.schedule is None:
            actor_TC = paged_dense_hidden(model, dense.ids_T)
        else:
            actor_TC = sparse_hidden(model, dense, start, arm.schedule, arm.flow, actor)
        compared = _compare(model, dense, actor_TC[start:-1], start, temperature)
        compared["ratio"] = None  # no token was sampled
        yield arm, MeasuredSequence(prompt=prompt.number, sample=0, **compared)


@torch.no_grad()
def paged_dense_hidden(model: Decoder, ids_T: Tensor) -> Tensor:
    """Hidden states of a dense pass in chunks over pages, as the engine runs it."""
    pages, device = -(-len(ids_T) // PAGE), model.device
    parts = []
    cache = page_cache(model, None, pages=pages, slots=0, width=pages)
    for begin in range(0, len(ids_T), CHUNK):
        place_T = torch.arange(begin, min(begin + CHUNK, len(ids_T)), device=device)
        attention = PagedPrefill(
            cache=cache,
            table_BM=torch.arange(pages, device=device)[None],
            lengths_B=place_T[-1:] + 1,
            bounds=torch.tensor([0, len(place_T)], device=device),
            slots_T=place_T,
        )
        parts.append(model(ids_T[place_T], place_T, attention))
    return torch.cat(parts)


# Rollouts.


class RolloutJob(NamedTuple):
    """One prompt for one arm: params.n samples."""

    arm: Arm
    prompt: Prompt
    params: SamplingParams


def roll_out(
    engine: Engine, jobs: Sequence[RolloutJob]
) -> Iterator[tuple[RolloutJob, MeasuredSequence]]:
    """Yield every sample as it ends, compared with the dense policy from its second token on."""
    options = OutputOptions(hidden_states=True, training=True)
    queries = [Query(job.prompt.ids, job.params, job.arm.schedule, options) for job in jobs]
    model = engine.model
    for number, output in outputs(engine, queries, ahead=AHEAD * engine.max_running):
        job, completion = jobs[number], output.completion
        assert completion is not None, "tokens are not streamed"
        if completion.error is not None:
            who = f"{job.arm.name}, prompt {job.prompt.name}"
            raise ValueError(f"{who}: the engine failed: {completion.error}")
        assert completion.hidden is not None, "hidden states were requested"
        dense = read(model, [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()])
        hidden_TC = torch.tensor(completion.hidden[1:], device=model.device).to(model.dtype)
        start, temperature = len(completion.prompt_ids), job.params.temperature
        compared = _compare(model, dense, hidden_TC, start, temperature)
        yield job, MeasuredSequence(prompt=job.prompt.number, sample=output.sample, **compared)
