"""The readable rollout loop: one static batch, prompts first, then a token a step for every row.

No scheduler, no admission, no swapping: rows start together and the batch shrinks as they end.
It runs on any device, dense or under a schedule, and is what the engine is compared with.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow import ops
from sparrow.engine.memory import page_cache
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import Request, Sample, pages_for, stop_ids
from sparrow.models import Decoder
from sparrow.models.attention import PagedDecode, PagedPrefill
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    schedule: Schedule | None = None,
    flow: Flow = block_mean,
) -> list[Completion]:
    """Sample params.n completions of every prompt, prompt by prompt in the result.

    Dense without a schedule; with one, decoding keeps the tokens that it pays for by the rule of
    a flow (prompts are always dense). What a sample draws depends on the seed, its number among
    the n, and its logits: not on the other prompts. A row whose logits are not finite ends with
    the reason; the others continue.
    """
    rule = Rule(flow=flow) if schedule is None else Rule.like(schedule, flow)
    if schedule is not None:
        rule.check(schedule, page=PAGE, family=model.spec.family)
    spec, device = model.spec, model.device
    budgets = BudgetTable(layers=spec.layers, kv_heads=spec.kv_heads, device=device)
    slot = 0 if schedule is None else budgets.add(schedule)
    samples = _samples(model, prompts, params, schedule)
    pages = [len(sample.context.pages) for sample in samples]
    cache = page_cache(model, rule, pages=sum(pages), slots=len(samples), width=max(pages))
    for row in range(len(samples)):
        cache.begin(row)
    with torch.inference_mode():
        for sample in samples:
            _draw(sample, _prefill(model, cache, rule, sample))
        while live := [sample for sample in samples if sample.live]:
            logits_BV = _decode(model, cache, rule, live, budgets, slot)
            for sample, logits_V in zip(live, logits_BV, strict=True):
                _draw(sample, logits_V)
    return [sample.completion(spec, rule) for sample in samples]


def _samples(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    schedule: Schedule | None,
) -> list[Sample]:
    """n samples of every prompt; row and pages of each are its own to the end."""
    samples: list[Sample] = []
    for number, prompt in enumerate(prompts):
        request = Request(
            id=number,
            prompt=list(prompt),
            params=params,
            stop_ids=stop_ids(model.spec, params),
            schedule=schedule,
        )
        request.check(model.spec, model.spec.max_positions)
        samples += request.samples
    page = itertools.count()
    for row, sample in enumerate(samples):
        pages = pages_for(len(sample.request.prompt) + params.max_tokens, PAGE)
        sample.row, sample.context.pages = row, list(itertools.islice(page, pages))
    return samples


def _draw(sample: Sample, logits_V: Tensor) -> None:
    """Sample the next token of a sequence, and check whether it ends."""
    params = sample.request.params
    forbidden = sorted(sample.request.stop_ids) if sample.forbids_stops else [-1]
    settings = (sample.seed, sample.drawn, params.temperature, params.top_k, params.top_p)
    draws = ops.sample(
        logits_V[None],
        *(torch.tensor([value], device=logits_V.device) for value in (*settings, forbidden)),
    )
    sample.drawn += 1
    if draws.ok:
        sample.take(int(draws.tokens), float(draws.logprobs), float(draws.entropies), version=0)
    else:
        sample.fail()


def _prefill(model: Decoder, cache: ops.PageCache, rule: Rule, sample: Sample) -> Tensor:
    """Logits [V] after the prompt, whose keys and values are now in the cache."""
    ids_T = torch.tensor(sample.request.prompt, device=model.device)
    table_BM = torch.tensor([sample.context.pages], device=model.device)
    positions_T = torch.arange(len(ids_T), device=model.device)
    attention = PagedPrefill(
        cache=cache,
        table_BM=table_BM,
        lengths_B=positions_T[-1:] + 1,
        bounds=torch.tensor([0, len(ids_T)], device=model.device),
        slots_T=_slots(table_BM, positions_T, torch.zeros_like(positions_T)),
        rule=rule,
    )
    hidden_TC = model(ids_T, positions_T, attention)
    return model.logits(hidden_TC[-1:])[0]


def _decode(
    model: Decoder,
    cache: ops.PageCache,
    rule: Rule,
    samples: Sequence[Sample],
    budgets: BudgetTable,
    slot: int,
) -> Tensor:
    """Logits [B, V] after each sample's newest token, which is written to the cache first."""
    ids_B = torch.tensor([sample.tokens[-1] for sample in samples], device=model.device)
    lengths_B = torch.tensor([sample.length for sample in samples], device=model.device)
    tables = [torch.tensor(sample.context.pages, device=model.device) for sample in samples]
    table_BM = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
    attention = PagedDecode(
        cache=cache,
        table_BM=table_BM,
        lengths_B=lengths_B,
        slots_B=_slots(table_BM, lengths_B - 1, torch.arange(len(samples), device=model.device)),
        rule=rule,
        budgets=budgets.lookup(torch.full_like(lengths_B, slot), lengths_B) if slot else None,
        rows_B=torch.tensor([sample.row for sample in samples], device=model.device),
    )
    return model.logits(model(ids_B, lengths_B - 1, attention))


def _slots(table_BM: Tensor, positions_T: Tensor, row_T: Tensor) -> Tensor:
    return table_BM[row_T, positions_T // PAGE] * PAGE + positions_T % PAGE
