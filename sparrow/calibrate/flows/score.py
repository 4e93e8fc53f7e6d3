"""How good flows are on a real model: p05 of exact acceptance on long texts, and why.

Every text is read once densely; on that pass the attention error of all flows is measured. Then the
text runs once for each flow and budget with sparse attention (keys and values by the sparse
stream), and acceptance is exact at every position. What is measured is kept, one JSON line for each
text, flow, budget and configuration, so that a run that was interrupted goes on.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.calibrate.arms import Arm, arm, variant_of
from sparrow.calibrate.flows.attention_error import Case, Probe
from sparrow.calibrate.flows.texts import Text
from sparrow.calibrate.replay import acceptances, read
from sparrow.files import FolderLock, open_append, read_lines, refuse_links, sealed
from sparrow.models import Decoder, fingerprint
from sparrow.schema.flow import Configuration, Errors, FlowScore, FlowScores, FlowText
from sparrow.schema.surface import Variant
from sparrow.schema.types import Progress
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule
from sparrow.stats import TAIL

CELLS = "cells.jsonl"
MEASURE = 1  # goes up when a figure gets another meaning: kept results are then made anew
DRAWS = 2000
REFERENCE = Configuration()

Figures = dict[str, Any]
Key = Mapping[str, Any]
Cell = tuple[Variant, Arm]  # one thing to measure on every text


# What is read, and what is kept.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A text in tokens of a model."""

    name: str
    kind: str
    ids: tuple[int, ...]
    note: str = ""

    @property
    def sha256(self) -> str:
        """Of the tokens: equal ones are equal, wherever the text came from."""
        return hashlib.sha256(np.asarray(self.ids, np.int64).tobytes()).hexdigest()[:16]


def samples(tokenizer: Any, texts: Sequence[Text], tokens: int) -> list[Sample]:
    """The first `tokens` tokens of every text; all must have so many."""
    made = []
    for text in texts:
        try:
            ids = tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # what tokenizers raise is no class of its own
            raise ValueError(
                f"this model's tokenizer cannot read the text {text.name!r} ({error}); give texts "
                "in its language (--texts), or another model"
            ) from error
        if len(ids) < tokens:
            raise ValueError(f"text {text.name!r} has {len(ids)} tokens, {tokens} are asked for")
        made.append(Sample(name=text.name, kind=text.kind, ids=tuple(ids[:tokens]), note=text.note))
    return made


