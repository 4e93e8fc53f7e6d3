"""Every operation of the language against numpy, written out per query, KV head and page.

Queries of several lengths are scored at once, and blocks of pages that a query does not have hold
NaN: whatever leaks from there shows.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from sparrow.sparse.flows import interpret
from sparrow.sparse.flows import tensor as t
from sparrow.sparse.flows.flow import Flow, Program, trace
from sparrow.sparse.flows.formats import fp32
from sparrow.sparse.flows.interpret import ScoreContext

PAGE, SIZE, GROUP, HEADS, PAGES = 3, 6, 3, 2, 6
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
    """Where a plain formula stands: one query, one KV head, and maybe one page."""

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
    scene = ScoreContext(lengths=torch.tensor(LENGTHS), layer=LAYER, first=FIRST, last=LAST)
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
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    seed: int = 0,
) -> None:
    """`plain` is given the fields of all finished pages [m, ...] and gives a value for each."""
    fields = {name: np.ones((3, *shape)) for name, shape in shapes.items()}
    here = Here(length=3 * PAGE, pages=3, page=1, head=0)
    value = np.asarray(plain(np.ones((GROUP, SIZE)), SimpleNamespace(**fields), here))
    for own in (True, False):
        program = trace(flow_of(formula, shapes, value.shape[1:]), *PROBE)
        q, blocks = draw(program, own=own, seed=seed)
        compare(run(program, q, blocks), _table(plain, q, blocks, own))


def _table(plain: Formula, q: Array, blocks: dict[str, Array], own: bool) -> Array:
    table = np.full((len(LENGTHS), HEADS, PAGES), -np.inf)
    for row, head in np.ndindex(len(LENGTHS), HEADS):
        here = Here(length=LENGTHS[row], pages=LENGTHS[row] // PAGE, page=-1, head=head)
        heads = q[row, head * GROUP : (head + 1) * GROUP].astype(float)
        mine = {name: block[row] if own else block for name, block in blocks.items()}
        mine = {name: block[: here.pages, head].astype(float) for name, block in mine.items()}
        if here.pages:
            value = np.asarray(plain(heads, SimpleNamespace(**mine), here), dtype=float)
            mixed = value.reshape(here.pages, -1) * mixture(value.shape[1:])
            table[row, head, : here.pages] = mixed.sum(1)
    return table


def each_page(plain: Formula) -> Formula:
    """The values of all pages by a formula of one."""

    def every(q: Array, fields: Any, here: Here) -> Array:
        def of(page: int) -> Any:
            own = SimpleNamespace(**{name: x[page] for name, x in vars(fields).items()})
            return plain(q, own, replace(here, page=page))

        return np.array([of(page) for page in range(here.pages)])

    return every


def compare(got: Array, wanted: Array) -> None:
    known = ~np.isnan(wanted)
    assert np.isfinite(wanted[known]).any()
    np.testing.assert_allclose(got[known], wanted[known], rtol=2e-4, atol=2e-4)


def free_pages(here: Here) -> list[int]:
    every = -(-here.length // PAGE)
    return [p for p in range(here.pages) if p >= FIRST and p < every - LAST]


# Within a page: one formula, of the operations of the language and of those of numpy.


def plain_operations(head: int) -> SimpleNamespace:
    """What numpy calls the operations; learned weights are those of a layer and a KV head."""
    return SimpleNamespace(
        **{name: getattr(np, name) for name in ("exp", "log", "sqrt", "kron", "where", "take")},
        **{name: getattr(np, name) for name in ("maximum", "minimum", "abs")},
        relu=lambda x: np.where(x > 0, x, 0),
        sigmoid=lambda x: 1 / (1 + np.exp(-x)),
        silu=lambda x: x / (1 + np.exp(-x)),
        norm=lambda x, axis=None, **keep: np.sqrt((x**2).sum(axis, **keep)),
        logsumexp=lambda x, axis=None: np.logaddexp.reduce(x, axis=axis),
        mask=lambda condition: np.where(condition, 0, -np.inf),
        full=lambda value, *shape: np.full(shape, value),
        constant=np.asarray,
        weights=lambda shape: WEIGHT_SETS[shape][LAYER, head],
    )


OF_A_TENSOR = ("exp", "log", "sqrt", "relu", "sigmoid", "silu", "abs", "norm")
FUNCTIONS = ("kron", "where", "take", "maximum", "minimum", "logsumexp", "mask", "full", "constant")
LANGUAGE = SimpleNamespace(
    **{name: getattr(t.Tensor, name) for name in OF_A_TENSOR},
    **{name: getattr(t, name) for name in FUNCTIONS},
    weights=lambda shape: t.weights(WEIGHT_SETS[shape]),
)
FORMULAS: list[Formula] = [
    lambda n, q, f, p: 1 - (2 / ((3 * f.x) * f.x + (4 + 0.5))),
    lambda n, q, f, p: np.float64(2) * f.x / np.float32(4) + np.int64(1) - np.float32(3),
    lambda n, q, f, p: q - -f.m[:1],
    lambda n, q, f, p: abs(f.x) + n.abs(f.y),
    lambda n, q, f, p: n.exp(f.x),
    lambda n, q, f, p: n.log(abs(f.x) + 1),
    lambda n, q, f, p: n.sqrt(abs(f.x)),
    lambda n, q, f, p: n.relu(f.x),
    lambda n, q, f, p: n.sigmoid(f.x),
    lambda n, q, f, p: n.silu(f.x),
    lambda n, q, f, p: n.maximum(f.x, q) + n.maximum(0, f.y),
    lambda n, q, f, p: n.minimum(f.x, 0.5) - n.minimum(f.y, f.s),
    lambda n, q, f, p: n.where(f.x > f.y, f.x, q),
    lambda n, q, f, p: n.where(f.x < 0, 1.0, f.y),
    lambda n, q, f, p: n.where(0 < f.x, f.y, 3.0),  # noqa: SIM300
    lambda n, q, f, p: n.where(p.page >= 2, f.x, -f.x),
    lambda n, q, f, p: n.where(p.page <= 2, f.x, 0),
    lambda n, q, f, p: (f.x + n.mask(f.x > f.x.min())).max() + f.y,
    lambda n, q, f, p: p.length / 7 + p.pages * p.page + f.x,
    lambda n, q, f, p: n.full(2.5, 2, SIZE) * f.x,
    lambda n, q, f, p: n.constant(np.arange(3 * SIZE).reshape(3, SIZE)) * f.x,
    lambda n, q, f, p: n.constant(3) * f.x,
    lambda n, q, f, p: n.weights((SIZE,)) * f.x,
    lambda n, q, f, p: n.weights(()) * f.x,
    lambda n, q, f, p: q @ n.weights((SIZE, SIZE)) @ f.x,
    # Over inner axes, products and shapes.
    lambda n, q, f, p: n.norm(f.m) + n.norm(f.m, 0).sum() + n.norm(q, -1, keepdims=True) * f.x,
    lambda n, q, f, p: n.logsumexp(f.m, 0) + n.logsumexp(f.m, axis=1).sum() + n.logsumexp(f.m),
    lambda n, q, f, p: n.logsumexp(f.m * 200, axis=-1) / 200,
    lambda n, q, f, p: n.kron(q[1], f.x),
    lambda n, q, f, p: q @ q.T + f.s,
    lambda n, q, f, p: n.constant(np.eye(SIZE)[:2]) @ f.x,
    lambda n, q, f, p: n.constant(np.ones(GROUP)) @ q * p.page,
    lambda n, q, f, p: f.s.sum() + f.s.max() + f.s.min() + f.s.mean() + n.norm(f.s),
]


def same_in_numpy(formula: Formula, **options: Any) -> None:
    """A formula of n (operations), q (query heads), f (fields) and p (position)."""
    plain = each_page(lambda q, f, p: formula(plain_operations(p.head), q, f, p))
    check(lambda q, f, p: formula(LANGUAGE, q, f, p), plain, **options)


@pytest.mark.parametrize("number", range(len(FORMULAS)))
def test_within_a_page(number: int) -> None:
    same_in_numpy(FORMULAS[number])


# Of any shapes: broadcasting, reductions, products and indices are numpy's.

SIZES = st.integers(1, 4)
SOME_SHAPE = st.lists(SIZES, min_size=1, max_size=3).map(tuple)
SEEDS = st.integers(0, 99)
BINARY = [operator.add, operator.sub, operator.mul, lambda a, b: a / (b * b + 1)]


@st.composite
def fitting(draw: st.DrawFn) -> dict[str, tuple[int, ...]]:
    """Two shapes that fit each other: cut at the front, with some sizes 1."""
    whole = draw(st.lists(SIZES, max_size=3))

    def part() -> tuple[int, ...]:
        kept = whole[draw(st.integers(0, len(whole))) :]
        return tuple(1 if draw(st.booleans()) else size for size in kept)

    return {"a": part(), "b": part()}


@given(fitting(), st.sampled_from(BINARY), SEEDS)
def test_broadcasting(shapes: Any, op: Formula, seed: int) -> None:
    same_in_numpy(lambda n, q, f, p: op(f.a, f.b), shapes=shapes, seed=seed)


@given(SOME_SHAPE, st.sampled_from(["sum", "max", "min", "mean"]), st.data(), SEEDS)
def test_reductions(shape: tuple[int, ...], op: str, data: st.DataObject, seed: int) -> None:
    axis = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    keep = data.draw(st.booleans())

    def reduced(n: Any, q: Any, f: Any, p: Any) -> Any:
        return getattr(f.a, op)(axis, keepdims=keep)

    same_in_numpy(reduced, shapes={"a": shape}, seed=seed)


@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans(), SEEDS)
def test_products(rows: int, inner: int, columns: int, left: bool, right: bool, seed: int) -> None:
    a = (rows, inner) if left else (inner,)
    b = (inner, columns) if right else (inner,)
    same_in_numpy(lambda n, q, f, p: f.a @ f.b, shapes={"a": a, "b": b}, seed=seed)


@given(SOME_SHAPE, st.data(), SEEDS)
def test_entries_ranges_and_reshapes(
    shape: tuple[int, ...], data: st.DataObject, seed: int
) -> None:
    size, count = shape[0], math.prod(shape)
    cut = data.draw(st.slices(size).filter(lambda each: len(range(size)[each])))
    at = data.draw(st.integers(-size, size - 1))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    chosen = data.draw(st.lists(st.integers(0, shape[axis] - 1), min_size=1, max_size=5))
    first = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    for formula in (
        lambda n, q, f, p: f.a[cut],
        lambda n, q, f, p: f.a[at],
        lambda n, q, f, p: n.take(f.a, chosen, axis),
        lambda n, q, f, p: f.a.reshape(first, count // first),
    ):
        same_in_numpy(formula, shapes={"a": shape}, seed=seed)


# Over pages.


def _over(here: Here, among: str, x: Array, reduce: Formula) -> Array:
    """A value for every page; NaN, which is not compared, where no page takes part."""
    chosen = list(range(here.pages)) if among == "finished" else free_pages(here)
    nothing = 0.0 if reduce is REDUCTIONS["sum"] else np.nan
    return reduce(x[chosen]) if chosen else np.full(x.shape[1:], nothing)


REDUCTIONS: dict[str, Formula] = {
    **{name: partial(getattr(np, name), axis=0) for name in ("sum", "max", "min", "mean")},
    "norm": partial(np.linalg.norm, axis=0),
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

    check(lambda q, f, p: whole(f.m, among=among) * f.x, plain)


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

    check(lambda q, f, p: t.softmax_over_pages(f.s * 900), large)
    check(lambda q, f, p: t.softmax_over_pages(q @ f.x, among=among), softmax)
    check(lambda q, f, p: t.normalise_over_pages(f.x, among=among), normal)


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

    check(lambda q, f, p: t.convolve_over_pages(f.x, taps), plain)


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


# Choices within a formula.


def chosen_of(here: Here, budget: int, share: float, x: Array) -> set[int]:
    """The best free pages by x, NaN last: as many as `share` of those that the budget keeps."""
    every = -(-here.length // PAGE)
    reserved = min(every, FIRST + LAST)
    tail = here.length - (every - 1) * PAGE
    kept = min(every, max(reserved, (budget - tail) // PAGE + 1))
    order = sorted(free_pages(here), key=lambda page: (np.isnan(x[page]), -x[page], page))
    return set(order[: math.ceil((kept - reserved) * share)])


@pytest.mark.parametrize("share", [0.25, 0.5, 1, 1.5, 16])
@pytest.mark.parametrize("by_head", [False, True])
def test_the_best_pages_are_a_share_of_those_that_are_kept(share: float, by_head: bool) -> None:
    """Of a union the sure ones are the best by one score; of two stages all others are out."""
    programs = {
        name: trace(flow_of(formula, {"x": (SIZE,), "s": ()}, ()), *PROBE)
        for name, formula in {
            "union": lambda q, f, p: t.union(f.s, f.x[0], share),
            "stages": lambda q, f, p: t.two_stage(f.s, f.x[0], share),
        }.items()
    }
    budgets = torch.arange(9, 9 + 3 * len(LENGTHS), 3) % 16
    if by_head:
        budgets = torch.stack([budgets, budgets.flip(0)], dim=1)
    for name, program in programs.items():
        q, blocks = draw(program, own=True, seed=2)
        blocks["s"] = blocks["s"].round()  # ties
        blocks["s"][3, 2] = np.nan
        scene = ScoreContext(
            lengths=torch.tensor(LENGTHS), budgets=budgets, layer=LAYER, first=FIRST, last=LAST
        )
        tensors = {key: torch.from_numpy(block) for key, block in blocks.items()}
        got, _ = interpret.score(program, torch.from_numpy(q), tensors, scene, pages=PAGES)
        for row, head in np.ndindex(len(LENGTHS), HEADS):
            here = Here(length=LENGTHS[row], pages=LENGTHS[row] // PAGE, page=-1, head=head)
            budget = int(budgets[row, head] if by_head else budgets[row])
            chosen = chosen_of(here, budget, share, blocks["s"][row, :, head])
            for page in range(here.pages):
                own = float(blocks["x"][row, page, head, 0])
                sure, other = (1e30, own) if name == "union" else (own, -1e30)
                wanted = 0.5 * (sure if page in chosen else other)
                assert got[row, head, page] == pytest.approx(wanted, rel=1e-5), (row, head, page)


# State.


def test_state_moves_on_where_a_page_exists_and_stays_elsewhere() -> None:
    def score(query: t.Tensor, fields: Any, position: Any) -> Any:
        fresh = 0.5 * fields.old + fields.x.sum()
        return fresh + fields.steps, {"old": fresh, "steps": fields.steps + 1}

    kept = {"fields": {"x": fp32(SIZE)}, "state": {"old": 0.0, "steps": 2.0}}
    summarise = lambda keys, values: {"x": keys[0]}  # noqa: E731
    flow = Flow(name="remembers", **kept, summarise=summarise, score=score, probe=PROBE)
    program = trace(flow, *PROBE)
    assert program.state == (("old", 0.0), ("steps", 2.0))
    q, blocks = draw(program, own=True, seed=1)
    tensors = {name: torch.from_numpy(block) for name, block in blocks.items()}
    shape = (len(LENGTHS), HEADS, PAGES)
    random = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=random) for name in ("old", "steps")}
    lengths = torch.tensor(LENGTHS)
    exists = (torch.arange(PAGES) < lengths[:, None] // PAGE)[:, None].expand(shape)
    sums = tensors["x"].sum(3).transpose(1, 2)
    wanted = {"old": 0.5 * state["old"] + sums, "steps": state["steps"] + 1}
    before = {name: value.clone() for name, value in state.items()}
    scene = ScoreContext(lengths=lengths)
    found, fresh = interpret.score(program, torch.from_numpy(q), tensors, scene, state, pages=PAGES)
    torch.testing.assert_close(found[exists], (wanted["old"] + state["steps"])[exists])
    for name, value in fresh.items():
        torch.testing.assert_close(value, torch.where(exists, wanted[name], before[name]))
        assert torch.equal(before[name], state[name])  # inputs are left alone


# Summaries.

SUMMARIES: list[Formula] = [
    lambda n, k, v: k.max(1) - v.min(1),
    lambda n, k, v: k.T @ v,
    lambda n, k, v: n.constant(np.arange(14).reshape(2, 7)) @ k,
    lambda n, k, v: n.weights((SIZE,)) * k,
    lambda n, k, v: n.full(3.0, 2, 2),
    lambda n, k, v: n.where(k > 0, n.sqrt(k), n.abs(v))[1:4],
]


@pytest.mark.parametrize("number", range(len(SUMMARIES)))
@pytest.mark.filterwarnings("ignore:invalid value")  # a root that is not taken
def test_summaries(number: int) -> None:
    formula, page, pages = SUMMARIES[number], 7, 4
    random = np.random.default_rng(2)
    k, v = random.normal(size=(2, pages, HEADS, page, SIZE)).astype(np.float32)
    places = [(at, head) for at in range(pages) for head in range(HEADS)]
    wanted = np.array([formula(plain_operations(at[1]), k[at], v[at]) for at in places])
    wanted = wanted.reshape(pages, HEADS, *wanted.shape[1:])
    flow = Flow(
        name="x",
        fields={"field": fp32(*wanted.shape[2:])},
        summarise=lambda keys, values: {"field": formula(LANGUAGE, keys, values)},
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
        scene = ScoreContext(lengths=torch.tensor(lengths, dtype=torch.int64))
        score_nGM, _ = interpret.score(program, q, blocks, scene, pages=2)
        assert score_nGM.shape == (len(lengths), HEADS, 2)
        assert (score_nGM == -math.inf).all()
