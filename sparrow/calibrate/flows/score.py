"""How good flows are on a real model: p05 of exact acceptance on long texts, and why.

Every text is read once densely; on that pass the attention error of all flows is measured. Then the
text runs once for each flow and budget with sparse attention (keys and values by the sparse
stream), and acceptance is exact at every position. What is measured is kept, one JSON line for each
text, flow, budget and configuration, so that a run that was interrupted goes on.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.calibrate.flows.attention_error import Case, Probe
from sparrow.calibrate.flows.texts import Text
from sparrow.calibrate.replay import Arm, acceptances, arm, read, variant_of
from sparrow.calibrate.store import Store
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
Cell = tuple[Variant, Arm]  # one thing to measure on every text


class Sample(FlowText):
    """A text in tokens of a model."""

    ids: tuple[int, ...]


def samples(tokenizer: Any, texts: Sequence[Text], tokens: int) -> list[Sample]:
    """The first `tokens` tokens of every text; all must have so many.

    Their sha256 is that of the tokens: equal ones are equal, wherever the text came from.
    """
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
        digest = hashlib.sha256(np.asarray(ids[:tokens], np.int64).tobytes()).hexdigest()[:16]
        about = {"name": text.name, "kind": text.kind, "sha256": digest, "note": text.note}
        made.append(Sample(**about, ids=tuple(ids[:tokens])))
    return made


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
    progress: Progress | None = None,
) -> FlowScores:
    """Measure flows, and others beside them, on every text.

    The block mean is always beside them; with `reference` also in the reference configuration,
    which a leaderboard needs.
    """
    _check(model, texts, budgets, configuration)
    places = [(flow, configuration) for flow in (*flows, block_mean, *against)]
    places += [(block_mean, REFERENCE)] if reference else []
    cells, weights = _cells(model, places, budgets), fingerprint(model)

    def tell(before: int, done: int, what: str) -> None:
        if progress is not None:
            progress(before + done, len(texts) * len(cells), what)

    found = []
    for number, text in enumerate(texts):
        keys = [{"model": weights, "text": text.sha256} | _key(cell) for cell in cells]
        found.append(_measure(model, text, cells, keys, store, partial(tell, number * len(cells))))
    return FlowScores(
        model=model.source.name if model.source else "random weights",
        fingerprint=weights,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        tokens=len(texts[0].ids),
        texts=tuple(FlowText(**text.model_dump(exclude={"ids"})) for text in texts),
        configuration=configuration,
        rows=tuple(_rows(model, cells, found, [(flow, configuration) for flow in flows])),
    )


def _check(
    model: Decoder, texts: Sequence[Sample], budgets: Sequence[int], configuration: Configuration
) -> None:
    if not budgets:
        raise ValueError("got no budget to score flows under, allowed: one or more")
    tokens, room = len(texts[0].ids), model.spec.max_positions
    if not 1 < tokens <= room:
        raise ValueError(f"got {tokens} tokens a text, allowed: 2 to {room}, the model's context")
    if max(budgets) >= tokens:
        wide = f"a budget of {max(budgets)} keeps all of {tokens} tokens"
        raise ValueError(f"{wide}; give a smaller one or more tokens")
    beyond = [layer for layer in configuration.dense_layers if layer >= model.spec.layers]
    if beyond:
        most = model.spec.layers - 1
        raise ValueError(f"dense layers {beyond}: the model has layers 0 to {most}")


def _cells(
    model: Decoder, places: Sequence[tuple[Flow, Configuration]], budgets: Sequence[int]
) -> list[Cell]:
    """Each content once, under the first of its names."""
    unique: dict[str, Cell] = {}
    for flow, configuration in places:
        variant = variant_of(flow, flow.name, model.spec, **dict(configuration))
        for budget in budgets:
            cell = variant, arm(variant, flow, budget)
            unique.setdefault(repr(_key(cell)), cell)
    return list(unique.values())


def _configuration(own: Variant) -> Configuration:
    return Configuration(**{name: getattr(own, name) for name in Configuration.model_fields})


def _key(cell: Cell) -> Figures:
    variant, arm = cell
    own = {"digest": variant.digest, "budget": arm.budget}
    return own | dict(_configuration(variant)) | {"measure": MEASURE}


def _measure(
    model: Decoder,
    text: Sample,
    cells: Sequence[Cell],
    keys: Sequence[Figures],
    store: Store,
    tell: Callable[[int, str], None],
) -> list[Figures]:
    """The figures of all cells on one text: kept ones, and those made now."""
    found = [store.get(key) for key in keys]
    missing = [n for n, figures in enumerate(found) if figures is None]
    if missing:
        tell(0, f"{text.name}: dense")
        probe = Probe([_case(cells[n][1]) for n in missing])
        dense = read(model, text.ids, probe)
        for n, (whole, layers) in zip(missing, probe.results(), strict=True):
            arm, start = cells[n][1], time.perf_counter()
            assert arm.schedule is not None
            tell(n, f"{text.name}: {arm.flow.name}, budget {arm.budget}")
            alpha = acceptances(model, dense, 1, arm.schedule, arm.flow).cpu().numpy()
            figures = {"name": text.name, "flow": arm.flow.name, **dict(whole)}
            figures |= {"p05": float(np.quantile(alpha, TAIL)), "mean": float(alpha.mean())}
            figures["layers"] = {str(layer): _errors([dict(own)]) for layer, own in layers.items()}
            figures["seconds"] = round(time.perf_counter() - start, 3)
            found[n] = store.put(keys[n], figures)
    tell(len(cells), text.name)
    return [figures for figures in found if figures is not None]


def _case(arm: Arm) -> Case:
    assert arm.schedule is not None
    assert arm.budget is not None
    rule = Rule.of(arm.schedule, arm.flow)
    return Case(rule=rule, page=arm.schedule.page, budget=arm.budget)


# What comes out.


def _rows(
    model: Decoder,
    cells: Sequence[Cell],
    found: Sequence[Sequence[Figures]],
    submitted: Sequence[tuple[Flow, Configuration]],
) -> list[FlowScore]:
    """A row of every cell. found: by text, the figures of every cell."""
    p05 = np.array([[figures["p05"] for figures in text] for text in found])
    pages = {variant.page for variant, _ in cells}
    plain = {variant_of(block_mean, "", model.spec, page=page).digest for page in pages}
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
                of_mean=variant.field_bytes / (2 * model.spec.head_size),
                budget=one.budget,
                **dict(own),
                submitted=(one.flow, own) in submitted,
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
