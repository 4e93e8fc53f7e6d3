"""What rules would have kept of dense attention: true pages found, mass kept, output changed.

All of it on the dense stream, layer by layer, at blocks of queries spread over the sequence, and
only for queries whose budget drops pages. Legend of the dimension letters: sparrow/ops/types.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparrow import ops
from sparrow.schema.flow import Errors
from sparrow.sparse.rule import Rule

BLOCKS, QUERIES = 32, 16  # blocks of a sequence, and queries of a block
SUMS = 5  # true pages found, true pages, mass, error, queries


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A rule with pages of a size, under a budget of tokens."""

    rule: Rule
    page: int
    budget: int


class AttentionError(Errors):
    """Means over the queries of a layer, or of all sparse layers."""

    queries: int = 0


class Probe:
    """Dense attention for a decoder that measures cases on its way: one pass for all of them."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = tuple(cases)
        self._sums: dict[tuple[int, int], Tensor] = {}  # of a case and layer: SUMS

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        scores: dict[tuple[Rule, int], ops.Scores] = {}  # cases of one rule share what it stores
        for rule, page in dict.fromkeys((case.rule, case.page) for case in self.cases):
            if (scorer := rule.scorer(layer, page)) is not None:
                scores[rule, page] = scorer(q_THD, k_TGD, v_TGD, 0)
        for start, stop in blocks(len(q_THD)):
            biting = {
                index: case
                for index, case in enumerate(self.cases)
                if stop > case.budget and (case.rule, case.page) in scores
            }
            if not biting:
                continue
            seen = _Seen(q_THD, k_TGD, v_TGD, start, stop, scale)
            for index, case in biting.items():
                sums = _measure(case, seen, scores[case.rule, case.page](start, stop))
                self._sums[index, layer] = self._sums.get((index, layer), 0.0) + sums
        bounds = torch.tensor([0, len(q_THD)], device=q_THD.device)
        return ops.attend_causal(q_THD, k_TGD, v_TGD, bounds, scale=scale)

    def results(self) -> list[tuple[AttentionError, dict[int, AttentionError]]]:
        """Of every case, the mean over its sparse layers, and by layer."""
        found = []
        for index in range(len(self.cases)):
            own = {layer: sums for (case, layer), sums in self._sums.items() if case == index}
            by_layer = {layer: _mean([sums]) for layer, sums in own.items()}
            found.append((_mean([*own.values()]), by_layer))
        return found


def blocks(length: int) -> Iterator[tuple[int, int]]:
    """Ranges of queries, spread evenly; the last one ends where the sequence does."""
    every = max(QUERIES, length // BLOCKS)
    for stop in range(length - (length - 1) // every * every, length + 1, every):
        yield max(0, stop - QUERIES), stop


class _Seen:
    """A block of queries: their true attention weights and outputs."""

    def __init__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, start: int, stop: int, scale: float
    ) -> None:
        self.start, self.stop = start, stop
        kv_heads = k_TGD.shape[1]
        q_GnRD = q_THD[start:stop].float().unflatten(1, (kv_heads, -1)).transpose(0, 1)
        k_SGD, self.v_GSD = k_TGD[:stop].float(), v_TGD[:stop].float().transpose(0, 1)
        logit_GnRS = torch.einsum("gnrd,sgd->gnrs", q_GnRD, k_SGD) * scale
        self.length_n = torch.arange(start + 1, stop + 1, device=q_THD.device)
        future_nS = torch.arange(stop, device=q_THD.device) >= self.length_n[:, None]
        weight_GnRS = logit_GnRS.masked_fill(future_nS[:, None], float("-inf")).softmax(3)
        self.weight_nGRS = weight_GnRS.transpose(0, 1)
        self.out_nGRD = self._attend(self.weight_nGRS)

    def _attend(self, weight_nGRS: Tensor) -> Tensor:
        return torch.einsum("ngrs,gsd->ngrd", weight_nGRS, self.v_GSD)

    def masses(self, page: int) -> Tensor:
        """The attention mass of every page, mean over the heads of a group, [n, G, M]."""
        room = -self.stop % page
        weight_nGS = torch.nn.functional.pad(self.weight_nGRS.mean(2), (0, room))
        return weight_nGS.unflatten(2, (-1, page)).sum(3)

    def error(self, keep_nGM: Tensor, page: int) -> Tensor:
        """The relative change of the output if only these pages are attended to, [n]."""
        keep_nGS = keep_nGM.repeat_interleave(page, dim=2)[:, :, : self.stop]
        kept_nGRS = self.weight_nGRS * keep_nGS.unsqueeze(2)
        kept_nGRS = kept_nGRS / kept_nGRS.sum(3, keepdim=True).clamp(min=1e-30)
        change_nGRD = self._attend(kept_nGRS) - self.out_nGRD
        change_n, out_n = (x.flatten(1).norm(dim=1) for x in (change_nGRD, self.out_nGRD))
        return change_n / out_n.clamp(min=1e-30)


def _measure(case: Case, seen: _Seen, score_nGM: Tensor) -> Tensor:
    """The sums of one block, float64 [SUMS]."""
    truth_nGM = seen.masses(case.page)
    room = truth_nGM.shape[2] - score_nGM.shape[2]
    score_nGM = torch.nn.functional.pad(score_nGM, (0, room), value=float("-inf"))
    keep_nGM = kept_pages(case, score_nGM.float(), seen.length_n, case.rule.mass)
    best_nGM = kept_pages(case, truth_nGM, seen.length_n, None)

    pages_n1 = -(-seen.length_n[:, None] // case.page)
    drops_n = best_nGM.sum(2).amin(1) < pages_n1[:, 0]
    index_M = torch.arange(truth_nGM.shape[2], device=truth_nGM.device)
    free_nM = (index_M >= case.rule.first) & (index_M < pages_n1 - case.rule.last)
    wanted_nGM = best_nGM & (free_nM & drops_n[:, None])[:, None]
    mass_n = (truth_nGM * keep_nGM).sum(2).mean(1)
    parts = [
        (wanted_nGM & keep_nGM).sum(),
        wanted_nGM.sum(),
        (mass_n * drops_n).sum(),
        (seen.error(keep_nGM, case.page) * drops_n).sum(),
        drops_n.sum(),
    ]
    return torch.stack([part.double() for part in parts])


def kept_pages(case: Case, score_nGM: Tensor, length_n: Tensor, mass: float | None) -> Tensor:
    """The pages that scores keep under the case's budget, bool [n, G, M]."""
    choice: dict[str, Any] = {"first": case.rule.first, "last": case.rule.last, "mass": mass}
    budget_n = torch.full_like(length_n, case.budget)
    lists = ops.select_pages(score_nGM.contiguous(), length_n, budget_n, page=case.page, **choice)
    return mask_of(lists, score_nGM.shape[2])


def mask_of(lists: ops.PageLists, pages: int) -> Tensor:
    """Page lists as a mask over the pages of a sequence, bool [B, G, pages]."""
    place = torch.where(lists.pages < 0, pages, lists.pages).long()
    mask = torch.zeros((*place.shape[:2], pages + 1), dtype=torch.bool, device=place.device)
    return mask.scatter(2, place, True)[:, :, :pages]


def _mean(layers: Sequence[Tensor]) -> AttentionError:
    """Layers count alike: the mean over layers of their own means."""
    sums = [own for own in (layer.tolist() for layer in layers) if own[4]]
    count = int(sum(own[4] for own in sums))
    if not count:
        return AttentionError()
    recalls = [own[0] / own[1] for own in sums if own[1]]
    return AttentionError(
        recall=sum(recalls) / len(recalls) if recalls else None,
        mass=sum(own[2] / own[4] for own in sums) / len(sums),
        error=sum(own[3] / own[4] for own in sums) / len(sums),
        queries=count,
    )
