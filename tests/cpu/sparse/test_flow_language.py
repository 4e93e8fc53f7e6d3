"""Every operation of the language against numpy, written out per query, KV head and page.

Queries of several lengths are scored at once, and blocks of pages that a query does not have hold
NaN: whatever leaks from there shows.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparrow.sparse.flows import interpret
from sparrow.sparse.flows import tensor as t
from sparrow.sparse.flows.flow import Flow, Program, trace
from sparrow.sparse.flows.formats import fp32
from sparrow.sparse.flows.interpret import Scene

PAGE, SIZE, GROUP, HEADS, PAGES = 3, 5, 3, 2, 6
LENGTHS = [2, 3, 10, 19, 18, 8, 17, 13]  # 0, 1, 3, 6, 6, 2, 5 and 4 finished pages
FIRST, LAST, LAYER, LAYERS = 1, 2, 1, 3
SHAPES = {"x": (SIZE,), "y": (SIZE,), "m": (PAGE, SIZE), "s": (), "cube": (2, PAGE, SIZE)}
WEIGHT_SETS = {
    shape: np.random.default_rng(7).normal(size=(LAYERS, HEADS, *shape)).astype(np.float32)
    for shape in ((), (SIZE,), (SIZE, SIZE), (2, SIZE))
}
Array = np.ndarray[Any, Any]
Formula = Callable[..., Any]


@dataclass(frozen=True)
class Here:
    """Where a plain formula stands: one query, one KV head, one page."""

    length: int
    pages: int
    page: int
    head: int


def flow_of(formula: Formula, shapes: Mapping[str, tuple[int, ...]], out: tuple[int, ...]) -> Flow:
    """A flow whose score mixes all entries of what the formula gives, by known weights."""

    def summarise(keys: t.Tensor, values: t.Tensor) -> dict[str, t.Tensor]:
        return {name: t.full(0.0, *shape) for name, shape in shapes.items()}

    def score(query: t.Tensor, fields: Any, position: Any) -> t.Tensor:
        for name in shapes:
            fields[name]  # read, or it would be refused
        value = formula(query, fields, position)
        assert value.shape == out
        flat = value.reshape(math.prod(out)) * t.constant(mixture(out))
        return flat.sum() + 0 * position.page

    formats = {name: fp32(*shape) for name, shape in shapes.items()}
    return Flow(name="x", fields=formats, summarise=summarise, score=score, probe=PROBE)


PROBE = (PAGE, SIZE, GROUP)


def mixture(shape: tuple[int, ...]) -> Array:
    return np.linspace(0.5, 2.0, math.prod(shape)) * (-1.0) ** np.arange(math.prod(shape))


def draw(program: Program, *, own: bool, seed: int) -> tuple[Array, dict[str, Array]]:
    """Queries [n, H, D] and blocks [n, M, G, ...], or [M, G, ...] that all queries share."""
    random = np.random.default_rng(seed)

    def numbers(*shape: int) -> Array:
        return random.normal(size=shape).astype(np.float32)

    lead = (len(LENGTHS), PAGES) if own else (PAGES,)
    blocks = {item.name: numbers(*lead, HEADS, *item.shape) for item in program.fields}
    if own:
        for row, length in enumerate(LENGTHS):
            for block in blocks.values():
                block[row, length // PAGE :] = np.nan
    return numbers(len(LENGTHS), HEADS * GROUP, SIZE), blocks


def run(program: Program, q: Array, blocks: dict[str, Array]) -> Array:
    scene = Scene(lengths=torch.tensor(LENGTHS), layer=LAYER, first=FIRST, last=LAST)
    tensors = {name: torch.from_numpy(block) for name, block in blocks.items()}
    score, fresh = interpret.score(program, torch.from_numpy(q), tensors, scene, pages=PAGES)
    assert score.dtype == torch.float32
    assert score.shape == (len(LENGTHS), HEADS, PAGES)
    assert not fresh
    return score.numpy()


def check(
    formula: Formula,
    plain: Formula,
    *,
    mixes: bool = False,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    seed: int = 0,
) -> None:
    """`plain` is given one page's fields, or with `mixes` those of all finished pages [m, ...]."""
    for own in (True, False):
        shape = _shape(plain, mixes, shapes)
        program = trace(flow_of(formula, shapes, shape), *PROBE)
        q, blocks = draw(program, own=own, seed=seed)
        got = run(program, q, blocks)
        compare(got, _table(plain, mixes, q, blocks, own))


