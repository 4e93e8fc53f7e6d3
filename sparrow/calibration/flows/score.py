"""Scores flows on a real model: p05 of exact acceptance on long texts, and attention error.

Every text is read once densely; on that pass the attention error of all flows is measured. Then the
text runs once for each flow and budget with sparse attention (keys and values by the sparse
stream), and acceptance is exact at every position. What is measured is kept, one JSON line for each
text, flow, budget and configuration, so that a run that was interrupted goes on. Legend of the
dimension letters: sparrow/ops/types.py.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.calibration.flows.texts import Text
from sparrow.calibration.replay import (
    Arm,
    DensePass,
    acceptances,
    make_arm,
    make_variant,
    read,
)
from sparrow.calibration.store import Store
from sparrow.models import Decoder, ModelSpec, fingerprint
from sparrow.schema.flow import Configuration, Errors, FlowScore, FlowScores, FlowText
from sparrow.schema.surface import Variant
from sparrow.schema.types import Progress
from sparrow.sparse.flows.flow import Flow, trace
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule
from sparrow.stats import TAIL, hard_misses

CELLS = "cells.jsonl"
MEASURE = 2  # goes up when a figure gets another meaning: kept results are then made anew
DRAWS = 2000
BLOCKS, QUERIES = 32, 16  # blocks of a sequence, and queries of a block
BY_TEXT = ("p05", "mean", "hard_misses")
SUMS = 5  # true pages found, true pages, mass, error, queries
REFERENCE = Configuration()

Figures = dict[str, Any]


class FlowCell(NamedTuple):
    """One thing to measure on every text: a flow in a configuration, under a budget."""

    configuration: Configuration
    variant: Variant
    arm: Arm
    budget: int

    @property
    def key(self) -> Figures:
        program = {"digest": self.variant.digest, "budget": self.budget}
        return program | dict(self.configuration) | {"measure": MEASURE}

    @property
    def case(self) -> "Selection":
        assert self.arm.schedule is not None
        rule = Rule.of(self.arm.schedule, self.arm.flow)
        return Selection(rule=rule, page=self.configuration.page, budget=self.budget)


class DenseText(NamedTuple):
    """What the dense policy makes of a text."""

    dense: DensePass
    entropy_T: np.ndarray  # of every next token but the last


class TokenizedText(FlowText):
    """A text in tokens of a model."""

    ids: tuple[int, ...]


def samples(tokenizer: Any, texts: Sequence[Text], tokens: int) -> list[TokenizedText]:
    """The first `tokens` tokens of every text; all must have so many.

    Their sha256 is that of the tokens: equal ones are equal, wherever the text came from.
    """
    tokenized = []
    for text in texts:
        try:
            ids = tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # tokenizers in Rust raise that class itself
            raise ValueError(
                f"this model's tokenizer cannot read the text {text.name!r} ({error}); give texts "
                "in its language (--texts), or another model"
            ) from error
        kept = tuple(ids[:tokens])
        if len(kept) < tokens:
            raise ValueError(f"text {text.name!r}: expected {tokens} tokens, got {len(kept)}")
        digest = hashlib.sha256(np.asarray(kept, np.int64).tobytes()).hexdigest()[:16]
        about = {"name": text.name, "kind": text.kind, "sha256": digest, "note": text.note}
        tokenized.append(TokenizedText(**about, ids=kept))
    return tokenized


def append_leaderboard(file: str | Path, scores: FlowScores) -> int:
    """Append the lines of a result to a leaderboard; how many they are."""
    lines = scores.leaderboard(datetime.now(UTC).isoformat(timespec="seconds"))
    place = Path(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    return len(lines)


# Measuring.


def score(
    model: Decoder,
    texts: Sequence[TokenizedText],
    flows: Sequence[Flow],
    budgets: Sequence[int],
    *,
    store: Store,
    against: Sequence[Flow] = (),
    configuration: Configuration = REFERENCE,
    reference: bool = False,
    dense: dict[str, DenseText] | None = None,
    progress: Progress | None = None,
) -> FlowScores:
    """Measure flows, and others beside them, on every text.

    The block mean is always beside them; with `reference` also in the reference configuration,
    which a leaderboard needs. dense: passes to keep from call to call, by text; attention errors,
    which need a pass of their own, are then left out.
    """
    _check(model.spec, len(texts[0].ids), budgets, configuration.dense_layers)
    places = [(flow, configuration) for flow in (*flows, block_mean, *against)]
    places += [(block_mean, REFERENCE)] if reference else []
    cells, weights = _cells(model, places, budgets), fingerprint(model)

    def tell(done: int, what: str) -> None:
        if progress is not None:
            progress(len(figures) * len(cells) + done, len(texts) * len(cells), what)

    figures: list[list[Figures]] = []
    more = {} if dense is None else {"errors": False}
    for text in texts:
        keys = [{"model": weights, "text": text.sha256} | more | cell.key for cell in cells]
        figures.append(_measure(model, text, cells, keys, store, dense, tell))
    return FlowScores(
        model=model.source.name if model.source else "random weights",
        fingerprint=weights,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        tokens=len(texts[0].ids),
        texts=tuple(FlowText(**text.model_dump(exclude={"ids"})) for text in texts),
        configuration=configuration,
        rows=tuple(_rows(model, cells, figures, [(flow, configuration) for flow in flows])),
    )


def _check(spec: ModelSpec, tokens: int, budgets: Sequence[int], dense: Sequence[int]) -> None:
    if not budgets:
        raise ValueError("expected at least one budget")
    if not 1 < tokens <= spec.max_positions:
        raise ValueError(f"expected texts of 2 to {spec.max_positions} tokens, got {tokens}")
    if max(budgets) >= tokens:
        raise ValueError(f"expected budgets below the {tokens} tokens of a text, got {budgets}")
    if beyond := [layer for layer in dense if layer >= spec.layers]:
        raise ValueError(f"dense layers: the model has 0 to {spec.layers - 1}, got {beyond}")


def _cells(
    model: Decoder, places: Sequence[tuple[Flow, Configuration]], budgets: Sequence[int]
) -> list[FlowCell]:
    """Each content once, under the first of its names."""
    unique: dict[str, FlowCell] = {}
    for flow, configuration in places:
        variant = make_variant(flow, flow.name, model.spec, **dict(configuration))
        for budget in budgets:
            cell = FlowCell(configuration, variant, make_arm(variant, flow, budget), budget)
            unique.setdefault(repr(cell.key), cell)
    return list(unique.values())


def _measure(
    model: Decoder,
    text: TokenizedText,
    cells: Sequence[FlowCell],
    keys: Sequence[Figures],
    store: Store,
    passes: dict[str, DenseText] | None,
    tell: Callable[[int, str], None],
) -> list[Figures]:
    """The figures of all cells on one text: kept ones, and those made now."""
    results = [store.get(key) for key in keys]
    missing = [n for n, figures in enumerate(results) if figures is None]
    if missing:
        tell(0, f"{text.name}: dense")
        probe = Probe([cells[n].case for n in missing]) if passes is None else None
        known = None if passes is None else passes.get(text.sha256)
        dense, entropy = kept = known or _dense(model, text, probe)
        if passes is not None:
            passes[text.sha256] = kept
        errors = probe.results() if probe is not None else [(AttentionError(), {})] * len(missing)
        for n, (whole, layers) in zip(missing, errors, strict=True):
            arm, start = cells[n].arm, time.perf_counter()
            assert arm.schedule is not None
            tell(n, f"{text.name}: {arm.flow.name}, budget {arm.budget}")
            alpha = acceptances(model, dense, 1, arm.schedule, arm.flow).cpu().numpy()
            figures = {"name": text.name, "flow": arm.flow.name, **dict(whole)}
            figures |= {"p05": float(np.quantile(alpha, TAIL)), "mean": float(alpha.mean())}
            figures["hard_misses"] = 1000 * float(hard_misses(alpha, entropy).mean())
            parts = {str(at): error.model_dump(exclude={"queries"}) for at, error in layers.items()}
            figures["layers"] = parts
            figures["seconds"] = round(time.perf_counter() - start, 3)
            results[n] = store.put(keys[n], figures)
    tell(len(cells), text.name)
    return [figures for figures in results if figures is not None]


@torch.no_grad()
def _dense(model: Decoder, text: TokenizedText, probe: "Probe | None") -> DenseText:
    dense = read(model, text.ids, probe)
    following = ops.token_stats(dense.hidden_TC[:-1], model.head, dense.ids_T[1:])
    return DenseText(dense, following.entropy.cpu().numpy())


# What comes out.


def _rows(
    model: Decoder,
    cells: Sequence[FlowCell],
    results: Sequence[Sequence[Figures]],
    submitted: Sequence[tuple[Flow, Configuration]],
) -> list[FlowScore]:
    """A row of every cell. results: by text, the figures of every cell."""
    p05 = np.array([[figures["p05"] for figures in text] for text in results])
    pages = {cell.configuration.page for cell in cells}
    plain = {make_variant(block_mean, "", model.spec, page=page).digest for page in pages}
    base = {
        (cell.configuration, cell.budget): p05[:, n]
        for n, cell in enumerate(cells)
        if cell.variant.digest in plain
    }
    rows = []
    for n, (configuration, variant, arm, budget) in enumerate(cells):
        mean, reference = base[configuration, budget], base.get((REFERENCE, budget))
        gains = interval("p05", p05[:, n]) | interval("gain", p05[:, n] - mean)
        if reference is not None:
            gains |= interval("configuration_gain", mean - reference)
        texts = [text[n] for text in results]
        layers = dict.fromkeys(layer for text in texts for layer in text["layers"])
        by_text: Figures = {f"{name}_by_text": tuple(t[name] for t in texts) for name in BY_TEXT}
        by_layer = {name: [text["layers"].get(name, {}) for text in texts] for name in layers}
        rows.append(
            FlowScore(
                flow=variant.flow,
                digest=variant.digest,
                bytes=variant.field_bytes,
                of_mean=variant.field_bytes / (2 * model.spec.head_size),
                budget=budget,
                **dict(configuration),
                submitted=(arm.flow, configuration) in submitted,
                **gains,
                **_means(texts, (*Errors.model_fields, "mean", "hard_misses", "seconds")),
                **by_text,
                layers={name: Errors(**_means(parts)) for name, parts in by_layer.items()},
            )
        )
    return rows


def _means(figures: Sequence[Figures], names: Iterable[str] = Errors.model_fields) -> Figures:
    """Means over texts, of those that have the figure."""
    values = {
        name: [text[name] for text in figures if text.get(name) is not None] for name in names
    }
    return {name: float(np.mean(known)) if known else None for name, known in values.items()}


def interval(name: str, values: np.ndarray) -> Figures:
    """The mean over texts with its 95 % interval, by drawing texts anew; of one text there is none.

    Draws are the same for every call, so differences of two flows are paired by text.
    """
    low = high = None
    if len(values) > 1:
        picks = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
        low, high = np.quantile(values[picks].mean(1), (0.025, 0.975)).tolist()
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}


# Attention error. What rules would have kept of dense attention: true pages found, mass kept,
# output changed. All of it on the dense stream, layer by layer, at blocks of queries spread over
# the sequence, and only for queries whose budget drops pages.


class Selection(NamedTuple):
    """A rule with pages of a size, under a budget of tokens."""

    rule: Rule
    page: int
    budget: int

    @property
    def scored(self) -> "Selection":
        """What its scores depend on: not the budget, unless the formula says so."""
        budgeted = trace(self.rule.flow, *self.rule.flow.probe).budgeted
        return self if budgeted else self._replace(budget=0)

    def keep(self, score_nGM: Tensor, length_n: Tensor, stop: int) -> Tensor:
        """The pages that queries up to `stop` keep by their scores, bool [n, G, M]."""
        room = -(-stop // self.page) - score_nGM.shape[2]
        score_nGM = torch.nn.functional.pad(score_nGM, (0, room), value=float("-inf"))
        return kept_pages(self, score_nGM.float(), length_n, self.rule.mass)


class AttentionError(Errors):
    """Means over the queries of a layer, or of all sparse layers."""

    queries: int = 0


class Probe:
    """Dense attention that also measures the attention error of all cases, in one pass."""

    def __init__(self, cases: Sequence[Selection]) -> None:
        self.cases = tuple(cases)
        self._sums: dict[tuple[int, int], Tensor] = {}  # of a case and layer: SUMS
        self._kept: dict[tuple[int, int], Tensor] = {}  # of a case and block: the last choice

    def __call__(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, scale: float
    ) -> Tensor:
        # Cases of one rule share their scores, unless these depend on the budget.
        scores: dict[Selection, ops.Scores] = {}
        for case in dict.fromkeys(case.scored for case in self.cases):
            scorer = case.rule.scorer(layer, case.page)
            if scorer is not None and case.rule.chooser(layer) == layer:
                budgets_T = torch.full((len(q_THD),), case.budget, device=q_THD.device)
                scores[case] = scorer(q_THD, k_TGD, v_TGD, 0, budgets_T)
        for start, stop in blocks(len(q_THD)):
            biting = {
                index: case
                for index, case in enumerate(self.cases)
                if stop > case.budget and not case.rule.is_dense(layer)
            }
            if not biting:
                continue
            seen = _DenseAttention(q_THD, k_TGD, v_TGD, start, stop, scale)
            for index, case in biting.items():
                if case.scored in scores:  # otherwise the layer uses the choice of one before it
                    score_nGM = scores[case.scored](start, stop)
                    self._kept[index, start] = case.keep(score_nGM, seen.length_n, stop)
                sums = _block_sums(case, seen, self._kept[index, start])
                self._sums[index, layer] = self._sums.get((index, layer), 0.0) + sums
        bounds = torch.tensor([0, len(q_THD)], device=q_THD.device)
        return ops.attend_causal(q_THD, k_TGD, v_TGD, bounds, scale=scale)

    def results(self) -> list[tuple[AttentionError, dict[int, AttentionError]]]:
        """Of every case, the mean over its sparse layers, and by layer."""
        errors = []
        for index in range(len(self.cases)):
            totals = {layer: sums for (case, layer), sums in self._sums.items() if case == index}
            by_layer = {layer: _mean_error([sums]) for layer, sums in totals.items()}
            errors.append((_mean_error([*totals.values()]), by_layer))
        return errors


def blocks(length: int) -> Iterator[tuple[int, int]]:
    """Ranges of queries, spread evenly; the last one ends where the sequence does."""
    every = max(QUERIES, length // BLOCKS)
    for stop in range(length - (length - 1) // every * every, length + 1, every):
        yield max(0, stop - QUERIES), stop


class _DenseAttention:
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


def _block_sums(case: Selection, seen: _DenseAttention, keep_nGM: Tensor) -> Tensor:
    """The sums of one block, float64 [SUMS]."""
    truth_nGM = seen.masses(case.page)
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


def kept_pages(case: Selection, score_nGM: Tensor, length_n: Tensor, mass: float | None) -> Tensor:
    """The pages that scores keep under the case's budget, bool [n, G, M]."""
    choice: dict[str, Any] = {"first": case.rule.first, "last": case.rule.last, "mass": mass}
    budget_n = torch.full_like(length_n, case.budget)
    lists = ops.select_pages(score_nGM.contiguous(), length_n, budget_n, page=case.page, **choice)
    return page_mask(lists, score_nGM.shape[2])


def page_mask(lists: ops.PageLists, pages: int) -> Tensor:
    """Page lists as a mask over the pages of a sequence, bool [B, G, pages]."""
    place = torch.where(lists.pages < 0, pages, lists.pages).long()
    mask = torch.zeros((*place.shape[:2], pages + 1), dtype=torch.bool, device=place.device)
    return mask.scatter(2, place, True)[:, :, :pages]


def _mean_error(layers: Sequence[Tensor]) -> AttentionError:
    """Layers count alike: the mean over layers of their own means."""
    sums = [row for row in (layer.tolist() for layer in layers) if row[4]]
    if not sums:
        return AttentionError()
    recalls = [row[0] / row[1] for row in sums if row[1]]
    return AttentionError(
        recall=sum(recalls) / len(recalls) if recalls else None,
        mass=sum(row[2] / row[4] for row in sums) / len(sums),
        error=sum(row[3] / row[4] for row in sums) / len(sums),
        queries=int(sum(row[4] for row in sums)),
    )
