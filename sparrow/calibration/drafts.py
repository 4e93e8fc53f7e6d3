"""Acceptance of drafts: what exact decoding would accept, position by position of a round.

A sequence is given. Its keys and values are dense; the draft steps of a round read them sparsely,
and their own from the sparse stream, as in the engine. All rounds of a sequence run side by side,
each a row with private copies of the pages that it writes. Tokens are those of the sequence, so
every position of every round counts, whatever was accepted before it. Legend of the dimension
letters: sparrow/ops/types.py; B rounds, J drafts of a round.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparrow import ops
from sparrow.calibration.replay import Arm, Prompt
from sparrow.calibration.store import Store
from sparrow.engine.memory import page_cache
from sparrow.engine.pool import PAGE
from sparrow.engine.requests import pages_for
from sparrow.models import Decoder
from sparrow.models.attention import HeldLists, PagedDecode, PagedPrefill
from sparrow.models.decoder import Lora
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import DraftCell
from sparrow.schema.types import Progress
from sparrow.sparse.budgets import BudgetTable
from sparrow.sparse.rule import Rule
from sparrow.stats import mean_over_rows

Figures = dict[str, Any]
DRAFTS = "drafts.jsonl"
CHUNK = 1024  # tokens of a dense pass through the page cache


class DraftRounds:
    """The rounds of one sequence, from token `start` on, after a dense pass over all of it."""

    def __init__(
        self,
        model: Decoder,
        ids: Sequence[int],
        rule: Rule,
        *,
        start: int,
        draft_tokens: int,
        reselect: int = 1,
        actor: Lora | None = None,
        drafter: Decoder | None = None,
    ) -> None:
        """drafter: drafts instead of the model, over its keys and values, such as an 8-bit copy."""
        self.model, self.rule, self.draft_tokens = model, rule, draft_tokens
        self.actor = actor  # the adapter of the drafts
        self.drafter = drafter or model
        self.ids_S = torch.tensor(ids, device=model.device)
        last = len(ids) - draft_tokens + 1
        self.starts_B = torch.arange(start, last, draft_tokens, device=model.device)
        if not len(self.starts_B):
            raise ValueError(
                f"a sequence of {len(ids)} tokens has no round of {draft_tokens} behind {start}"
            )
        whole, private = pages_for(len(ids), PAGE), pages_for(draft_tokens, PAGE) + 1
        pages = whole + private * len(self.starts_B)
        self.cache = page_cache(model, rule, pages=pages, slots=1, width=whole + private)
        self.hidden_SC = self._prefill(whole)
        self.table_BM = self._tables(whole, private)
        spec, rows = model.spec, len(self.starts_B)
        shape = (spec.layers, rows, spec.kv_heads, self.table_BM.shape[1])
        self.held = HeldLists(*shape, model.device) if reselect > 1 else None
        self.reselect = reselect

    @torch.no_grad()
    def _prefill(self, pages: int) -> Tensor:
        table_BM = torch.arange(pages, device=self.model.device)[None]
        hidden = []
        for begin in range(0, len(self.ids_S), CHUNK):
            ids_T = self.ids_S[begin : begin + CHUNK]
            slots_T = torch.arange(begin, begin + len(ids_T), device=ids_T.device)
            attention = PagedPrefill(
                cache=self.cache,
                table_BM=table_BM,
                lengths_B=slots_T[-1:] + 1,
                bounds=torch.tensor([0, len(ids_T)], device=ids_T.device),
                slots_T=slots_T,
                rule=self.rule,
            )
            hidden.append(self.model(ids_T, slots_T, attention))
        return torch.cat(hidden)

    def _tables(self, whole: int, private: int) -> Tensor:
        """Shared pages before each round's first token, then copies of its own."""
        first_B1, device = self.starts_B[:, None] // PAGE, self.model.device
        own_BM = whole + torch.arange(len(self.starts_B) * private, device=device).view(-1, private)
        place_BM = first_B1 + torch.arange(private, device=device)
        table_BM = torch.arange(whole, device=device).expand(len(self.starts_B), -1)
        table_BM = torch.cat([table_BM, torch.full_like(own_BM, -1)], dim=1)
        self.cache.copy_pages(self.starts_B // PAGE, own_BM[:, 0])
        return table_BM.scatter(1, place_BM, own_BM).int()

    @torch.no_grad()
    def hidden(self, budgets: BudgetTable, slot: int) -> Tensor:
        """The hidden states of every draft step, [J, B, C]."""
        steps = []
        for step in range(self.draft_tokens):
            positions_B = self.starts_B + step
            lengths_B, slot_B = positions_B + 1, torch.full_like(positions_B, slot)
            block_B = self.table_BM.gather(1, positions_B[:, None] // PAGE).squeeze(1)
            ahead = 0 if self.held is None else min(self.reselect, self.draft_tokens - step) - 1
            attention = PagedDecode(
                cache=self.cache,
                table_BM=self.table_BM,
                lengths_B=lengths_B,
                slots_B=block_B * PAGE + positions_B % PAGE,
                rule=self.rule,
                budgets=budgets.lookup(slot_B, lengths_B),
                rows_B=torch.arange(len(positions_B), device=positions_B.device),
                summary_slots_B=positions_B[:0],
                held=self.held,
                held_lengths_B=lengths_B + ahead,
                reuse=step % self.reselect > 0,
            )
            ids_B = self.ids_S[positions_B]
            steps.append(self.drafter(ids_B, positions_B, attention, self.actor))
        return torch.stack(steps)

    def acceptance(self, schedule: Schedule, *, temperature: float = 1.0) -> Tensor:
        """Acceptance of the draft at each position of each round, [B, J]."""
        spec, device = self.model.spec, self.model.device
        budgets = BudgetTable(layers=spec.layers, kv_heads=spec.kv_heads, device=device)
        hidden_JBC = self.hidden(budgets, budgets.add(schedule))
        index_J = torch.arange(self.draft_tokens, device=device)
        dense_TC = self.hidden_SC[(self.starts_B + index_J[:, None]).flatten()]
        drafts_TC = hidden_JBC.flatten(0, 1)
        head = self.model.head
        if self.drafter is self.model:
            alpha_T = ops.acceptance(dense_TC, drafts_TC, head, temperature=temperature)
        else:
            alpha_T = self._acceptance(dense_TC, drafts_TC, temperature)
        return alpha_T.view(self.draft_tokens, -1).T

    @torch.no_grad()
    def _acceptance(self, dense_TC: Tensor, drafts_TC: Tensor, temperature: float) -> Tensor:
        """The same where drafts have an LM head of their own."""
        parts = []
        for dense_nC, drafts_nC in zip(dense_TC.split(CHUNK), drafts_TC.split(CHUNK), strict=True):
            p_nV = (self.model.logits(dense_nC) / temperature).softmax(1)
            q_nV = (self.drafter.logits(drafts_nC) / temperature).softmax(1)
            parts.append(torch.minimum(p_nV, q_nV).sum(1))
        return torch.cat(parts)


def accepted_tokens(alpha_BJ: Tensor) -> Tensor:
    """Drafts that each round is expected to have accepted: the first, the first two, and so on."""
    return alpha_BJ.cumprod(1).sum(1)


def measure_drafts(
    model: Decoder,
    sequences: Sequence[Prompt],
    arms: Sequence[Arm],
    store: Store,
    *,
    draft_tokens: int,
    reselect: Sequence[int] = (1,),
    temperature: float = 1.0,
    progress: Progress | None = None,
    actor: Lora | None = None,
) -> list[DraftCell]:
    """Measure arms on sequences, each with its prompt as `start`; what the store has is kept."""
    settings = [DraftSetting(arm, draft_tokens, held) for arm in arms for held in reselect]
    figures: dict[DraftSetting, list[Figures]] = {setting: [] for setting in settings}
    for number, sequence in enumerate(sequences):
        if progress is not None:
            progress(number, len(sequences), f"drafts: {sequence.name}")
        rounds: dict[tuple[Rule, int], DraftRounds] = {}
        for setting in settings:
            key = setting.key | {"prompt": sequence.number}
            known = store.get(key)
            if known is None:
                measured = _measure(model, sequence, setting, rounds, temperature, actor)
                known = store.put(key, measured)
            if known["rounds"]:
                figures[setting].append(known)
    return [_cell(setting, measured) for setting, measured in figures.items() if measured]


class DraftSetting(NamedTuple):
    """Drafts that are measured: an arm, how many a round, and how many read the same pages."""

    arm: Arm
    draft_tokens: int
    reselect: int

    @property
    def key(self) -> Figures:
        return {"arm": self.arm.key, "draft_tokens": self.draft_tokens, "reselect": self.reselect}


def _measure(
    model: Decoder,
    sequence: Prompt,
    setting: DraftSetting,
    rounds: dict[tuple[Rule, int], DraftRounds],
    temperature: float,
    actor: Lora | None,
) -> Figures:
    """Mean acceptance by position, and accepted drafts, of one sequence.

    rounds: those of this sequence, with its dense pass, by rule and reselect.
    """
    arm, draft_tokens, reselect = setting
    assert arm.schedule is not None, "dense drafts are all accepted"
    rule = Rule.of(arm.schedule, arm.flow)
    rule.check_drafts(draft_tokens, PAGE)
    first = sequence.start or 1
    sparse = [n >= arm.schedule.budget(n) for n in range(first, len(sequence.ids))]
    if True not in sparse[: len(sparse) - draft_tokens + 1]:
        return {"rounds": 0}
    if (rule, reselect) not in rounds:
        sizes: Any = {"start": first, "draft_tokens": draft_tokens, "reselect": reselect}
        rounds[rule, reselect] = DraftRounds(model, sequence.ids, rule, **sizes, actor=actor)
    alpha_BJ = rounds[rule, reselect].acceptance(arm.schedule, temperature=temperature)
    starts_B = rounds[rule, reselect].starts_B.cpu()
    alpha_BJ = alpha_BJ[torch.tensor(sparse)[starts_B - first].to(alpha_BJ.device)]
    if not len(alpha_BJ):
        return {"rounds": 0}
    return {
        "rounds": len(alpha_BJ),
        "acceptance": alpha_BJ.mean(0).tolist(),
        "accepted": float(accepted_tokens(alpha_BJ).mean()),
    }


def _cell(setting: DraftSetting, figures: Sequence[Figures]) -> DraftCell:
    """Means over prompts with their intervals; shares of a round are what intervals are made of."""
    arm, draft_tokens, reselect = setting
    share = mean_over_rows([each["accepted"] / draft_tokens for each in figures])
    ends = {name: value * draft_tokens for name, value in dict(share).items() if value is not None}
    by_position = zip(*(each["acceptance"] for each in figures), strict=True)
    return DraftCell(
        variant=arm.variant,
        budget=arm.budget,
        draft_tokens=draft_tokens,
        reselect=reselect,
        prompts=len(figures),
        rounds=sum(each["rounds"] for each in figures),
        acceptance=tuple(map(mean_over_rows, by_position)),
        accepted=share.replace(**ends),
    )