def _shape(plain: Formula, mixes: bool, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that the plain formula gives."""
    fields = {name: np.ones((3, *shape) if mixes else shape) for name, shape in shapes.items()}
    here = Here(length=3 * PAGE, pages=3, page=1, head=0)
    value = np.asarray(plain(np.ones((GROUP, SIZE)), SimpleNamespace(**fields), here))
    return value.shape[1:] if mixes else value.shape


def _table(plain: Formula, mixes: bool, q: Array, blocks: dict[str, Array], own: bool) -> Array:
    table = np.full((len(LENGTHS), HEADS, PAGES), -np.inf)
    for row, length in enumerate(LENGTHS):
        for head in range(HEADS):
            count = length // PAGE
            heads = q[row, head * GROUP : (head + 1) * GROUP].astype(np.float64)
            mine = {
                n: (b[row] if own else b)[:count, head].astype(float) for n, b in blocks.items()
            }
            if mixes and count:
                here = Here(length=length, pages=count, page=-1, head=head)
                every = np.asarray(plain(heads, SimpleNamespace(**mine), here))
            for page in range(count):
                one = {name: block[page] for name, block in mine.items()}
                here = Here(length=length, pages=count, page=page, head=head)
                value = every[page] if mixes else plain(heads, SimpleNamespace(**one), here)
                value = np.asarray(value, dtype=float)
                table[row, head, page] = (value.ravel() * mixture(value.shape)).sum()
    return table


def compare(got: Array, wanted: Array) -> None:
    known = ~np.isnan(wanted)
    assert np.isfinite(wanted[known]).any()
    np.testing.assert_allclose(got[known], wanted[known], rtol=2e-4, atol=2e-4)


def free_pages(here: Here) -> list[int]:
    every = -(-here.length // PAGE)
    return [p for p in range(here.pages) if p >= FIRST and p < every - LAST]


# Entry by entry, within a page.

ELEMENTWISE: dict[str, tuple[Formula, Formula]] = {
    "numbers on the left": (
        lambda q, f, p: 1 - (2 / ((3 * f.x) * f.x + (4 + 0.5))),
        lambda q, f, p: 1 - 2 / (3 * f.x**2 + 4.5),
    ),
    "numbers of numpy": (
        lambda q, f, p: np.float64(2) * f.x / np.float32(4) + np.int64(1) - np.float32(3),
        lambda q, f, p: f.x / 2 - 2,
    ),
    "neg and shapes": (lambda q, f, p: q - -f.m[:1], lambda q, f, p: q + f.m[0]),
    "abs": (lambda q, f, p: abs(f.x) + f.y.abs(), lambda q, f, p: np.abs(f.x) + np.abs(f.y)),
    "exp": (lambda q, f, p: f.x.exp(), lambda q, f, p: np.exp(f.x)),
    "log": (lambda q, f, p: (abs(f.x) + 1).log(), lambda q, f, p: np.log(np.abs(f.x) + 1)),
    "sqrt": (lambda q, f, p: abs(f.x).sqrt(), lambda q, f, p: np.sqrt(np.abs(f.x))),
    "relu": (lambda q, f, p: f.x.relu(), lambda q, f, p: np.where(f.x > 0, f.x, 0)),
    "sigmoid": (lambda q, f, p: f.x.sigmoid(), lambda q, f, p: 1 / (1 + np.exp(-f.x))),
    "silu": (lambda q, f, p: f.x.silu(), lambda q, f, p: f.x / (1 + np.exp(-f.x))),
    "maximum": (
        lambda q, f, p: t.maximum(f.x, q) + t.maximum(0, f.y),
        lambda q, f, p: np.where(f.x > q, f.x, q) + np.where(f.y > 0, f.y, 0),
    ),
    "minimum": (
        lambda q, f, p: t.minimum(f.x, 0.5) - t.minimum(f.y, f.s),
        lambda q, f, p: np.where(f.x < 0.5, f.x, 0.5) - np.where(f.y < f.s, f.y, f.s),
    ),
    "greater": (
        lambda q, f, p: t.where(f.x > f.y, f.x, q),
        lambda q, f, p: np.array(
            [[f.x[d] if f.x[d] > f.y[d] else h[d] for d in range(5)] for h in q]
        ),
    ),
    "less": (lambda q, f, p: t.where(f.x < 0, 1.0, f.y), lambda q, f, p: np.where(f.x < 0, 1, f.y)),
    "at least": (
        lambda q, f, p: t.where(p.page >= 2, f.x, -f.x),
        lambda q, f, p: f.x if p.page >= 2 else -f.x,
    ),
    "at most": (
        lambda q, f, p: t.where(p.page <= 2, f.x, 0),
        lambda q, f, p: f.x if p.page <= 2 else 0 * f.x,
    ),
    "the other way round": (
        lambda q, f, p: t.where(0 < f.x, f.y, 3.0),  # noqa: SIM300
        lambda q, f, p: np.where(f.x > 0, f.y, 3),
    ),
    "mask": (
        lambda q, f, p: (f.x + t.mask(f.x > f.x.min())).max() + f.y,
        lambda q, f, p: f.x.max() + f.y,
    ),
    "position": (
        lambda q, f, p: p.length / 7 + p.pages * p.page + f.x,
        lambda q, f, p: p.length / 7 + p.pages * p.page + f.x,
    ),
    "full": (lambda q, f, p: t.full(2.5, 2, SIZE) * f.x, lambda q, f, p: 2.5 * np.stack([f.x] * 2)),
    "constant": (
        lambda q, f, p: t.constant(np.arange(15).reshape(3, 5)) * f.x,
        lambda q, f, p: np.arange(15).reshape(3, 5) * f.x,
    ),
    "constant number": (lambda q, f, p: t.constant(3) * f.x, lambda q, f, p: 3 * f.x),
    "weights": (
        lambda q, f, p: t.weights(WEIGHT_SETS[SIZE,]) * f.x,
        lambda q, f, p: WEIGHT_SETS[SIZE,][LAYER, p.head] * f.x,
    ),
    "one weight": (
        lambda q, f, p: t.weights(WEIGHT_SETS[()]) * f.x,
        lambda q, f, p: WEIGHT_SETS[()][LAYER, p.head] * f.x,
    ),
    "bilinear": (
        lambda q, f, p: q @ t.weights(WEIGHT_SETS[SIZE, SIZE]) @ f.x,
        lambda q, f, p: q @ WEIGHT_SETS[SIZE, SIZE][LAYER, p.head] @ f.x,
    ),
}

# Over inner axes, products and shapes.

INNER: dict[str, tuple[Formula, Formula]] = {
    "norm": (
        lambda q, f, p: f.m.norm() + f.m.norm(0).sum() + q.norm(-1, keepdims=True) * f.x,
        lambda q, f, p: (
            np.sqrt((f.m**2).sum())
            + sum(np.sqrt((f.m[:, d] ** 2).sum()) for d in range(SIZE))
            + np.array([[np.sqrt((h**2).sum())] for h in q]) * f.x
        ),
    ),
    "logsumexp": (
        lambda q, f, p: t.logsumexp(f.m) + t.logsumexp(f.m, axis=1).sum() + t.logsumexp(f.m, 0),
        lambda q, f, p: (
            np.log(np.exp(f.m).sum())
            + np.log(np.exp(f.m).sum(1)).sum()
            + np.log(np.exp(f.m).sum(0))
        ),
    ),
    "logsumexp of large numbers": (
        lambda q, f, p: t.logsumexp(f.m * 200, axis=-1) / 200,
        lambda q, f, p: np.logaddexp.reduce(f.m * 200, axis=-1) / 200,
    ),
    "kron": (
        lambda q, f, p: t.kron(q[1], f.x),
        lambda q, f, p: np.array([a * b for a in q[1] for b in f.x]),
    ),
    "matrix @ matrix of no page": (
        lambda q, f, p: q @ q.T + f.s,
        lambda q, f, p: np.array([[sum(a * b) for b in q] for a in q]) + f.s,
    ),
    "constants @": (
        lambda q, f, p: t.constant(np.eye(SIZE)[:2]) @ f.x,
        lambda q, f, p: f.x[:2],
    ),
    "of no page @": (
        lambda q, f, p: t.constant(np.ones(GROUP)) @ q * p.page,
        lambda q, f, p: q.sum(0) * p.page,
    ),
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *INNER])
def test_within_a_page(name: str) -> None:
    check(*(ELEMENTWISE | INNER)[name])


def test_reductions_of_a_number_are_the_number() -> None:
    """Of other shapes, and products, entries and ranges: see test_flow_properties."""
    for op in ("sum", "max", "min", "mean", "norm"):
        sign = np.abs if op == "norm" else np.array
        check(lambda q, f, p, op=op: getattr(f.s, op)(), lambda q, f, p, sign=sign: sign(f.s))


# Over pages.


def _over(here: Here, among: str, x: Array, reduce: Formula) -> Array:
    """A value for every page; NaN, which is not compared, where no page takes part."""
    chosen = list(range(here.pages)) if among == "finished" else free_pages(here)
    nothing = 0.0 if reduce is REDUCTIONS["sum"] else np.nan
    return reduce(x[chosen]) if chosen else np.full(x.shape[1:], nothing)


REDUCTIONS: dict[str, Formula] = {
    "sum": lambda x: x.sum(0),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "mean": lambda x: x.mean(0),
    "norm": lambda x: np.sqrt((x**2).sum(0)),
}


@pytest.mark.parametrize("among", ["finished", "free"])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_over_pages(op: str, among: t.Among) -> None:
    """The whole is the same for every page; beside it each page has its own.

    Of 1 to 3 finished pages none is free: sums of those are 0.
    """
    whole = getattr(t, f"{op}_over_pages")

    def plain(q: Array, f: Any, here: Here) -> Array:
        total = _over(here, among, f.m, REDUCTIONS[op])
        return np.stack([total * f.x[page] for page in range(here.pages)])

    check(lambda q, f, p: whole(f.m, among=among) * f.x, plain, mixes=True)


@pytest.mark.parametrize("among", ["finished", "free"])
def test_shares_over_pages(among: t.Among) -> None:
    def softmax(q: Array, f: Any, here: Here) -> Array:
        logits = np.stack([q @ x for x in f.x])
        top = _over(here, among, logits, lambda x: x.max(0))
        grown = np.exp(logits - top)
        return grown / _over(here, among, grown, lambda x: x.sum(0))

    def normal(q: Array, f: Any, here: Here) -> Array:
        return f.x / _over(here, among, f.x, REDUCTIONS["norm"])

    def large(q: Array, f: Any, here: Here) -> Array:
        grown = np.exp(900 * (f.s - f.s.max()))
        return grown / grown.sum()

    check(lambda q, f, p: t.softmax_over_pages(f.s * 900), large, mixes=True)
    check(lambda q, f, p: t.softmax_over_pages(q @ f.x, among=among), softmax, mixes=True)
    check(lambda q, f, p: t.normalise_over_pages(f.x, among=among), normal, mixes=True)


@pytest.mark.parametrize("taps", [[2.0], [0.5, 0, 0, 1, 4], list(range(1, 18))])
def test_convolution_over_pages(taps: list[float]) -> None:
    def plain(q: Array, f: Any, here: Here) -> Array:
        out = np.zeros_like(f.x)
        for page in range(here.pages):
            for j, tap in enumerate(taps):
                other = page + j - len(taps) // 2
                if 0 <= other < here.pages:
                    out[page] += tap * f.x[other]
        return out

    check(lambda q, f, p: t.convolve_over_pages(f.x, taps), plain, mixes=True)


def test_what_depends_on_the_page_number_alone() -> None:
    """No field at all: the number of pages comes with the call."""
    formula = lambda q, f, p: p.page / t.maximum(t.sum_over_pages(p.page), 1e-9)  # noqa: E731
    program = trace(flow_of(formula, {}, ()), *PROBE)
    got = run(program, *draw(program, own=True, seed=0))
    for row, length in enumerate(LENGTHS):
        for page in range(length // PAGE):
            total = sum(range(length // PAGE)) or 1
            np.testing.assert_allclose(got[row, :, page], 0.5 * page / total, rtol=1e-5)
        assert (got[row, :, length // PAGE :] == -np.inf).all()


# State.


def test_state_moves_on_where_a_page_exists_and_stays_elsewhere() -> None:
    def score(query: t.Tensor, fields: Any, position: Any) -> Any:
        fresh = 0.5 * fields.old + fields.x.sum()
        return fresh + fields.steps, {"old": fresh, "steps": fields.steps + 1}

    flow = Flow(
        name="remembers",
        fields={"x": fp32(SIZE)},
        state={"old": 0.0, "steps": 2.0},
        summarise=lambda keys, values: {"x": keys[0]},
        score=score,
        probe=PROBE,
    )
    program = trace(flow, *PROBE)
    assert program.state == (("old", 0.0), ("steps", 2.0))
    q, blocks = draw(program, own=True, seed=1)
    random = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), HEADS, PAGES)
    state = {name: torch.randn(shape, generator=random) for name in ("old", "steps")}
    tensors = {name: torch.from_numpy(block) for name, block in blocks.items()}
    scene = Scene(lengths=torch.tensor(LENGTHS))
    before = {name: value.clone() for name, value in state.items()}
    score_nGM, fresh = interpret.score(
        program, torch.from_numpy(q), tensors, scene, state, pages=PAGES
    )
    for row, length in enumerate(LENGTHS):
        for head in range(HEADS):
            for page in range(PAGES):
                old, steps = (float(before[name][row, head, page]) for name in ("old", "steps"))
                wanted = (old, steps)
                if page < length // PAGE:
                    wanted = (0.5 * old + blocks["x"][row, page, head].sum(), steps + 1)
                    got = float(score_nGM[row, head, page])
                    assert got == pytest.approx(wanted[0] + steps, abs=1e-5)
                found = tuple(float(fresh[name][row, head, page]) for name in ("old", "steps"))
                assert found == pytest.approx(wanted, abs=1e-5)
    assert all(torch.equal(before[name], state[name]) for name in state)  # inputs are left alone


# Summaries.

SUMMARIES: dict[str, tuple[Formula, Formula]] = {
    "extremes of channels": (lambda k, v: k.max(1) - v.min(1), lambda k, v, w: k.max(1) - v.min(1)),
    "product": (lambda k, v: k.T @ v, lambda k, v, w: np.einsum("pd,pe->de", k, v)),
    "constants": (
        lambda k, v: t.constant(np.arange(12).reshape(2, 6)) @ k,
        lambda k, v, w: np.arange(12).reshape(2, 6) @ k,
    ),
    "weights": (lambda k, v: t.weights(WEIGHT_SETS[SIZE,]) * k, lambda k, v, w: w[SIZE,] * k),
    "nothing of the page": (lambda k, v: t.full(3.0, 2, 2), lambda k, v, w: np.full((2, 2), 3.0)),
    "elementwise": (
        lambda k, v: t.where(k > 0, k.sqrt(), v.abs())[1:4],
        lambda k, v, w: np.where(k > 0, np.sqrt(np.abs(k)), np.abs(v))[1:4],
    ),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries(name: str) -> None:
    formula, plain = SUMMARIES[name]
    page, pages = 6, 4
    random = np.random.default_rng(2)
    k, v = random.normal(size=(2, pages, HEADS, page, SIZE)).astype(np.float32)
    layer_weights = {shape: array[LAYER] for shape, array in WEIGHT_SETS.items()}

    def of(at: int, head: int) -> Array:
        mine = {shape: array[head] for shape, array in layer_weights.items()}
        return np.asarray(plain(k[at, head].astype(float), v[at, head].astype(float), mine))

    with np.errstate(invalid="ignore"):
        shape = of(0, 0).shape
        wanted = np.array([[of(at, head) for head in range(HEADS)] for at in range(pages)])
    flow = Flow(
        name="x",
        fields={"field": fp32(*shape)},
        summarise=lambda keys, values: {"field": formula(keys, values)},
        score=lambda query, fields, position: fields.field.sum(),
        probe=(page, SIZE, GROUP),
    )
    program = trace(flow, page, SIZE, None)
    blocks = interpret.summarise(program, torch.from_numpy(k), torch.from_numpy(v), layer=LAYER)
    assert list(blocks) == ["field"]
    assert blocks["field"].dtype == torch.float32
    np.testing.assert_allclose(blocks["field"], wanted, rtol=1e-5, atol=1e-6)


def test_no_queries_and_no_finished_pages() -> None:
    formula = lambda q, f, p: t.softmax_over_pages(q @ f.x)  # noqa: E731
    program = trace(flow_of(formula, {"x": (SIZE,)}, (GROUP,)), *PROBE)
    blocks = {"x": torch.full((2, HEADS, SIZE), torch.nan)}
    for lengths in ([], [0, 2]):
        q = torch.zeros(len(lengths), HEADS * GROUP, SIZE)
        scene = Scene(lengths=torch.tensor(lengths, dtype=torch.int64))
        score_nGM, _ = interpret.score(program, q, blocks, scene, pages=2)
        assert score_nGM.shape == (len(lengths), HEADS, 2)
        assert (score_nGM == -math.inf).all()
