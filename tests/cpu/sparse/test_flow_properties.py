"""Shapes of any kind: broadcasting, reductions, products and indices are numpy's."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.sparse.flows import interpret
from sparrow.sparse.flows import tensor as t
from sparrow.sparse.flows.flow import Flow, trace
from sparrow.sparse.flows.formats import fp32
from sparrow.sparse.flows.interpret import Scene

PAGE, SIZE, GROUP, HEADS, PAGES = 4, 4, 1, 2, 3  # pages with room for every two shapes
SIZES = st.integers(1, 4)
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
BINARY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / (b * b + 1),
}


def agrees(formula: Any, plain: Any, *shapes: tuple[int, ...], seed: int) -> None:
    """For every page and head, all entries of what a formula of these fields gives."""
    random = np.random.default_rng(seed)
    names = [f"f{number}" for number in range(len(shapes))]
    blocks = {
        name: random.normal(size=(PAGES, HEADS, *shape)).astype(np.float32)
        for name, shape in zip(names, shapes, strict=True)
    }
    wanted = [
        [
            plain(*(block[page, head].astype(float) for block in blocks.values()))
            for page in range(3)
        ]
        for head in range(HEADS)
    ]
    mixture = random.normal(size=np.size(wanted[0][0]))

    def score(query: Any, fields: Any, position: Any) -> Any:
        value = formula(*(fields[name] for name in names))
        assert value.shape == np.shape(wanted[0][0])
        return (value.reshape(len(mixture)) * t.constant(mixture)).sum()

    flow = Flow(
        name="x",
        fields={name: fp32(*shape) for name, shape in zip(names, shapes, strict=True)},
        summarise=lambda k, v: {n: t.full(0, *s) for n, s in zip(names, shapes, strict=True)},
        score=score,
        probe=(PAGE, SIZE, GROUP),
    )
    tensors = {name: torch.from_numpy(block) for name, block in blocks.items()}
    scene = Scene(lengths=torch.tensor([PAGES * PAGE]))
    q = torch.zeros(1, HEADS * GROUP, SIZE)
    got, _ = interpret.score(trace(flow, PAGE, SIZE, GROUP), q, tensors, scene, pages=PAGES)
    flat = [[np.ravel(value) @ mixture for value in row] for row in wanted]
    np.testing.assert_allclose(got[0], flat, rtol=1e-4, atol=1e-4)


@st.composite
def fitting(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that fit each other: cut at the front, with some sizes 1."""
    whole = draw(st.lists(SIZES, max_size=3))

    def part() -> tuple[int, ...]:
        kept = whole[draw(st.integers(0, len(whole))) :]
        return tuple(1 if draw(st.booleans()) else size for size in kept)

    return part(), part()


@settings(max_examples=40)
@given(fitting(), st.sampled_from(sorted(BINARY)), st.integers(0, 99))
def test_broadcasting(shapes: Any, sign: str, seed: int) -> None:
    agrees(BINARY[sign], BINARY[sign], *shapes, seed=seed)


@settings(max_examples=40)
@given(SHAPES.filter(len), st.sampled_from(["sum", "max", "min", "mean"]), st.data())
def test_reductions(shape: tuple[int, ...], op: str, data: st.DataObject) -> None:
    axis = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    keep = data.draw(st.booleans())

    def reduced(x: Any) -> Any:
        return getattr(x, op)(axis, keepdims=keep)

    agrees(
        reduced,
        lambda x: (
            reduced(x)
            if axis is None
            else np.asarray(
                getattr(np, {"max": "amax", "min": "amin"}.get(op, op))(x, axis=axis, keepdims=keep)
            )
        ),
        shape,
        seed=data.draw(st.integers(0, 99)),
    )


@settings(max_examples=40)
@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.integers(0, 99))
def test_products(rows: int, inner: int, columns: int, left: bool, right: bool, seed: int) -> None:
    a = (rows, inner) if left else (inner,)
    b = (inner, columns) if right else (inner,)
    agrees(lambda x, y: x @ y, lambda x, y: x @ y, a, b, seed=seed)


@settings(max_examples=40)
@given(SHAPES.filter(len), st.data())
def test_entries_and_ranges(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = shape[0]
    cut = data.draw(st.slices(size).filter(lambda each: len(range(size)[each])))
    at = data.draw(st.integers(-size, size - 1))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    chosen = data.draw(st.lists(st.integers(0, shape[axis] - 1), min_size=1, max_size=5))
    seed = data.draw(st.integers(0, 99))
    agrees(lambda x: x[cut], lambda x: x[cut], shape, seed=seed)
    agrees(lambda x: x[at], lambda x: x[at], shape, seed=seed)
    agrees(lambda x: t.take(x, chosen, axis), lambda x: np.take(x, chosen, axis), shape, seed=seed)


@settings(max_examples=40)
@given(SHAPES, st.data())
def test_reshape(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = int(np.prod(shape, dtype=int))
    first = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    agrees(
        lambda x: x.reshape(first, count // first),
        lambda x: np.reshape(x, (first, count // first)),
        shape,
        seed=data.draw(st.integers(0, 99)),
    )
