"""The language of flows: tensors that remember how they were made.

Arithmetic, comparisons, `@`, reductions and what is in `functions` build a program instead of
numbers. Every mistake is an error at the line that made it. Numbers are float32 throughout.
"""

import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, NoReturn

import numpy as np

from sparrow.sparse.flows.nodes import FlowError, Node, broadcast, fail, here

Number = int | float
_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "gt": ">",
    "ge": ">=",
    "lt": "<",
    "le": "<=",
}
_NUMPY = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div"}


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

    def __add__(self, other: "Tensor | Number") -> "Tensor":
        return elementwise("add", self, other)

    def __sub__(self, other: "Tensor | Number") -> "Tensor":
        return elementwise("sub", self, other)

    def __mul__(self, other: "Tensor | Number") -> "Tensor":
        return elementwise("mul", self, other)

    def __truediv__(self, other: "Tensor | Number") -> "Tensor":
        return elementwise("div", self, other)

    def __radd__(self, other: Number) -> "Tensor":
        return elementwise("add", other, self)

    def __rsub__(self, other: Number) -> "Tensor":
        return elementwise("sub", other, self)

    def __rmul__(self, other: Number) -> "Tensor":
        return elementwise("mul", other, self)

    def __rtruediv__(self, other: Number) -> "Tensor":
        return elementwise("div", other, self)

    def __neg__(self) -> "Tensor":
        return _unary("neg", self)

    def __abs__(self) -> "Tensor":
        return _unary("abs", self)

    def abs(self) -> "Tensor":
        return _unary("abs", self)

    def exp(self) -> "Tensor":
        return _unary("exp", self)

    def log(self) -> "Tensor":
        return _unary("log", self)

    def sqrt(self) -> "Tensor":
        return _unary("sqrt", self)

    def relu(self) -> "Tensor":
        return _unary("relu", self)

    def sigmoid(self) -> "Tensor":
        return _unary("sigmoid", self)

    def silu(self) -> "Tensor":
        return _unary("silu", self)

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

    def __gt__(self, other: "Tensor | Number") -> "Tensor":
        return elementwise("gt", self, other, boolean=True)

    def __ge__(self, other: "Tensor | Number") -> "Tensor":
        return elementwise("ge", self, other, boolean=True)

    def __lt__(self, other: "Tensor | Number") -> "Tensor":
        return elementwise("lt", self, other, boolean=True)

    def __le__(self, other: "Tensor | Number") -> "Tensor":
        return elementwise("le", self, other, boolean=True)

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
        return _matmul(self, other)

    @property
    def T(self) -> "Tensor":
        """The two inner axes exchanged."""
        if self.ndim != 2:
            raise fail(f".T wants two inner axes, got shape {self.shape}")
        return make("transpose", (self,), self.shape[::-1])

    def reshape(self, *shape: int) -> "Tensor":
        check_sizes("reshape", shape)
        if math.prod(shape) != math.prod(self.shape):
            raise fail(
                f"reshape: {self.shape} has {math.prod(self.shape)} numbers, {shape} has "
                f"{math.prod(shape)}"
            )
        return make("reshape", (self,), shape)

    def __getitem__(self, index: int | slice) -> "Tensor":
        """One entry or a range of the first inner axis, by constants."""
        if not self.ndim or not isinstance(index, int | slice):
            raise fail(f"[...] takes one number or range of the first axis, shape is {self.shape}")
        size = self.shape[0]
        if isinstance(index, int):
            if not -size <= index < size:
                raise fail(f"index {index} is outside an axis of {size}")
            part = taken(self, [index % size], 0)
            return part.reshape(*self.shape[1:])
        return taken(self, list(range(size))[index], 0)

    # What a value that is not known yet cannot do.

    def __bool__(self) -> NoReturn:
        raise fail(
            "a tensor has no truth value while a flow is traced: instead of if, and, or, not, "
            "max(a, b) use where(condition, a, b), maximum(a, b), minimum(a, b)"
        )

    def __float__(self) -> NoReturn:
        raise fail(
            "a tensor is no number while a flow is traced: keep computing with tensors "
            "(x.exp() instead of math.exp(x))"
        )

    __int__ = __index__ = __float__

    def __iter__(self) -> NoReturn:
        raise fail(
            f"tensors are not iterated: index one (x[0]) or reduce an axis (x.sum(0)) of {self}"
        )

    def __len__(self) -> int:
        if not self.ndim:
            raise fail("a number has no length")
        return self.shape[0]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        known = [each for each in dir(type(self)) if not each.startswith("_")]
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean .{close[0]}?" if close else f"there are: {', '.join(known)}"
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
    paged = any(each.paged for each in inputs) if paged is None else paged
    nodes = tuple(each.node for each in inputs)
    return Tensor(Node(op, nodes, tuple(shape), paged, given, boolean, here()))


