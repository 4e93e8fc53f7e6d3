"""Emitting what scores read: queries, fields of pages, state, positions and constants."""

import math
from collections.abc import Iterable

import torch

from sparrow.sparse.compile.emit import Emitter, Lines, beside, load, offsets, padded
from sparrow.sparse.flows.flow import Program
from sparrow.sparse.flows.formats import PageField, scale_of
from sparrow.sparse.flows.tensor import Node, fail

DOT_COLUMNS = 16  # the fewest that the matrix units take
TRITON = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}
NIBBLE = "(({0}).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0"
"""A whole number of 4 bits, minus 8: put into the last bits of 2**23 and taken out as a float."""


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
        match node.op:
            case "query":
                return self._query(node)
            case "field":
                return self._field(self.fields[node.given[0]])
            case "state":
                state = state_pointer(self.program, node.given[0])
                return f"tl.load({state} + state_at + m, real, other=0.0)"
            case "length":
                return "length.to(tl.float32)"
            case "pages":
                return "finished.to(tl.float32)"
            case "page":
                return "m.to(tl.float32)"
            case "constant":
                return self._constant(node)
        return super()._expression(node)

    def _query(self, node: Node) -> str:
        heads, depth = node.shape
        at = f"(g * {heads} + tl.arange(0, {padded(heads)}))[:, None] * q_head"
        at += f" + tl.arange(0, {padded(depth)})[None, :]"
        inside = f"(tl.arange(0, {padded(heads)}) < {heads})[:, None]"
        inside += f" & (tl.arange(0, {padded(depth)}) < {depth})[None, :]"
        return f"tl.load(q + {at}, {inside}, other=0.0).to(tl.float32)"

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

    def _field(self, field: PageField) -> str:
        shape, kind = field.shape, field.form.kind
        if not field.form.scaled:
            return f"{self.load(field.name, shape)}.to(tl.float32)"
        scale = self.fresh(f"{self.load(scale_of(field.name), shape[:-1])}.to(tl.float32)")
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
        if field.shape[-1] != padded(field.shape[-1]):
            raise fail(f"field {field.name!r}: int4 vectors are compiled for powers of two only")
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
        scale = self._field_scale(field)
        if vectors == 1 and len(field.shape) == 1:
            return total if scale is None else f"{total} * {scale}[:, None]"
        total = self.fresh(
            f"tl.reshape({total}, ({self.pages}, {padded(vectors)}, {padded(heads)}))"
        )
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

    def _field_scale(self, field: Node) -> str | None:
        item = self.fields[field.given[0]]
        if not item.form.scaled:
            return None
        return self.fresh(f"{self.load(scale_of(item.name), item.shape[:-1])}.to(tl.float32)")


def _dot(left: str, right: str, total: str | None) -> str:
    third = "" if total is None else f", {total}"
    return f'tl.dot({left}, {right}{third}, input_precision="ieee")'


def blocks_of(program: Program, keys: torch.dtype) -> list[str]:
    """Names of the blocks in memory, in the order of arguments."""
    return [name for item in program.fields for name, *_ in item.storage(keys)]


def pointer(program: Program, name: str) -> str:
    """The argument that holds a block of a field, or its scales. Sources know numbers, no names."""
    base, _, part = name.partition(".")
    return f"{part or 'field'}{[item.name for item in program.fields].index(base)}"


def state_pointer(program: Program, name: str) -> str:
    return f"state{[own for own, _ in program.state].index(name)}"
