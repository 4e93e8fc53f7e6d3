"""The readable rollout loop: one static batch, prompts first, then a token a step for every row.

No scheduler, no admission, no swapping: rows start together and the batch shrinks as they end.
It runs on any device, dense or under a schedule, and is what the engine is compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import (
    check_prompt,
    kept_shares,
    pages_for,
    sample_seeds,
    stop_ids,
)
from sparrow.models import Decoder, ModelSpec
from sparrow.models.attention import PagedDecode, PagedPrefill
from sparrow.schema.sampling import Completion, FinishReason, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence on its way: what it was given, what it has drawn, which pages it owns."""

    number: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    table_M: Tensor
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def take(self, logits_V: Tensor) -> None:
        """Draw the next token, and notice the end."""
        draws = ops.sample(
            logits_V[None],
            torch.tensor([self.seed], device=logits_V.device),
            torch.tensor([len(self.tokens)], device=logits_V.device),
            torch.tensor([self.params.temperature], device=logits_V.device),
            torch.tensor([self.params.top_k], device=logits_V.device),
            torch.tensor([self.params.top_p], device=logits_V.device),
            torch.tensor([self._forbidden() or [-1]], device=logits_V.device),
        )
        if not draws.ok:
            self.finish, self.error = "error", "the model gave NaN or infinite logits"
            return
        self.tokens.append(int(draws.tokens))
        self.logprobs.append(float(draws.logprobs))
        self.entropies.append(float(draws.entropies))
        if self.tokens[-1] in self.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) >= self.params.max_tokens:
            self.finish = "length"

    def _forbidden(self) -> list[int]:
        early = len(self.tokens) < self.params.min_tokens
        return sorted(self.stop_ids) if early else []


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
    the reason; the others go on.
    """
    rule = Rule(flow=flow) if schedule is None else Rule.like(schedule, flow)
    if schedule is not None:
        rule.check(schedule, page=PAGE, family=model.spec.family)
    budgets = BudgetTable(
        layers=model.spec.layers, kv_heads=model.spec.kv_heads, device=model.device
    )
    slot = 0 if schedule is None else budgets.add(schedule)
    rows = _rows(model, prompts, params)
    cache = _cache_for(model, rule, rows)
    for row in rows:
        cache.begin(row.number)
    with torch.inference_mode():
        for row in rows:
            row.take(_prefill(model, cache, rule, row))
        while live := [row for row in rows if row.finish is None]:
            logits_BV = _decode(model, cache, rule, live, budgets, slot)
            for row, logits_V in zip(live, logits_BV, strict=True):
                row.take(logits_V)
    return [_completion(row, schedule, rule, model.spec) for row in rows]


def _rows(model: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Row]:
    stops = stop_ids(model.spec, params)
    rows: list[Row] = []
    first_page = 0
    for prompt in prompts:
        check_prompt(prompt, params, model.spec.vocabulary, model.spec.max_positions)
        for seed in sample_seeds(params):
            pages = pages_for(len(prompt) + params.max_tokens, PAGE)
            table_M = torch.arange(first_page, first_page + pages, device=model.device)
            first_page += pages
            row = Row(
                number=len(rows),
                prompt=list(prompt),
                params=params,
                stop_ids=stops,
                seed=seed,
                table_M=table_M,
            )
            rows.append(row)
    return rows


def _cache_for(model: Decoder, rule: Rule, rows: Sequence[Row]) -> ops.PageCache:
    spec = model.spec
    fields = ops.kv_fields(PAGE, spec.head_size, model.dtype)
    return ops.PageCache(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        page=PAGE,
        pages=sum(len(row.table_M) for row in rows),
        page_fields=(*fields, *rule.fields(page=PAGE, head_size=spec.head_size, dtype=model.dtype)),
        slots=len(rows),
        state_fields=rule.states(max(len(row.table_M) for row in rows)),
        device=model.device,
    )


def _prefill(model: Decoder, cache: ops.PageCache, rule: Rule, row: Row) -> Tensor:
    """Logits [V] after the prompt, whose keys and values are now in the cache."""
    ids_T = torch.tensor(row.prompt, device=model.device)
    positions_T = torch.arange(len(ids_T), device=model.device)
    attention = PagedPrefill(
        cache=cache,
        table_BM=row.table_M[None],
        lengths_B=positions_T[-1:] + 1,
        bounds=torch.tensor([0, len(ids_T)], device=model.device),
        slots_T=_slots(row.table_M[None], positions_T, torch.zeros_like(positions_T)),
        rule=rule,
    )
    hidden_TC = model(ids_T, positions_T, attention)
    return model.logits(hidden_TC[-1:])[0]


def _decode(
    model: Decoder,
    cache: ops.PageCache,
    rule: Rule,
    rows: Sequence[Row],
    budgets: BudgetTable,
    slot: int,
) -> Tensor:
    """Logits [B, V] after each row's newest token, which is written to the cache first."""
    ids_B = torch.tensor([row.tokens[-1] for row in rows], device=model.device)
    lengths_B = torch.tensor([row.length for row in rows], device=model.device)
    table_BM = torch.nn.utils.rnn.pad_sequence(
        [row.table_M for row in rows], batch_first=True, padding_value=-1
    )
    attention = PagedDecode(
        cache=cache,
        table_BM=table_BM,
        lengths_B=lengths_B,
        slots_B=_slots(table_BM, lengths_B - 1, torch.arange(len(rows), device=model.device)),
        rule=rule,
        budgets=budgets.lookup(torch.full_like(lengths_B, slot), lengths_B) if slot else None,
        rows_B=torch.tensor([row.number for row in rows], device=model.device),
    )
    return model.logits(model(ids_B, lengths_B - 1, attention))


def _slots(table_BM: Tensor, positions_T: Tensor, row_T: Tensor) -> Tensor:
    return table_BM[row_T, positions_T // PAGE] * PAGE + positions_T % PAGE


def _completion(row: Row, schedule: Schedule | None, rule: Rule, spec: ModelSpec) -> Completion:
    assert row.finish is not None
    return Completion(
        prompt_ids=np.array(row.prompt),
        token_ids=np.array(row.tokens, dtype=np.int32),
        logprobs=np.array(row.logprobs, dtype=np.float32),
        entropies=np.array(row.entropies, dtype=np.float32),
        weight_versions=np.zeros(len(row.tokens), dtype=np.int32),
        kept=kept_shares(schedule, rule, len(row.prompt), len(row.tokens), spec),
        seed=row.seed,
        finish_reason=row.finish,
        error=row.error,
        attention="dense" if schedule is None else schedule.describe(),
    )
