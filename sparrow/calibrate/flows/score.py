"""How good flows are on a real model: p05 of exact acceptance on long texts, and why.

Every text is read once densely; on that pass the attention error of all flows is measured. Then the
text runs once for each flow and budget with sparse attention (keys and values by the sparse
stream), and acceptance is exact at every position. What is measured is kept, one JSON line for each
text, flow, budget and configuration, so that a run that was interrupted goes on.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sparrow.calibrate.flows.attention_error import AttentionError, Case, Probe
from sparrow.calibrate.flows.store import Store
from sparrow.calibrate.flows.texts import Text
from sparrow.calibrate.replay import acceptances, read
from sparrow.calibrate.tails import TAIL
from sparrow.models import Decoder, ModelSpec, fingerprint
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.flow import Flow, Program, trace
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule

MEASURE = 1  # goes up when a figure gets another meaning: kept results are then made anew
DRAWS = 2000

Progress = Callable[[int, int, str], None]
Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """All of a rule that is not its formula, but for the budget. The defaults are the paper's."""

    page: int = 16
    first: int = 1
    last: int = 2
    dense_layers: tuple[int, ...] = (0, 1)

    def rule(self, flow: Flow) -> Rule:
        dense = frozenset(self.dense_layers)
        return Rule(flow=flow, first=self.first, last=self.last, dense_layers=dense)

    def schedule(self, flow: Flow, budget: int) -> Schedule:
        return Schedule.fixed(budget, flow=flow.name, **asdict(self))


