"""Operations of a flow as lines of Triton, and what scores read: queries, fields, state, constants.

A value is a block of registers: [BLOCK, *shape] where every page has its own, else [*shape], each
axis padded to a power of two. What lies in the padding is anything: reductions mask it.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from sparrow.sparse.flows.flow import Program
from sparrow.sparse.flows.formats import PageField, scale_name
from sparrow.sparse.flows.tensor import SIGNS, Node, fail

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
BINARY = {op: f"({{0}} {sign} {{1}})" for op, sign in SIGNS.items()}
BINARY |= {op: f"tl.{op}({{0}}, {{1}})" for op in ("maximum", "minimum")}
BINARY |= {"where": "tl.where({0}, {1}, {2})"}
NOTHING = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}
LEAST_DIVISOR = 1e-30  # whose reciprocal is a float32 for sure, and so is that of its reciprocal
MOST_NUMBERS = 1 << 16  # of one value of a page: more do not fit a program's registers
POSITION = {"length": "length.to(tl.float32)", "pages": "finished.to(tl.float32)"}
POSITION |= {"page": "m.to(tl.float32)"}
DOT_COLUMNS = 16  # the fewest that the matrix units take
TRITON = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}
TRITON |= {torch.uint8: "tl.uint8", torch.float8_e4m3fn: "tl.float8e4nv"}
NIBBLE = "(({0}).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0"
"""A whole number of 4 bits, minus 8: put into the last bits of 2**23 and taken out as a float."""


def padded(size: int) -> int:
    """Round up to a power of two."""
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
    """Builds indented source; loop invariants go before the loop."""

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
        self.indent, self._loop = self._loop[1], None

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
            parts = [self.aligned(operand, node) for operand in node.inputs]
            return BINARY[node.op].format(*parts)
        if node.op in NOTHING:
            return self._reduction(node)
        method = getattr(self, f"_{node.op}", None)
        if method is None:
            raise fail(f"{node.op} is not known to the compiler here", node.place)
        return method(node)

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
        node_rank = self.lead(node) + len(node.shape)
        if not node_rank or node_rank == rank:
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
            problem = f"reshape {source.shape} -> {node.shape}"
            raise fail(f"{problem} is compiled for powers of two only", node.place)
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
        left += self._axes(a, node, [":"] * rows + [":"] + ["None"] * columns)
        right += self._axes(b, node, ["None"] * rows + [":"] + [":"] * columns)
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


# What scores read.


def constants(nodes: Iterable[Node]) -> list[Node]:
    """Those of a program, each once."""
    return [node for node in nodes if node.op == "constant"]


class PageEmitter(Emitter):
    """Emits values of BLOCK pages of one row and KV head.

    The lines before must have set: b, g, q, length, finished, m, real, base (of each page in the
    pools), and pointers named by `pointer`.
    """

    def __init__(self, lines: Lines, block: int, program: Program, keys: torch.dtype) -> None:
        super().__init__(lines, block, keys)
        self.program, self.pages = program, block
        self.fields = {item.name: item for item in program.fields}
        self.constants = constants(program.nodes)

    def _expression(self, node: Node) -> str:
        return POSITION.get(node.op) or super()._expression(node)

    def _state(self, node: Node) -> str:
        state = state_pointer(self.program, node.given[0])
        return f"tl.load({state} + state_at + m, real, other=0.0)"

    def _query(self, node: Node) -> str:
        heads, depth = node.shape
        at = f"(g * {heads} + tl.arange(0, {padded(heads)}))[:, None] * q_head"
        at += f" + tl.arange(0, {padded(depth)})[None, :]"
        real = f"{inside(heads, 0, 2)} & {inside(depth, 1, 2)}"
        return f"tl.load(q + {at}, {real}, other=0.0).to(tl.float32)"

    def _constant(self, node: Node) -> str:
        start = f"constant{self.constants.index(node)}"
        if node.given[1] == "by head":
            start = f"{start} + (layer * KV_HEADS + g) * {math.prod(node.shape)}"
        return load(start, node.shape) if node.shape else f"tl.load({start})"

    # Fields.

    def load(self, name: str, shape: tuple[int, ...]) -> str:
        """A block of a field for every page, as it is stored."""
        place, entries = offsets(shape, 1)
        packed = name in self.fields and self.fields[name].form.kind == "int4"
        nothing = "0" if packed else "0.0"
        real = f"real{beside(shape)}" + (f" & {entries}" if entries else "")
        start = f"{pointer(self.program, name)} + (base * {math.prod(shape)}){beside(shape)}"
        at = f"{start} + {place}"
        return f"tl.load({at}, {real}, other={nothing})"

    def _field(self, node: Node) -> str:
        field = self.fields[node.given[0]]
        shape, kind = field.shape, field.form.kind
        if not field.form.scaled:
            return f"{self.load(field.name, shape)}.to(tl.float32)"
        scale = self._field_scale(field)
        axes = ", ".join([":"] * len(shape) + ["None"])
        if kind == "fp8":
            return f"{self.load(field.name, shape)}.to(tl.float32) * {scale}[{axes}]"
        low, high = self._halves(field)
        joined = self.fresh(f"tl.join({low}, {high})")  # [..., D / 2, 2]
        rank = 1 + len(shape)
        order = (*range(rank - 1), rank, rank - 1)
        block = (self.block, *(padded(size) for size in shape))
        return f"tl.reshape(tl.permute({joined}, {order}), {block}) * {scale}[{axes}]"

    def _halves(self, field: PageField) -> tuple[str, str]:
        """The first and the second half of packed vectors, as floats."""
        shape = (*field.shape[:-1], field.shape[-1] // 2)
        packed = self.fresh(self.load(field.name, shape))
        return tuple(self.fresh(NIBBLE.format(x)) for x in (f"{packed} & 15", f"{packed} >> 4"))  # type: ignore[return-value]

    # Products with query heads, by the matrix units.

    def _matmul(self, node: Node) -> str:
        pair = self._query_and_field(*node.inputs)
        return super()._matmul(node) if pair is None else self._dot(*pair)

    def _query_and_field(self, a: Node, b: Node) -> tuple[Node, Node, bool] | None:
        """(query, field, query comes first) of a product for the matrix units, if it is one.

        The query heads themselves times vectors of a field: numbers that 16 bits hold exactly.
        """
        for first, left, right in ((True, a, b), (False, b, a)):
            # q @ field.T and q @ vector; field @ q.T and vector @ q.T
            query = left if first else (left.inputs[0] if left.op == "transpose" else left)
            field = right.inputs[0] if first and right.op == "transpose" else right
            turned = right.op == "transpose" if first else left.op == "transpose"
            vector = len(field.shape) == 1
            ready = (turned or vector) if first else turned
            if query.op == "query" and field.op == "field" and ready:
                return query, field, first
        return None

    def _dot(self, query: Node, field: Node, query_first: bool) -> str:
        """[pages x vectors, D] times [D, heads]; scales come after.

        Heads stand apart in 16 columns with zeros between, so that sums of columns give them back.
        """
        heads, depth = query.shape
        vectors = 1 if len(field.shape) == 1 else field.shape[0]
        columns = max(DOT_COLUMNS, padded(heads))
        rows = self.pages * padded(vectors)
        total = self._field_dot(field, rows, depth, columns)
        between = columns // padded(heads)
        if between > 1:
            parts = (rows, padded(heads), between)
            total = self.fresh(f"tl.sum(tl.reshape({total}, {parts}), 2)")
        item = self.fields[field.given[0]]
        scale = self._field_scale(item) if item.form.scaled else None
        if vectors == 1 and len(field.shape) == 1:
            return total if scale is None else f"{total} * {scale}[:, None]"
        shape = (self.pages, padded(vectors), padded(heads))
        total = self.fresh(f"tl.reshape({total}, {shape})")
        if scale is not None:
            total = self.fresh(f"{total} * {scale}[:, :, None]")
        return f"tl.permute({total}, (0, 2, 1))" if query_first else total

    def _field_dot(self, field: Node, rows: int, depth: int, columns: int) -> str:
        item = self.fields[field.given[0]]
        exact = item.form.kind in ("keys", "int4", "fp8") or (
            item.form.kind == {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.keys)
        )
        kind = TRITON[self.keys] if exact else "tl.float32"
        heads = self.program.group
        if item.form.kind == "int4" and self.keys == torch.bfloat16:
            return self._nibble_dot(item, rows, depth, columns)
        if item.form.kind == "int4":
            low, high = self._halves(item)
            half = depth // 2
            left = self._turned(low, rows, half, kind), self._turned(high, rows, half, kind)
            query = [self._columns(half, columns, heads, at, kind) for at in (0, half)]
            first = self.fresh(_dot(left[0], query[0], None))
            return self.fresh(_dot(left[1], query[1], first))
        stored = self.fresh(self.load(item.name, item.shape))
        left_all = self._turned(stored, rows, padded(depth), kind)
        return self.fresh(_dot(left_all, self._columns(depth, columns, heads, 0, kind), None))

    def _nibble_dot(self, item: PageField, rows: int, depth: int, columns: int) -> str:
        """Products with 4-bit numbers, put as they are into the last bits of 128 in bf16.

        What is 136 too much in every number is taken away from the product at its end.
        """
        half, heads = depth // 2, self.program.group
        packed = self.fresh(self.load(item.name, (*item.shape[:-1], half)))
        packed = self.fresh(f"tl.reshape({packed}, ({rows}, {half}))")
        parts = self.fresh(f"nibbles({packed})")
        total, excess = None, []
        for start, number in ((0, f"{parts}[0]"), (half, f"{parts}[1]")):
            query = self._columns(half, columns, heads, start, "tl.bfloat16")
            total = self.fresh(_dot(number, query, total))
            excess.append(f"tl.sum({query}.to(tl.float32), 0)")
        too_much = self.lines.name(f"136.0 * ({' + '.join(excess)})[None, :]", once=True)
        return self.fresh(f"{total} - {too_much}")

    def _turned(self, name: str, rows: int, depth: int, kind: str) -> str:
        return self.fresh(f"tl.reshape({name}, ({rows}, {depth})).to({kind})")

    def _columns(self, depth: int, columns: int, heads: int, start: int, kind: str) -> str:
        """Query heads as columns [depth, columns], zeros between them."""
        between = columns // padded(heads)
        c, d = f"tl.arange(0, {columns})", f"tl.arange(0, {padded(depth)})"
        at = f"(g * {heads} + {c} // {between})[None, :] * q_head + ({start} + {d})[:, None]"
        inside = f"(({c} % {between} == 0) & ({c} // {between} < {heads}))[None, :]"
        if padded(depth) != depth:
            inside += f" & ({d} < {depth})[:, None]"
        return self.lines.name(f"tl.load(q + {at}, {inside}, other=0.0).to({kind})", once=True)

    def _field_scale(self, item: PageField) -> str:
        return self.fresh(f"{self.load(scale_name(item.name), item.shape[:-1])}.to(tl.float32)")


def _dot(left: str, right: str, total: str | None) -> str:
    third = "" if total is None else f", {total}"
    return f'tl.dot({left}, {right}{third}, input_precision="ieee")'


def pointer(program: Program, name: str) -> str:
    """The argument that holds a block of a field, or its scales. Sources know numbers, no names."""
    base, _, part = name.partition(".")
    return f"{part or 'field'}{[item.name for item in program.fields].index(base)}"


def state_pointer(program: Program, name: str) -> str:
    return f"state{[state_name for state_name, _ in program.state].index(name)}"