class Store:
    """Measured figures by what they were measured of: JSON lines in a run folder.

    One process at a time has the folder, from the beginning until `close`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.file = Path(folder) / CELLS
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.file.parent, setting="--out")
        self._found: dict[str, Figures] = {}
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._lock.close()

    def get(self, key: Key) -> Figures | None:
        return self._found.get(json.dumps(key, sort_keys=True))

    def put(self, key: Key, figures: Figures) -> Figures:
        """Keep figures, on the disk before anything else is measured."""
        with open_append(self.file) as file:
            file.write(f"{sealed(json.dumps({'key': dict(key), 'figures': figures}))}\n".encode())
        return self._found.setdefault(json.dumps(key, sort_keys=True), figures)

    def _read(self) -> None:
        """A last line without its end is of a run that was killed while it wrote."""
        refuse_links([self.file])
        if not self.file.exists():
            return
        data = self.file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.file, len(whole))
        for number, cell in enumerate(read_lines(self.file), 1):
            if cell.keys() != {"key", "figures"} or not isinstance(cell["figures"], dict):
                raise ValueError(f"{self.file}, line {number}: not a measured cell")
            self._found[json.dumps(cell["key"], sort_keys=True)] = cell["figures"]


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
    texts: Sequence[Sample],
    flows: Sequence[Flow],
    budgets: Sequence[int],
    *,
    store: Store,
    against: Sequence[Flow] = (),
    configuration: Configuration = REFERENCE,
    reference: bool = False,
    errors: bool = True,
    progress: Progress | None = None,
) -> FlowScores:
    """Measure flows, and others beside them, on every text.

    Without `errors` only p05 is measured: recall, mass and output error of new cells stay unknown.

    The block mean is always beside them; with `reference` also in the reference configuration,
    which a leaderboard needs.
    """
    _check(model, texts, budgets, configuration)
    places = [(flow, configuration) for flow in (*flows, block_mean, *against)]
    places += [(block_mean, REFERENCE)] if reference else []
    variants = [variant_of(flow, flow.name, model.spec, **dict(own)) for flow, own in places]
    unique: dict[str, Cell] = {}  # each content once
    for variant, (flow, _) in zip(variants, places, strict=True):
        for budget in dict.fromkeys(budgets):
            cell = variant, arm(variant, flow, budget)
            unique.setdefault(repr(_key(cell)), cell)
    cells, weights = list(unique.values()), fingerprint(model)
    total = len(texts) * (len(cells) + 1)

    def tell(number: int, done: int, what: str) -> None:
        if progress is not None:
            progress(number * (len(cells) + 1) + done, total, what)

    found = [
        _text(model, text, cells, weights, store, errors, partial(tell, number))
        for number, text in enumerate(texts)
    ]
    submitted = {variant.digest for variant in variants[: len(flows)]}
    plain = {v.digest for v, (flow, _) in zip(variants, places, strict=True) if flow is block_mean}
    rows = _rows(cells, found, plain, 2 * model.spec.head_size)
    return FlowScores(
        model=model.source.name if model.source else "random weights",
        fingerprint=weights,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        tokens=len(texts[0].ids),
        texts=tuple(
            FlowText(**{name: getattr(text, name) for name in FlowText.model_fields})
            for text in texts
        ),
        configuration=configuration,
        rows=tuple(
            row.replace(submitted=row.digest in submitted and _configuration(row) == configuration)
            for row in rows
        ),
    )


def _check(
    model: Decoder, texts: Sequence[Sample], budgets: Sequence[int], configuration: Configuration
) -> None:
    if not texts or not budgets:
        raise ValueError(f"got {len(texts)} texts and {len(budgets)} budgets, allowed: some")
    tokens, room = len(texts[0].ids), model.spec.max_positions
    if not 1 < tokens <= room:
        raise ValueError(f"got {tokens} tokens a text, allowed: 2 to {room}, the model's context")
    wide = [budget for budget in budgets if budget >= tokens]
    if wide:
        raise ValueError(
            f"a budget of {wide[0]} keeps all of {tokens} tokens; give a smaller one or more tokens"
        )
    beyond = [layer for layer in configuration.dense_layers if layer >= model.spec.layers]
    if beyond:
        raise ValueError(
            f"dense layers {beyond}: the model has layers 0 to {model.spec.layers - 1}"
        )


def _configuration(own: Variant | FlowScore) -> Configuration:
    return Configuration(**{name: getattr(own, name) for name in Configuration.model_fields})


def _key(cell: Cell) -> dict[str, Any]:
    variant, arm = cell
    own = {"digest": variant.digest, "budget": arm.budget}
    return own | dict(_configuration(variant)) | {"measure": MEASURE}


def _text(
    model: Decoder,
    text: Sample,
    cells: Sequence[Cell],
    weights: str,
    store: Store,
    errors: bool,
    tell: Callable[[int, str], None],
) -> list[Figures]:
    """The figures of all cells on one text: kept ones, and those made now."""
    keys = [{"model": weights, "text": text.sha256} | _key(cell) for cell in cells]
    found = {n: kept for n, key in enumerate(keys) if (kept := store.get(key)) is not None}
    missing = [n for n in range(len(cells)) if n not in found]
    if missing:
        tell(0, f"{text.name}: dense")
        probe = Probe([_case(cells[n][1]) for n in missing]) if errors else None
        dense = read(model, text.ids, probe)
        for n, seen in zip(missing, _seen(probe, len(missing)), strict=True):
            (_, arm), start = cells[n], time.perf_counter()
            assert arm.schedule is not None
            tell(1 + n, f"{text.name}: {arm.flow.name}, budget {arm.budget}")
            alpha = acceptances(model, dense, 1, arm.schedule, arm.flow).cpu().numpy()
            figures: Figures = {"name": text.name, "flow": arm.flow.name}
            figures |= {"p05": float(np.quantile(alpha, TAIL)), "mean": float(alpha.mean()), **seen}
            figures["seconds"] = round(time.perf_counter() - start, 3)
            found[n] = store.put(keys[n], figures)
    tell(1 + len(cells), text.name)
    return [found[n] for n in range(len(cells))]


def _case(arm: Arm) -> Case:
    assert arm.schedule is not None
    assert arm.budget is not None
    rule = Rule.of(arm.schedule, arm.flow)
    return Case(rule=rule, page=arm.schedule.page, budget=arm.budget)


def _seen(probe: Probe | None, cells: int) -> list[Figures]:
    """What a probe saw of every cell; without one nothing."""
    if probe is None:
        return [{**dict(Errors()), "queries": 0, "layers": {}}] * cells
    return [
        dict(whole) | {"layers": {str(n): _three(dict(own)) for n, own in sorted(layers.items())}}
        for whole, layers in zip(probe.results(), probe.by_layer(), strict=True)
    ]


def _three(figures: Mapping[str, Any]) -> Figures:
    return {name: figures[name] for name in Errors.model_fields}


# What comes out.


def _rows(
    cells: Sequence[Cell], found: Sequence[Sequence[Figures]], plain: set[str], mean_bytes: int
) -> list[FlowScore]:
    """found: by text, the figures of every cell. plain, mean_bytes: of the block mean."""
    p05 = np.array([[figures["p05"] for figures in text] for text in found])
    base = {
        (_configuration(variant), one.budget): p05[:, n]
        for n, (variant, one) in enumerate(cells)
        if variant.digest in plain
    }
    rows = []
    for n, (variant, one) in enumerate(cells):
        assert one.budget is not None
        own = _configuration(variant)
        mean, reference = base[own, one.budget], base.get((REFERENCE, one.budget))
        gains = interval("p05", p05[:, n]) | interval("gain", p05[:, n] - mean)
        if reference is not None:
            gains |= interval("configuration_gain", mean - reference)
        rows.append(
            FlowScore(
                flow=variant.flow,
                digest=variant.digest,
                bytes=variant.field_bytes,
                of_mean=variant.field_bytes / mean_bytes,
                budget=one.budget,
                **dict(own),
                submitted=False,
                **gains,
                **_means([text[n] for text in found]),
            )
        )
    return rows


def _means(figures: Sequence[Figures]) -> Figures:
    """Means over texts of the attention errors, and p05 of each text."""
    layers = dict.fromkeys(layer for own in figures for layer in own["layers"])
    return {
        **_errors(figures),
        "mean": _mean([own["mean"] for own in figures]),
        "p05_by_text": tuple(own["p05"] for own in figures),
        "layers": {
            n: Errors(**_errors([own["layers"].get(n, {}) for own in figures])) for n in layers
        },
        "seconds": _mean([own["seconds"] for own in figures]),
    }


def _errors(figures: Sequence[Mapping[str, Any]]) -> Figures:
    return {name: _mean([own.get(name) for own in figures]) for name in Errors.model_fields}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def interval(name: str, values: np.ndarray) -> Figures:
    """The mean over texts with its 95 % interval, by drawing texts anew; of one text there is none.

    Draws are the same for every call, so differences of two flows are paired by text.
    """
    mean = float(values.mean())
    if len(values) < 2:
        return {name: mean, f"{name}_low": None, f"{name}_high": None}
    picks = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.quantile(values[picks].mean(1), (0.025, 0.975))
    return {name: mean, f"{name}_low": float(low), f"{name}_high": float(high)}
