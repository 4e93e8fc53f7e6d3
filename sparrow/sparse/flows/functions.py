"""The functions of the language of flows: of tensors, of constants, and over pages."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sparrow.sparse.flows.tensor import (
    Number,
    Tensor,
    as_tensor,
    as_tensors,
    broadcasting,
    check_sizes,
    elementwise,
    fail,
    make,
    taken,
)

Among = Literal["finished", "free"]
HIDDEN = -1e30  # what a mask adds to what it hides


def maximum(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """The greater of two, entry by entry."""
    return elementwise("maximum", a, b)


def minimum(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """The smaller of two, entry by entry."""
    return elementwise("minimum", a, b)


def where(condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a where the condition holds, else b."""
    if not isinstance(condition, Tensor) or not condition.node.boolean:
        raise fail("where takes a condition first, such as `x > 0`")
    return broadcasting("where", (condition, as_tensor(a), as_tensor(b)), boolean=False)


def mask(condition: Tensor) -> Tensor:
    """0 where the condition holds, -1e30 elsewhere: add it to hide entries."""
    return where(condition, 0.0, HIDDEN)


def logsumexp(x: Tensor, axis: int | None = None) -> Tensor:
    """The logarithm of the sum of exponentials over an inner axis, or over all."""
    top = x.max(axis, keepdims=True)
    total = (x - top).exp().sum(axis, keepdims=True).log() + top
    kept = [size for at, size in enumerate(x.shape) if axis is not None and at != axis % x.ndim]
    return total.reshape(*kept)


def kron(a: Tensor, b: Tensor) -> Tensor:
    """The Kronecker product of two vectors: every product of their entries."""
    if a.ndim != 1 or b.ndim != 1:
        raise fail(f"kron takes two vectors, got shapes {a.shape} and {b.shape}")
    product = a.reshape(len(a), 1) * b.reshape(1, len(b))
    return product.reshape(len(a) * len(b))


def take(x: Tensor, indices: Sequence[int], axis: int = 0) -> Tensor:
    """These entries of an inner axis, in this order."""
    return taken(x, indices, axis)


def full(value: Number, *shape: int) -> Tensor:
    """A tensor of one number."""
    check_sizes("full", shape)
    return make("full", (), shape, (float(value),))


def constant(array: npt.ArrayLike) -> Tensor:
    """Numbers that are known beforehand, the same in every layer and head."""
    data = _array(array)
    return make("constant", (), data.shape, (data.tobytes(), "shared"))


def weights(array: npt.ArrayLike) -> Tensor:
    """Learned numbers [layers, KV heads, ...]: every layer and KV head sees its own."""
    data = _array(array)
    if data.ndim < 2:
        raise fail(f"weights are [layers, KV heads, ...], got shape {data.shape}")
    lead = data.shape[:2]
    return make("constant", (), data.shape[2:], (data.tobytes(), "by head", lead))


# Functions over pages. The others never mix pages.


def sum_over_pages(x: Tensor, *, among: Among = "finished") -> Tensor:
    """The sum over pages: all finished ones, or only those "free" to be chosen or dropped."""
    return _over_pages("sum", x, among)


def max_over_pages(x: Tensor, *, among: Among = "finished") -> Tensor:
    """The greatest over pages; see `sum_over_pages`."""
    return _over_pages("max", x, among)


def min_over_pages(x: Tensor, *, among: Among = "finished") -> Tensor:
    """The smallest over pages; see `sum_over_pages`."""
    return _over_pages("min", x, among)


def mean_over_pages(x: Tensor, *, among: Among = "finished") -> Tensor:
    """The mean over pages; see `sum_over_pages`."""
    one = make("full", (), (), (1.0,), paged=True)
    return sum_over_pages(x, among=among) / maximum(sum_over_pages(one, among=among), 1.0)


def norm_over_pages(x: Tensor, *, among: Among = "finished") -> Tensor:
    """The L2 norm over pages; see `sum_over_pages`."""
    return sum_over_pages(x * x, among=among).sqrt()


def normalise_over_pages(x: Tensor, *, among: Among = "finished") -> Tensor:
    """x divided by its norm over pages."""
    return x / maximum(norm_over_pages(x, among=among), 1e-30)


def softmax_over_pages(x: Tensor, *, among: Among = "finished") -> Tensor:
    """Shares of the exponentials over pages. Pages that do not take part may exceed 1."""
    grown = (x - max_over_pages(x, among=among)).exp()
    return grown / sum_over_pages(grown, among=among)


def convolve_over_pages(x: Tensor, kernel: Sequence[Number]) -> Tensor:
    """Each page's value mixed with its neighbours': kernel[j] weighs page m + j - len // 2.

    Pages before the first and after the last finished one count as 0.
    """
    taps = tuple(float(tap) for tap in kernel)
    if len(taps) % 2 == 0:
        raise fail(f"convolve_over_pages wants an odd number of weights, got {len(taps)}")
    _require_paged("convolve_over_pages", x)
    return make("convolve", (x,), x.shape, (taps,), paged=True)


def _over_pages(op: str, x: Tensor, among: Among) -> Tensor:
    if among not in ("finished", "free"):
        raise fail(f'among={among!r}, allowed: "finished", "free"')
    _require_paged(f"{op}_over_pages", x)
    return make(f"pages_{op}", (x,), x.shape, (among,), paged=False)


def _require_paged(name: str, x: Tensor) -> None:
    (x,) = as_tensors(name, (x,))
    if not x.paged:
        raise fail(
            f"{name}: this is no value of every page, there is nothing to go over. Fields, state "
            "and position.page are, in score; query, keys and values are not"
        )


def _array(array: npt.ArrayLike) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        data = np.ascontiguousarray(array, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise fail(f"constants are arrays of numbers: {error}") from error
    if not data.size or not np.isfinite(data).all():
        raise fail(f"constants are finite numbers, at least one; got shape {data.shape}")
    return data