REFERENCE = Configuration()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One thing to measure on every text: a flow in a configuration under a budget."""

    flow: Flow
    configuration: Configuration
    budget: int
    program: Program

    @property
    def key(self) -> dict[str, Any]:
        own = {"digest": self.program.digest, "budget": self.budget}
        return own | asdict(self.configuration) | {"measure": MEASURE}

    @property
    def case(self) -> Case:
        rule = self.configuration.rule(self.flow)
        return Case(rule=rule, page=self.configuration.page, budget=self.budget)


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
) -> Result:
    """Measure flows, and others beside them, on every text. The result is ready for JSON.

    Without `errors` only p05 is measured: recall, mass and output error of new cells stay unknown.

    The block mean is always beside them; with `reference` also in the reference configuration,
    which a leaderboard needs.
    """
    _check(model, texts, budgets, configuration)
    places = [(flow, configuration) for flow in (*flows, block_mean, *against)]
    places += [(block_mean, REFERENCE)] if reference else []
    cells = _cells(model.spec, places, budgets)
    name = {"model": fingerprint(model)}
    total = len(texts) * (len(cells) + 1)

    def tell(number: int, done: int, what: str) -> None:
        if progress is not None:
            progress(number * (len(cells) + 1) + done, total, what)

    found = []
    for number, text in enumerate(texts):
        key = {**name, "text": text.sha256}
        found.append(_text(model, text, cells, key, store, errors, partial(tell, number)))
    submitted = {_program(model.spec, flow, configuration).digest for flow in flows}
    return {
        "model": model.source.name if model.source else "random weights",
        "fingerprint": name["model"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "tokens": len(texts[0].ids),
        "texts": [{k: getattr(t, k) for k in ("name", "kind", "sha256", "note")} for t in texts],
        "configuration": asdict(configuration),
        "rows": _rows(cells, found, submitted, configuration),
    }


# What is measured.


def _cells(
    spec: ModelSpec, places: Sequence[tuple[Flow, Configuration]], budgets: Sequence[int]
) -> list[Cell]:
    """Every flow in its configuration under every budget, each content once."""
    cells: dict[str, Cell] = {}
    for flow, configuration in places:
        program = _program(spec, flow, configuration)
        for budget in dict.fromkeys(budgets):
            cell = Cell(flow=flow, configuration=configuration, budget=budget, program=program)
            configuration.schedule(flow, budget)  # refuses what cannot be
            cells.setdefault(repr(cell.key), cell)
    return list(cells.values())


def _program(spec: ModelSpec, flow: Flow, configuration: Configuration) -> Program:
    return trace(flow, configuration.page, spec.head_size, spec.heads // spec.kv_heads)


def _text(
    model: Decoder,
    text: Sample,
    cells: Sequence[Cell],
    key: Mapping[str, str],
    store: Store,
    errors: bool,
    tell: Callable[[int, str], None],
) -> dict[int, Result]:
    """The figures of all cells on one text, by cell number: kept ones, and those made now."""
    found = {n: store.get({**key, **cell.key}) for n, cell in enumerate(cells)}
    missing = [n for n, figures in found.items() if figures is None]
    if missing:
        tell(0, f"{text.name}: dense")
        probe = Probe([cells[n].case for n in missing]) if errors else None
        dense = read(model, text.ids, probe)
        known = _known(probe, len(missing))
        for n, seen in zip(missing, known, strict=True):
            cell, start = cells[n], time.perf_counter()
            tell(1 + n, f"{text.name}: {cell.flow.name}, budget {cell.budget}")
            schedule = cell.configuration.schedule(cell.flow, cell.budget)
            alpha = acceptances(model, dense, 1, schedule, cell.flow).cpu().numpy()
            figures = {"p05": float(np.quantile(alpha, TAIL)), "mean": float(alpha.mean()), **seen}
            figures["seconds"] = round(time.perf_counter() - start, 3)
            about = {"name": text.name, "flow": cell.flow.name}
            found[n] = store.put({**key, **cell.key}, about | figures)
    tell(1 + len(cells), text.name)
    return {n: figures for n, figures in found.items() if figures is not None}


def _known(probe: Probe | None, cells: int) -> list[Result]:
    """What a probe saw of every cell; without one nothing."""
    if probe is None:
        return [{"recall": None, "mass": None, "error": None, "queries": 0, "layers": {}}] * cells
    return [
        _three(whole)
        | {"queries": whole.queries}
        | {"layers": {str(layer): _three(own) for layer, own in sorted(layers.items())}}
        for whole, layers in zip(probe.results(), probe.by_layer(), strict=True)
    ]


def _three(error: AttentionError) -> Result:
    return {"recall": error.recall, "mass": error.mass, "error": error.error}


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


# What comes out.


def _rows(
    cells: Sequence[Cell],
    found: Sequence[Mapping[int, Result]],
    submitted: set[str],
    configuration: Configuration,
) -> list[Result]:
    base = {
        (cell.configuration, cell.budget): _p05(found, n)
        for n, cell in enumerate(cells)
        if cell.program.digest == _base(cell)
    }
    rows = []
    for n, cell in enumerate(cells):
        own, plain = _p05(found, n), base[cell.configuration, cell.budget]
        here = cell.configuration == configuration
        about = _about(cell) | {"submitted": here and cell.program.digest in submitted}
        row = about | interval("p05", own) | interval("gain", own - plain)
        reference = base.get((REFERENCE, cell.budget))
        if reference is not None:
            row |= interval("configuration_gain", plain - reference)
        rows.append(row | _means([by_cell[n] for by_cell in found]))
    return rows


def _base(cell: Cell) -> str:
    """The digest that the block mean has with the pages of a cell."""
    program = cell.program
    return trace(block_mean, program.page, program.head_size, program.group).digest


def _p05(found: Sequence[Mapping[int, Result]], cell: int) -> np.ndarray:
    return np.array([by_cell[cell]["p05"] for by_cell in found])


def _about(cell: Cell) -> Result:
    stored, mean = cell.program.bytes(torch.bfloat16), 2 * cell.program.head_size
    return {
        "flow": cell.flow.name,
        "digest": cell.program.digest,
        "bytes": stored,
        "of_mean": stored / mean,
        "budget": cell.budget,
        **asdict(cell.configuration),
    }


def _means(figures: Sequence[Result]) -> Result:
    """Means over texts of the attention errors, and p05 of each text."""
    means = {name: _mean([own[name] for own in figures]) for name in ("recall", "mass", "error")}
    layers = {
        layer: {
            name: _mean([own["layers"].get(layer, {}).get(name) for own in figures])
            for name in means
        }
        for layer in dict.fromkeys(layer for own in figures for layer in own["layers"])
    }
    by_text = [own["p05"] for own in figures]
    return {
        **means,
        "mean": _mean([own["mean"] for own in figures]),
        "p05_by_text": by_text,
        "layers": layers,
        "seconds": _mean([own["seconds"] for own in figures]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def interval(name: str, values: np.ndarray) -> Result:
    """The mean over texts with its 95 % interval, by drawing texts anew; of one text there is none.

    Draws are the same for every call, so differences of two flows are paired by text.
    """
    mean = float(values.mean())
    if len(values) < 2:
        return {name: mean, f"{name}_low": None, f"{name}_high": None}
    picks = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.quantile(values[picks].mean(1), (0.025, 0.975))
    return {name: mean, f"{name}_low": float(low), f"{name}_high": float(high)}
