"""The readable rollout loop: one static batch, prompts first, then a token a step for every row.

No scheduler, no admission, no swapping: rows start together and the batch shrinks as they end.
It runs on any device, dense or under a fixed budget, and is what a faster engine is compared with.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.engine.sampler import Draw, sample
from sparrow.models import Decoder
from sparrow.models.attention import PagedDecode, PagedPrefill, Sparsity
from sparrow.records import Completion, FinishReason, SamplingParams

PAGE = 16
OnToken = Callable[[int, int], None]


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence on its way: what it was given, what it has drawn, which pages it owns."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    generator: torch.Generator
    table_M: Tensor
    draws: list[Draw] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.draws)

    def take(self, logits_V: Tensor) -> None:
        """Draw the next token, and notice the end."""
        early = len(self.draws) < self.params.min_tokens
        forbidden = torch.tensor(sorted(self.stop_ids), device=logits_V.device) if early else None
        try:
            self.draws.append(sample(logits_V, self.params, self.generator, forbidden))
        except ValueError as error:
            self.finish, self.error = "error", str(error)
            return
        if self.draws[-1].token in self.stop_ids:
            self.finish = "stop"
        elif len(self.draws) >= self.params.max_tokens:
            self.finish = "length"


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    budget: int | None = None,
    sparsity: Sparsity | None = None,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """Sample params.n completions of every prompt, prompt by prompt in the result.

    Dense without a budget; with one, decoding keeps that many tokens by the block-mean rule
    (prompts are always dense). `on_token(row, token)` is called as tokens come. What a sample
    draws depends on the seed, its number among the n, and its logits: not on the other prompts, and
    equal prompts under one seed give equal samples. Without a seed each prompt gets a fresh one. A
    row whose logits are not finite ends with the reason; the others go on.
    """
    sparsity = sparsity or Sparsity()
    _check_budget(model, budget, sparsity)
    rows = _rows(model, prompts, params)
    cache = _cache_for(model, rows)
    with torch.inference_mode():
        for index, row in enumerate(rows):
            row.take(_prefill(model, cache, row))
            _notify(on_token, index, row)
        while any(row.finish is None for row in rows):
            live = [(index, row) for index, row in enumerate(rows) if row.finish is None]
            logits_BV = _decode(model, cache, [row for _, row in live], budget, sparsity)
            for (index, row), logits_V in zip(live, logits_BV, strict=True):
                row.take(logits_V)
                _notify(on_token, index, row)
    return [_completion(row, describe(budget, sparsity)) for row in rows]


def describe(budget: int | None, sparsity: Sparsity) -> str:
    """What attention runs, for headers and completions."""
    if budget is None:
        return "dense"
    dense = ", ".join(map(str, sorted(sparsity.dense_layers))) or "none"
    return (
        f"block-mean, page {PAGE}, budget {budget} tokens, first {sparsity.first} and "
        f"last {sparsity.last} pages kept, dense layers: {dense}"
    )


def _rows(model: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Row]:
    for number, prompt in enumerate(prompts):
        _check_prompt(model, number, prompt, params)
    _check_memory(model, prompts, params)
    stops = frozenset(params.stop_token_ids)
    stops |= frozenset() if params.ignore_eos else frozenset(model.spec.eos_ids)
    rows: list[Row] = []
    first_page = 0
    for prompt, generator in (
        (list(prompt), generator) for prompt in prompts for generator in _generators(params)
    ):
        pages = _pages(prompt, params)
        table_M = torch.arange(first_page, first_page + pages, device=model.device)
        first_page += pages
        rows.append(
            Row(prompt=prompt, params=params, stop_ids=stops, generator=generator, table_M=table_M)
        )
    return rows


def _generators(params: SamplingParams) -> list[torch.Generator]:
    """A stream for each sample of a prompt; neighbouring seeds have unrelated streams."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    children = np.random.SeedSequence(seed).spawn(params.n)
    states = [int(child.generate_state(1, np.uint64)[0] >> np.uint64(1)) for child in children]
    return [torch.Generator().manual_seed(state) for state in states]


def _check_budget(model: Decoder, budget: int | None, sparsity: Sparsity) -> None:
    if budget is None:
        return
    if sparsity.dense_layers >= set(range(model.spec.layers)):
        raise ValueError(
            f"a budget was given, but all {model.spec.layers} layers of the model are among the "
            f"dense ones, {sorted(sparsity.dense_layers)}: nothing would be sparse"
        )
    reserved = (sparsity.first + sparsity.last) * PAGE
    if budget < reserved:
        raise ValueError(
            f"a budget of {budget} tokens cannot hold the first {sparsity.first} and last "
            f"{sparsity.last} pages of {PAGE}, which are always kept: give at least {reserved}"
        )


