"""Acceptance of drafts by what chooses the pages that they read, position by position of a round.

    PYTHONPATH=. python bench/exact_pages.py smollm2-135m standard --out smollm2.json
    PYTHONPATH=. python bench/exact_pages.py small assignments --out small.json

Choices: a flow, scored for every draft or for the first of 2, 4, ... of them (reselect); pages held
for the round by the attention mass of the verification before it (of its last token, or summed over
its queries); the union of half a budget of those with half a budget of fresh ones. The product has
the first two; the others are here to be compared. Sequences are ten texts or own dense answers.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow import models, ops
from sparrow.calibration import drafts
from sparrow.calibration.flows import texts
from sparrow.calibration.flows.score import page_mask
from sparrow.calibration.replay import Prompt, make_arm, make_variant
from sparrow.dataflow.prompts import of_task, of_texts
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.models.attention import PagedPrefill
from sparrow.schema.sampling import SamplingParams
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean, fine_means
from sparrow.sparse.rule import Rule
from sparrow.stats import mean_over_rows

PAGE = 16
FINE = fine_means(4)
SETTINGS = [  # name, flow, drafts that share a choice
    ("block_mean", block_mean, 1),
    *((f"fine_means(4), every {m}" if m > 1 else "fine_means(4)", FINE, m) for m in (1, 2, 4, 8)),
]
HELD = ("mass of the last token, held", "mass of the last round, held", "union of half and half")


class Masses:
    """Attention mass by page of every query of a dense pass, [S, G, M] for each layer."""

    def __init__(self, layers: int) -> None:
        self.by_layer: list[list[Tensor]] = [[] for _ in range(layers)]

    def recorder(self, **settings: Any) -> "Recording":
        return Recording(PagedPrefill(**settings), self)


@dataclass
class Recording:
    """Attention of a prefill that also records masses."""

    inner: PagedPrefill
    masses: Masses

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        out = self.inner(layer, q, k, v, scale=scale)
        k_NGPD = self.inner.cache.field("k", layer)
        table_M = self.inner.table_BM[0]
        kv_heads, size = k_NGPD.shape[1], k_NGPD.shape[3]
        k_GSD = k_NGPD[table_M].transpose(0, 1).reshape(kv_heads, -1, size)
        q_GRTD = q.view(len(q), kv_heads, -1, size).permute(1, 2, 0, 3)
        score = torch.einsum("grtd,gsd->grts", q_GRTD.float(), k_GSD.float()) * scale
        later = torch.arange(k_GSD.shape[1], device=q.device) > self.inner.slots_T[:, None]
        mass = score.masked_fill(later, -torch.inf).softmax(3).mean(1)
        mass_TGM = mass.unflatten(2, (-1, PAGE)).sum(3).transpose(0, 1)
        self.masses.by_layer[layer].append(mass_TGM.half())
        return out


class HeldByMass:
    """A rule whose pages are those of the most mass in the verification before a round."""

    def __init__(self, rounds: drafts.DraftRounds, masses: Masses, choice: str) -> None:
        self.rule, self.choice, count = rounds.rule, choice, rounds.draft_tokens
        self.lengths_B = rounds.starts_B + count
        self.summarise, self.append = self.rule.summarise, self.rule.append
        back = 1 if choice == HELD[0] else count + 1  # queries of the verification
        width = rounds.table_BM.shape[1]
        place_BQ = rounds.starts_B[:, None] - 1 - torch.arange(back, device=rounds.starts_B.device)
        self.by_layer = []
        for parts in masses.by_layer:
            mass_BGM = torch.cat(parts)[place_BQ.clamp(min=0)].float().sum(1)
            self.by_layer.append(torch.nn.functional.pad(mass_BGM, (0, width - mass_BGM.shape[2])))

    def is_dense(self, layer: int) -> bool:
        return False

    def select(
        self, cache: Any, layer: int, q: Tensor, table: Tensor, lengths: Tensor, *rest: Any
    ) -> ops.PageLists:
        budgets, rows = rest
        union = self.choice == HELD[2]
        reserved = PAGE * (self.rule.first + self.rule.last)
        half = ((budgets + reserved) // 2 // PAGE * PAGE) if union else budgets
        sizes = {"page": PAGE, "first": self.rule.first, "last": self.rule.last}
        with ops.using("reference"):
            held = ops.select_pages(self.by_layer[layer], self.lengths_B, half, **sizes)
        if not union:
            return held
        fresh = self.rule.select(cache, layer, q, table, lengths, half, rows)
        assert fresh is not None
        keep_BGM = page_mask(held, table.shape[1]) | page_mask(fresh, table.shape[1])
        order_BGM = (~keep_BGM).int().argsort(dim=2, stable=True)
        return ops.PageLists(order_BGM.int(), keep_BGM.sum(2).int())


def acceptance(
    model: Decoder, sequence: Prompt, flow: Flow, count: int, budgets: list[int], how: int | str
) -> Iterator[tuple[int, Tensor]]:
    """Acceptance by round and position under each budget, of rounds behind so many tokens."""
    variant = make_variant(flow, flow.name, model.spec)
    rule, masses = Rule(flow=flow, dense_layers=frozenset()), Masses(model.spec.layers)
    held = isinstance(how, str)
    drafts.PagedPrefill = masses.recorder if held else PagedPrefill  # type: ignore[misc]
    sizes = {"start": sequence.start or 1, "draft_tokens": count}
    reselect = {} if held else {"reselect": how}
    rounds = drafts.DraftRounds(model, sequence.ids, rule, **sizes, **reselect)
    if isinstance(how, str):
        rounds.rule = HeldByMass(rounds, masses, how)  # type: ignore[assignment]
    for budget in budgets:
        schedule = make_arm(variant, flow, budget).schedule
        assert schedule is not None
        alpha_BJ = rounds.acceptance(schedule)
        yield budget, alpha_BJ[rounds.starts_B >= budget]


def sequences_of(model: Decoder, source: str, count: int, length: int) -> list[Prompt]:
    if source == "standard" or Path(source).is_dir():
        found = texts.standard(print) if source == "standard" else texts.from_folder(source)
        return list(of_texts(model, found, tokens=8192).prompts)
    prompts = of_task(model, source, length=length, count=count).prompts
    engine = Engine(model, max_running=count, max_context=length * 3)
    params = SamplingParams(max_tokens=length * 2, seed=0)
    done = engine.generate([prompt.ids for prompt in prompts], params)
    answered = [
        Prompt(
            number=n,
            name=str(n),
            ids=(*c.prompt_ids.tolist(), *c.token_ids.tolist()),
            start=len(c.prompt_ids),
        )
        for n, c in enumerate(done)
    ]
    lengths = sorted(len(sequence.ids) for sequence in answered)
    print(f"{source}: answers end at {lengths[0]} to {lengths[-1]} tokens", flush=True)
    return answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("source", help="standard, a folder of texts, or a task")
    parser.add_argument("--draft-tokens", type=int, action="append")
    parser.add_argument("--budget", type=int, action="append")
    parser.add_argument("--choice", action="append", help="such as block_mean; all by default")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    model = models.load(chosen.model, dtype=chosen.dtype)
    sequences = sequences_of(model, chosen.source, chosen.count, chosen.length)
    budgets = chosen.budget or [256, 512, 1024]
    rows = []
    for count in chosen.draft_tokens or [4, 8, 16]:
        fresh = [(name, flow, m) for name, flow, m in SETTINGS if m <= count]
        for name, flow, how in [*fresh, *((name, FINE, name) for name in HELD)]:
            if chosen.choice and name not in chosen.choice:
                continue
            found: dict[int, list[Tensor]] = {budget: [] for budget in budgets}
            for sequence in sequences:
                if len(sequence.ids) > (sequence.start or 1) + count:
                    for budget, alpha in acceptance(model, sequence, flow, count, budgets, how):
                        found[budget] += [alpha] if len(alpha) else []
            for budget, alphas in found.items():
                if alphas:
                    rows.append(_row(name, budget, count, alphas))
                    print(json.dumps(rows[-1]), flush=True)
    about = {"model": chosen.model, "source": chosen.source, "dtype": chosen.dtype}
    chosen.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def _row(name: str, budget: int, count: int, alphas: list[Tensor]) -> dict[str, Any]:
    """Means over sequences, which count alike, with intervals over them."""
    mean = mean_over_rows([float(alpha.mean()) for alpha in alphas])
    accepted = [float(drafts.accepted_tokens(alpha).mean()) for alpha in alphas]
    share = mean_over_rows([value / count for value in accepted])
    return {
        "choice": name,
        "budget": budget,
        "draft_tokens": count,
        "sequences": len(alphas),
        "rounds": sum(map(len, alphas)),
        "acceptance": mean.value,
        "acceptance_interval": [mean.low, mean.high],
        "accepted": share.value * count,
        "accepted_interval": [end and end * count for end in (share.low, share.high)],
        "acceptance_by_position": torch.stack([alpha.mean(0) for alpha in alphas]).mean(0).tolist(),
        "pooled": float(torch.cat(alphas).mean()),
    }


if __name__ == "__main__":
    main()
