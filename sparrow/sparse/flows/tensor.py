"""The language of flows: traced tensors that record operations.

Arithmetic, comparisons, `@`, reductions and the functions below build a program instead of
numbers: nodes with their shapes, and the author's line of each. Every mistake is an error at the
line that made it. Numbers are float32 throughout.

A value belongs to one sequence and one KV head. It has an inner shape of whole numbers, and it is
either one value for the whole sequence or, `paged`, one for every finished page: the page axis is
not part of the shape, so a formula reads as it stands for one page.
"""

import linecache
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from types import FrameType
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

Number = int | float
Among = Literal["finished", "free"]
HIDDEN = -1e30  # what a mask adds to what it hides
MOST_SHARE, SHARE_PARTS = 16, 1024  # of kept pages, in whole parts: kernels count in int32
_ROOM = __name__.rpartition(".")[0]
_MACHINERY = {f"{_ROOM}.{name}" for name in ("tensor", "flow", "formats")}
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
SIGNS |= {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_NUMPY = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div"}


class FlowError(ValueError):
    """A flow that cannot run: what is wrong, on which line, and what would be right."""


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of the author's file."""

    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        where = f"{self.file}:{self.line}"
        return f"{where}: `{text}`" if text else where


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation of a program: how its value comes from others.

    op        its name; `inputs` are the values it takes, `given` what else defines it
    shape     the inner shape of its value; paged: whether every page has its own
    boolean   whether it is a condition instead of a number
    """

    op: str
    inputs: tuple["Node", ...]
    shape: tuple[int, ...]
    paged: bool
    given: tuple[Any, ...] = ()
    boolean: bool = False
    place: CodeLine | None = field(default=None, repr=False)


def author_line() -> CodeLine:
    """Return the innermost line outside this package: the author's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_author_frame(frame):
        frame = frame.f_back
    assert frame is not None
    return CodeLine(frame.f_code.co_filename, frame.f_lineno)


def is_author_frame(frame: FrameType) -> bool:
    """Whether a frame is outside the machinery; by module, as generated code has no file.

    What an author calls of torch or numpy is not the author's either.
    """
    module = frame.f_globals.get("__name__", "")
    return module not in _MACHINERY and module.split(".")[0] not in ("torch", "numpy")


def fail(message: str, place: CodeLine | None = None) -> FlowError:
    """Return the FlowError to raise for a mistake on the author's line."""
    return FlowError(f"{place or author_line()}: {message}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Suggest the nearest known name, or nothing."""
    close = get_close_matches(name, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def in_order(roots: Iterable[Node]) -> Iterator[Node]:
    """Yield every node that the roots depend on, inputs first."""
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(operand, False) for operand in reversed(node.inputs)]


# Tensors.


Binary = Callable[["Tensor", "Tensor | Number"], "Tensor"]
Unary = Callable[["Tensor"], "Tensor"]


def _binary(op: str, *, reverse: bool = False, boolean: bool = False) -> Binary:
    def method(self: "Tensor", other: "Tensor | Number") -> "Tensor":
        return elementwise(op, *((other, self) if reverse else (self, other)), boolean=boolean)

    return method


def _unary(op: str) -> Unary:
    def method(self: "Tensor") -> "Tensor":
        (x,) = as_tensors(op, (self,))
        return make(op, (x,), x.shape)

    return method


class Tensor:
    """A value of a flow: an inner shape, one for the sequence or one for every page (`paged`)."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def shape(self) -> tuple[int, ...]:
        return self.node.shape

    @property
    def paged(self) -> bool:
        return self.node.paged

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"<{'one per page' if self.paged else 'one per sequence'}, shape {self.shape}>"

    # Arithmetic.

    __add__ = _binary("add")
    __sub__ = _binary("sub")
    __mul__ = _binary("mul")
    __truediv__ = _binary("div")
    __radd__ = _binary("add", reverse=True)
    __rsub__ = _binary("sub", reverse=True)
    __rmul__ = _binary("mul", reverse=True)
    __rtruediv__ = _binary("div", reverse=True)
    __neg__ = _unary("neg")
    __abs__ = abs = _unary("abs")
    exp = _unary("exp")
    log = _unary("log")
    sqrt = _unary("sqrt")
    relu = _unary("relu")
    sigmoid = _unary("sigmoid")
    silu = _unary("silu")

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> "Tensor":
        """Numpy's numbers take part in arithmetic; its functions know nothing of flows."""
        if method == "__call__" and ufunc.__name__ in _NUMPY:
            return elementwise(_NUMPY[ufunc.__name__], *inputs)
        raise _foreign("numpy", ufunc.__name__)

    @classmethod
    def __torch_function__(cls, function: Any, *_: object) -> NoReturn:
        raise _foreign("torch", getattr(function, "__name__", str(function)))

    # Conditions.

    __gt__ = _binary("gt", boolean=True)
    __ge__ = _binary("ge", boolean=True)
    __lt__ = _binary("lt", boolean=True)
    __le__ = _binary("le", boolean=True)

    def __eq__(self, other: object) -> NoReturn:
        raise fail("flows have no == and !=: compare with <, <=, > and >=")

    __ne__ = __eq__
    __hash__ = object.__hash__

    def _joined(self, other: object) -> NoReturn:
        raise fail("conditions are not joined with & or |: nest where(condition, a, b)")

    __and__ = __or__ = __rand__ = __ror__ = _joined

    def __pow__(self, other: object) -> NoReturn:
        raise fail("flows have no **: write x * x, .sqrt(), or (c * x.log()).exp()")

    # Reductions over inner axes.

    def sum(self, axis: int | None = None, *, keepdims: bool = False) -> "Tensor":
        return _reduce("sum", self, axis, keepdims)

    def max(self, axis: int | None = None, *, keepdims: bool = False) -> "Tensor":
        return _reduce("max", self, axis, keepdims)

    def min(self, axis: int | None = None, *, keepdims: bool = False) -> "Tensor":
        return _reduce("min", self, axis, keepdims)

    def mean(self, axis: int | None = None, *, keepdims: bool = False) -> "Tensor":
        total = self.sum(axis, keepdims=keepdims)
        return total / (math.prod(self.shape) // max(1, math.prod(total.shape)))

    def norm(self, axis: int | None = None, *, keepdims: bool = False) -> "Tensor":
        """The L2 norm."""
        return (self * self).sum(axis, keepdims=keepdims).sqrt()

    # Shapes and products.

    def __matmul__(self, other: "Tensor") -> "Tensor":
        if not isinstance(other, Tensor):
            kind = type(other).__name__
            raise fail(f"@ takes two tensors, got a {kind}; wrap arrays in constant(...)")
        a, b = as_tensors("@", (self, other))
        if a.ndim not in (1, 2) or b.ndim not in (1, 2):
            raise fail(f"@ takes vectors and matrices, got shapes {a.shape} and {b.shape}")
        if a.shape[-1] != b.shape[0]:
            hint = "; transpose the second with .T" if a.shape[-1] == b.shape[-1] else ""
            raise fail(f"@: inner sizes of {a.shape} and {b.shape} differ{hint}")
        return make("matmul", (a, b), (*a.shape[:-1], *b.shape[1:]))

    @property
    def T(self) -> "Tensor":
        """The two inner axes exchanged."""
        if self.ndim != 2:
            raise fail(f".T wants two inner axes, got shape {self.shape}")
        return make("transpose", (self,), self.shape[::-1])

    def reshape(self, *shape: int) -> "Tensor":
        check_sizes("reshape", shape)
        if math.prod(shape) != math.prod(self.shape):
            raise fail(f"reshape: {self.shape} and {shape} hold different amounts of numbers")
        return make("reshape", (self,), shape)

    def __getitem__(self, index: int | slice) -> "Tensor":
        """One entry or a range of the first inner axis, by constants."""
        if not self.ndim or not isinstance(index, int | slice):
            raise fail(f"[...] takes one number or range of the first axis, shape is {self.shape}")
        size = self.shape[0]
        if isinstance(index, int):
            if not -size <= index < size:
                raise fail(f"index {index} is outside an axis of {size}")
            part = take(self, [index % size], 0)
            return part.reshape(*self.shape[1:])
        return take(self, list(range(size))[index], 0)

    # What a value that is not known yet cannot do.

    def __bool__(self) -> NoReturn:
        raise fail("a traced tensor has no truth value: use where(), maximum() or minimum()")

    def __float__(self) -> NoReturn:
        raise fail("a traced tensor is no number: use x.exp() instead of math.exp(x)")

    __int__ = __index__ = __float__

    def __iter__(self) -> NoReturn:
        raise fail("tensors are not iterated: index one (x[0]) or reduce an axis (x.sum(0))")

    def __len__(self) -> int:
        if not self.ndim:
            raise fail("a number has no length")
        return self.shape[0]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        close = get_close_matches(name, _attributes(), n=1)
        hint = f"did you mean .{close[0]}?" if close else f"there are: {', '.join(_attributes())}"
        raise fail(f"tensors of a flow have no .{name}; {hint}")


# How nodes are made.


def make(
    op: str,
    inputs: Sequence[Tensor],
    shape: Sequence[int],
    given: tuple[Any, ...] = (),
    *,
    paged: bool | None = None,
    boolean: bool = False,
) -> Tensor:
    paged = any(tensor.paged for tensor in inputs) if paged is None else paged
    nodes = tuple(tensor.node for tensor in inputs)
    return Tensor(Node(op, nodes, tuple(shape), paged, given, boolean, author_line()))


def as_tensor(x: Tensor | Number) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool) or not isinstance(x, Real):
        raise fail(f"got {type(x)}: use a flow's tensors, numbers, or constant(array)")
    return make("full", (), (), (float(x),))


def as_tensors(op: str, inputs: Sequence[Tensor | Number]) -> list[Tensor]:
    tensors = [as_tensor(x) for x in inputs]
    if any(x.node.boolean for x in tensors):
        raise fail(f"{SIGNS.get(op, op)} of a condition: use where(condition, a, b) first")
    return tensors


def elementwise(
    op: str, a: Tensor | Number, b: Tensor | Number, *, boolean: bool = False
) -> Tensor:
    return broadcasting(op, as_tensors(op, (a, b)), boolean=boolean)


def broadcasting(op: str, inputs: Sequence[Tensor], *, boolean: bool) -> Tensor:
    try:
        shape = np.broadcast_shapes(*(tensor.shape for tensor in inputs))
    except ValueError:
        shapes = " and ".join(str(tensor.shape) for tensor in inputs)
        raise fail(f"{SIGNS.get(op, op)}: shapes {shapes} cannot be broadcast") from None
    return make(op, inputs, shape, boolean=boolean)


def check_sizes(name: str, shape: tuple[int, ...]) -> None:
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise fail(f"{name} takes sizes as whole numbers above 0, got {shape}")


def _attributes() -> list[str]:
    return [attribute for attribute in dir(Tensor) if not attribute.startswith("_")]


def _foreign(library: str, name: str) -> FlowError:
    instead = f"x.{name}()" if name in _attributes() else "the functions of sparrow.sparse.flows"
    return fail(f"{library}.{name} cannot take a flow's tensors: use {instead}, constant(array)")


def normalise_axis(x: Tensor, axis: int) -> int:
    if not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        allowed = f"expected 0 to {x.ndim - 1}" if x.ndim else "it has no axis"
        hint = "; pages are no axis: use sum_over_pages and its like" if x.paged else ""
        raise fail(f"axis {axis} of a tensor of shape {x.shape}, {allowed}{hint}")
    return axis % x.ndim


def take(x: Tensor, indices: Sequence[int], axis: int = 0) -> Tensor:
    """These entries of an inner axis, in this order."""
    at = normalise_axis(x, axis)
    indices = tuple(indices)
    if not indices or not all(isinstance(i, int) and 0 <= i < x.shape[at] for i in indices):
        raise fail(f"take: indices {list(indices)} of an axis of {x.shape[at]}")
    return make("take", (x,), (*x.shape[:at], len(indices), *x.shape[at + 1 :]), (at, indices))


def _reduce(op: str, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    (x,) = as_tensors(op, (x,))
    if axis is None:
        whole = x
        while whole.ndim:
            whole = make(op, (whole,), whole.shape[:-1], (whole.ndim - 1,))
        return whole.reshape(*(1,) * x.ndim) if keepdims else whole
    at = normalise_axis(x, axis)
    reduced = make(op, (x,), (*x.shape[:at], *x.shape[at + 1 :]), (at,))
    return reduced.reshape(*x.shape[:at], 1, *x.shape[at + 1 :]) if keepdims else reduced


# Functions of tensors, and of constants.


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
    ones = make("full", (), (), (1.0,), paged=True)
    return sum_over_pages(x, among=among) / maximum(sum_over_pages(ones, among=among), 1.0)


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


def among_best(x: Tensor, share: Number) -> Tensor:
    """Whether a page is among the best by x: of the free ones, share times those that are kept.

    Of those that the budget keeps, rounded up; share up to 16, in steps of 1/1024. Ties go to the
    earlier page, NaN is last, and pages that are always kept are not among them.
    """
    right = isinstance(share, int | float) and not isinstance(share, bool)
    if not right or not 0 < share <= MOST_SHARE:
        raise fail(f"a share of the pages is above 0 and at most {MOST_SHARE}, got {share!r}")
    _require_paged("among_best", x)
    if x.shape:
        raise fail(f"among_best takes one number per page, got shape {x.shape}: reduce it")
    parts = max(1, round(share * SHARE_PARTS))
    return make("best", (x,), (), (parts,), paged=True, boolean=True)


def union(a: Tensor, b: Tensor, share: Number = 0.5) -> Tensor:
    """The union of two choices: this share of the kept pages are the best by a, the rest by b."""
    return where(among_best(a, share), -HIDDEN, b)


def two_stage(coarse: Tensor, fine: Tensor, share: Number = 4) -> Tensor:
    """The best by fine, among share times as many that are the best by coarse."""
    return where(among_best(coarse, share), fine, HIDDEN)


def _over_pages(op: str, x: Tensor, among: Among) -> Tensor:
    if among not in ("finished", "free"):
        raise fail(f'among={among!r}, expected "finished" or "free"')
    _require_paged(f"{op}_over_pages", x)
    return make(f"pages_{op}", (x,), x.shape, (among,), paged=False)


def _require_paged(name: str, x: Tensor) -> None:
    (x,) = as_tensors(name, (x,))
    if not x.paged:
        raise fail(f"{name} takes a value of every page: fields, state, position.page in score")


def _array(array: npt.ArrayLike) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        data = np.ascontiguousarray(array, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise fail(f"constants are arrays of numbers: {error}") from error
    if not data.size or not np.isfinite(data).all():
        raise fail(f"constants are finite numbers, at least one; got shape {data.shape}")
    return data


Summary = dict[str, Tensor]