def as_tensor(x: Tensor | Number) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool) or not isinstance(x, Real):
        raise fail(
            f"got a {type(x).__module__}.{type(x).__name__}: flows compute with their own tensors, "
            "numbers, and constant(array)"
        )
    return make("full", (), (), (float(x),))


def as_tensors(op: str, inputs: Sequence[Tensor | Number]) -> list[Tensor]:
    made = [as_tensor(each) for each in inputs]
    if any(each.node.boolean for each in made):
        raise fail(
            f"{_SIGNS.get(op, op)} of a condition: turn it into numbers with where(condition, a, b)"
        )
    return made


def elementwise(
    op: str, a: Tensor | Number, b: Tensor | Number, *, boolean: bool = False
) -> Tensor:
    return broadcasting(op, as_tensors(op, (a, b)), boolean=boolean)


def broadcasting(op: str, inputs: Sequence[Tensor], *, boolean: bool) -> Tensor:
    shape = broadcast([each.shape for each in inputs])
    if shape is None:
        shapes = " and ".join(str(each.shape) for each in inputs)
        raise fail(
            f"{_SIGNS.get(op, op)}: shapes {shapes} do not fit each other (axes are aligned at "
            "their ends, and equal or 1)"
        )
    return make(op, inputs, shape, boolean=boolean)


def check_sizes(name: str, shape: tuple[int, ...]) -> None:
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise fail(f"{name} takes sizes as whole numbers above 0, got {shape}")


def _foreign(library: str, name: str) -> FlowError:
    known = {each for each in dir(Tensor) if not each.startswith("_")}
    own = f"x.{name}()" if name in known else "the functions of sparrow.sparse.flows"
    return fail(
        f"{library}.{name} does not know a flow's tensors: use {own}, and constant(array) for "
        "numbers that are known beforehand"
    )


def _unary(op: str, x: Tensor) -> Tensor:
    (x,) = as_tensors(op, (x,))
    return make(op, (x,), x.shape)


def axis_of(x: Tensor, axis: int) -> int:
    if not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        allowed = f"allowed: 0 to {x.ndim - 1}" if x.ndim else "it has no axis"
        hint = "; pages are no axis: use sum_over_pages and its like" if x.paged else ""
        raise fail(f"axis {axis} of a tensor of shape {x.shape}, {allowed}{hint}")
    return axis % x.ndim


def taken(x: Tensor, indices: Sequence[int], axis: int) -> Tensor:
    """These entries of an inner axis, in this order."""
    at = axis_of(x, axis)
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
    at = axis_of(x, axis)
    reduced = make(op, (x,), (*x.shape[:at], *x.shape[at + 1 :]), (at,))
    return reduced.reshape(*x.shape[:at], 1, *x.shape[at + 1 :]) if keepdims else reduced


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if not isinstance(b, Tensor):
        raise fail(f"@ takes two tensors, got a {type(b).__name__}; wrap arrays in constant(...)")
    a, b = as_tensors("@", (a, b))
    if a.ndim not in (1, 2) or b.ndim not in (1, 2):
        raise fail(f"@ takes vectors and matrices, got shapes {a.shape} and {b.shape}")
    if a.shape[-1] != b.shape[0]:
        hint = "; transpose the second with .T" if a.shape[-1] == b.shape[-1] else ""
        raise fail(f"@: inner sizes of {a.shape} and {b.shape} differ{hint}")
    return make("matmul", (a, b), (*a.shape[:-1], *b.shape[1:]))


Summary = dict[str, Tensor]
Summarise = Callable[[Tensor, Tensor], Summary]