def _check_prompt(
    model: Decoder, number: int, prompt: Sequence[int], params: SamplingParams
) -> None:
    spec = model.spec
    if not prompt:
        raise ValueError(f"prompt {number} is empty")
    wrong = next((token for token in prompt if not 0 <= token < spec.vocabulary), None)
    if wrong is not None:
        raise ValueError(f"prompt {number}: token {wrong} is not in 0..{spec.vocabulary - 1}")
    if max(params.stop_token_ids, default=0) >= spec.vocabulary:
        raise ValueError(
            f"stop_token_ids {params.stop_token_ids} are not all in 0..{spec.vocabulary - 1}"
        )
    if len(prompt) + params.max_tokens > spec.max_positions:
        raise ValueError(
            f"prompt {number} has {len(prompt)} tokens and may grow by {params.max_tokens} "
            f"(max_tokens), but the model's context is {spec.max_positions}"
        )


def _cache_for(model: Decoder, rows: Sequence[Row]) -> ops.PageCache:
    spec = model.spec
    return ops.PageCache(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        page=PAGE,
        pages=sum(len(row.table_M) for row in rows),
        page_fields=ops.kv_fields(PAGE, spec.head_size, model.dtype),
        device=model.device,
    )


def _pages(prompt: Sequence[int], params: SamplingParams) -> int:
    """Pages of a sequence at its full length."""
    return -(-(len(prompt) + params.max_tokens) // PAGE)


def _check_memory(model: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    spec = model.spec
    pages = params.n * sum(_pages(prompt, params) for prompt in prompts)
    fields = ops.kv_fields(PAGE, spec.head_size, model.dtype)
    needed = pages * ops.page_bytes(fields, layers=spec.layers, kv_heads=spec.kv_heads)
    if needed > (there := _memory(model.device)):
        raise ValueError(
            f"{params.n * len(prompts)} sequences need {needed / 2**30:.3g} GiB for keys and "
            f"values at full length, {model.device} has {there / 2**30:.3g}: ask for fewer or "
            f"shorter ones"
        )


def _memory(device: torch.device) -> int:
    """Bytes of memory that could be had at the very most."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _prefill(model: Decoder, cache: ops.PageCache, row: Row) -> Tensor:
    """Logits [V] after the prompt, whose keys and values are now in the cache."""
    ids_T = torch.tensor(row.prompt, device=model.device)
    positions_T = torch.arange(len(ids_T), device=model.device)
    attention = PagedPrefill(
        cache=cache,
        table_BM=row.table_M[None],
        lengths_B=positions_T[-1:] + 1,
        bounds=torch.tensor([0, len(ids_T)], device=model.device),
        slots_T=_slots(row.table_M[None], positions_T, torch.zeros_like(positions_T)),
    )
    hidden_TC = model(ids_T, positions_T, attention)
    return model.logits(hidden_TC[-1:])[0]


def _decode(
    model: Decoder,
    cache: ops.PageCache,
    rows: Sequence[Row],
    budget: int | None,
    sparsity: Sparsity,
) -> Tensor:
    """Logits [B, V] after each row's newest token, which is written to the cache first."""
    ids_B = torch.tensor([row.draws[-1].token for row in rows], device=model.device)
    lengths_B = torch.tensor([row.length for row in rows], device=model.device)
    table_BM = torch.nn.utils.rnn.pad_sequence(
        [row.table_M for row in rows], batch_first=True, padding_value=-1
    )
    row_B = torch.arange(len(rows), device=model.device)
    attention = PagedDecode(
        cache=cache,
        table_BM=table_BM,
        lengths_B=lengths_B,
        slots_B=_slots(table_BM, lengths_B - 1, row_B),
        budgets_B=None if budget is None else torch.full_like(lengths_B, budget),
        sparsity=sparsity,
    )
    return model.logits(model(ids_B, lengths_B - 1, attention))


def _slots(table_BM: Tensor, positions_T: Tensor, row_T: Tensor) -> Tensor:
    return table_BM[row_T, positions_T // PAGE] * PAGE + positions_T % PAGE


def _notify(on_token: OnToken | None, index: int, row: Row) -> None:
    if on_token is not None and row.error is None:
        on_token(index, row.draws[-1].token)


def _completion(row: Row, attention: str) -> Completion:
    assert row.finish is not None
    return Completion(
        prompt_ids=np.array(row.prompt),
        token_ids=np.array([draw.token for draw in row.draws], dtype=np.int32),
        logprobs=np.array([draw.logprob for draw in row.draws], dtype=np.float32),
        entropies=np.array([draw.entropy for draw in row.draws], dtype=np.float32),
        weight_versions=np.zeros(len(row.draws), dtype=np.int32),
        finish_reason=row.finish,
        error=row.error,
        attention=attention,
    )
