"""Operations of a flow as lines of Triton.

A value is a block of registers: [BLOCK, *shape] where every page has its own, else [*shape], each
axis padded to a power of two. What lies in the padding is anything: reductions mask it.
"""

import math
from collections.abc import Sequence

import torch

from sparrow.sparse.flows.tensor import Node, fail

UNARY = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "exponential({0})",
    "log": "logarithm({0})",
    "sqrt": "tl.sqrt({0})",
    "relu": "tl.maximum({0}, 0.0)",
    "sigmoid": "tl.sigmoid({0})",
    "silu": "({0} * tl.sigmoid({0}))",
}
BINARY = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "where": "tl.where({0}, {1}, {2})",
}
NOTHING = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}
LEAST_DIVISOR = 1e-30  # whose reciprocal is a float32 for sure, and so is that of its reciprocal
MOST_NUMBERS = 1 << 16  # of one value of a page: more do not fit a program's registers


def padded(size: int) -> int:
    """The least power of two that holds so many."""
    return 1 << (size - 1).bit_length()


def wide(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(padded(size) for size in shape)


def whole(shape: Sequence[int]) -> bool:
    """Whether no axis needs padding."""
    return all(size == padded(size) for size in shape)


def literal(number: float) -> str:
    """A number as source."""
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def along(expression: str, axis: int, rank: int) -> str:
    """A vector laid along one axis of several."""
    if rank == 1:
        return expression
    axes = ["None"] * rank
    axes[axis] = ":"
    return f"{expression}[{', '.join(axes)}]"


def beside(shape: Sequence[int]) -> str:
    """The index that lays a vector of pages beside values of a shape."""
    return f"[{', '.join([':'] + ['None'] * len(shape))}]" if shape else ""


def inside(size: int, axis: int, rank: int) -> str:
    """Which entries of a padded axis are real."""
    return along(f"(tl.arange(0, {padded(size)}) < {size})", axis, rank)


def offsets(shape: Sequence[int], axes_before: int) -> tuple[str, str]:
    """Where the entries of a block lie and which are real, as source; axes before them are None."""
    rank = axes_before + len(shape)
    places, real = [], []
    for at, size in enumerate(shape):
        stride = math.prod(shape[at + 1 :])
        line = f"(tl.arange(0, {padded(size)}) * {stride})"
        places.append(along(line, axes_before + at, rank))
        if padded(size) != size:
            real.append(inside(size, axes_before + at, rank))
    return " + ".join(places) or "0", " & ".join(real)


def load(start: str, shape: Sequence[int]) -> str:
    """Numbers that lie side by side."""
    place, real = offsets(shape, 0)
    return f"tl.load({start} + {place}{', ' + real + ', other=0.0' if real else ''})"


class Lines:
    """Source under construction, indented. What a loop need not repeat goes before it."""

    def __init__(self, indent: int = 1) -> None:
        self.text: list[str] = []
        self.indent = indent
        self._names = 0
        self._loop: tuple[int, int] | None = None  # where it starts, and how deep

    def add(self, line: str) -> None:
        self.text.append("    " * self.indent + line)

    def open_loop(self, line: str) -> None:
        self._loop = len(self.text), self.indent
        self.add(line)
        self.indent += 1

    def close_loop(self) -> None:
        assert self._loop is not None
        self.indent = self._loop[1]
        self._loop = None

    def name(self, expression: str, *, once: bool = False) -> str:
        """A new name for an expression; `once`: before the loop, if there is one."""
        self._names += 1
        name = f"x{self._names}"
        if once and self._loop is not None:
            at, indent = self._loop
            self.text.insert(at, "    " * indent + f"{name} = {expression}")
            self._loop = at + 1, indent
        else:
            self.add(f"{name} = {expression}")
        return name

    def __str__(self) -> str:
        return "\n".join(self.text)


class Emitter:
    """Writes the lines that compute nodes; a value that has a name already is not computed again.

    block   how many pages a paged value spans, as source ("BLOCK"); None where there is no page
            axis at all (summaries)
    """

    def __init__(self, lines: Lines, block: int | None, keys: torch.dtype) -> None:
        self.lines, self.block, self.keys = lines, block, keys
        self.names: dict[int, str] = {}
        self._lasting: dict[int, str] = {}  # those that no loop has to compute again

    def fresh(self, expression: str) -> str:
        return self.lines.name(expression)

    def leave_loop(self) -> None:
        """Forget what was computed of the pages of a loop."""
        self.lines.close_loop()
        self.names = dict(self._lasting)

    def keep(self, node: Node, name: str) -> None:
        """A node's value that lasts beyond loops."""
        self._lasting[id(node)] = self.names[id(node)] = name

    # Values.

    def value(self, node: Node) -> str:
        """The name of a node's value, computed by now."""
        if id(node) in self.names:
            return self.names[id(node)]
        if math.prod(wide(node.shape)) > MOST_NUMBERS:
            raise fail(f"a value of shape {node.shape} is too large to compile", node.place)
        expression = self._expression(node)
        if node.paged:
            self.names[id(node)] = self.fresh(expression)
        else:
            self.keep(node, self.lines.name(expression, once=True))
        return self.names[id(node)]

    def _expression(self, node: Node) -> str:
        if node.op in UNARY:
            return UNARY[node.op].format(self.value(node.inputs[0]))
        if node.op == "div" and not node.inputs[1].paged:
            return self._over_common(node)
        if node.op in BINARY:
            parts = [self.aligned(each, node) for each in node.inputs]
            return BINARY[node.op].format(*parts)
        if node.op in NOTHING:
            return self._reduction(node)
        match node.op:
            case "full":
                return self._full(node)
            case "reshape":
                return self._reshape(node)
            case "transpose":
                return self._transpose(node)
            case "take":
                return self._take(node)
            case "matmul":
                return self._matmul(node)
        raise fail(f"{node.op} is not known to the compiler here", node.place)

    def lead(self, node: Node) -> int:
        """Axes before the inner ones."""
        return int(node.paged and self.block is not None)

    def shape(self, node: Node) -> tuple[int, ...]:
        """The padded shape of a value, its pages included."""
        lead = (self.block,) if self.lead(node) else ()
        return (*lead, *wide(node.shape))

    def aligned(self, node: Node, result: Node, name: str | None = None) -> str:
        """A value, or a name that stands for it, with its axes where they are in the result."""
        name = name or self.value(node)
        rank = self.lead(result) + len(result.shape)
        own = self.lead(node) + len(node.shape)
        if not own or own == rank:
            return name
        missing = len(result.shape) - len(node.shape)
        before = ":" if self.lead(node) else "None"
        axes = [before] * self.lead(result) + ["None"] * missing + [":"] * len(node.shape)
        return f"{name}[{', '.join(axes)}]"

    def _over_common(self, node: Node) -> str:
        """Division by what all pages share: once divided, then multiplied."""
        top, bottom = node.inputs
        if bottom.op == "full":
            number = bottom.given[0]
            if LEAST_DIVISOR <= abs(number) <= 1 / LEAST_DIVISOR:
                return f"({self.aligned(top, node)} * {literal(1.0 / number)})"
            return BINARY["div"].format(self.aligned(top, node), self.aligned(bottom, node))
        share = self.lines.name(f"1.0 / {self.value(bottom)}", once=True)
        return f"({self.aligned(top, node)} * {self.aligned(bottom, node, share)})"

    def _full(self, node: Node) -> str:
        number, shape = literal(node.given[0]), self.shape(node)
        return f"tl.full({shape}, {number}, tl.float32)" if shape else number

    def _reduction(self, node: Node) -> str:
        (source,) = node.inputs
        size = source.shape[node.given[0]]
        name, at = self.value(source), self.lead(source) + node.given[0]
        if padded(size) != size:
            real = inside(size, at, self.lead(source) + len(source.shape))
            name = f"tl.where({real}, {name}, {NOTHING[node.op]})"
        return f"tl.{node.op}({name}, {at})"

    def _reshape(self, node: Node) -> str:
        (source,) = node.inputs
        name = self.value(source)
        units = [size for size in node.shape if size != 1]
        if units != [size for size in source.shape if size != 1] and not (
            whole(node.shape) and whole(source.shape)
        ):
            raise fail(
                f"reshape {source.shape} -> {node.shape} is compiled for powers of two only",
                node.place,
            )
        if self.shape(node) == self.shape(source):
            return name
        if not self.shape(source):
            return f"tl.full({self.shape(node)}, 0.0, tl.float32) + {name}"
        if not self.shape(node):
            return f"tl.sum(tl.reshape({name}, (1,)), 0)"
        return f"tl.reshape({name}, {self.shape(node)})"

    def _transpose(self, node: Node) -> str:
        name = self.value(node.inputs[0])
        lead = self.lead(node)
        order = (*range(lead), lead + 1, lead)
        return f"tl.permute({name}, {order})"

    def _take(self, node: Node) -> str:
        axis, indices = node.given
        (source,) = node.inputs
        step = indices[1] - indices[0] if len(indices) > 1 else 1
        if list(indices) != [indices[0] + step * i for i in range(len(indices))]:
            raise fail("only evenly spaced entries are compiled", node.place)
        at, rank = self.lead(node) + axis, self.lead(node) + len(node.shape)
        most = padded(source.shape[axis]) - 1
        line = f"tl.arange(0, {padded(len(indices))}) * {step} + {indices[0]}"
        line = f"tl.minimum(tl.maximum({line}, 0), {most})"
        place = f"tl.broadcast_to({along(f'({line})', at, rank)}, {self.shape(node)})"
        return f"tl.gather({self.value(source)}, {place}, {at})"

    # Products.

    def _matmul(self, node: Node) -> str:
        a, b = node.inputs
        left, right = self.value(a), self.value(b)
        rows, columns = len(a.shape) == 2, len(b.shape) == 2
        left += self._axes(a, node, ([":"] if rows else []) + [":"] + (["None"] if columns else []))
        right += self._axes(
            b, node, (["None"] if rows else []) + [":"] + ([":"] if columns else [])
        )
        product = f"{left} * {right}"
        at, size = self.lead(node) + int(rows), a.shape[-1]
        if padded(size) != size:
            real = inside(size, at, self.lead(node) + 1 + int(rows) + int(columns))
            product = f"tl.where({real}, {product}, 0.0)"
        return f"tl.sum({product}, {at})"

    def _axes(self, node: Node, result: Node, inner: list[str]) -> str:
        """How a factor is laid out in a product: its page axis, and the inner ones given."""
        page = [":" if self.lead(node) else "None"] * self.lead(result)
        axes = [*page, *inner]
        return "" if all(axis == ":" for axis in axes) else f"[{', '.join(axes)}]"
