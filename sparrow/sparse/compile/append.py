"""The kernel `append`: writes tokens and, where they finish a page, its fields."""

import math

import torch

from sparrow.sparse.compile.emit import Emitter, Lines, offsets, padded, signature, wide
from sparrow.sparse.compile.pages import TRITON, blocks_of, pointer
from sparrow.sparse.flows.formats import MOST_FP8, MOST_INT4, MOST_SCALE, scale_of
from sparrow.sparse.flows.nodes import Node, fail, in_order
from sparrow.sparse.flows.tracing import PageField, Program

ROUND = 12582912.0  # 1.5 * 2**23: adding and taking it away rounds to whole numbers, half to even


class PageOfKeys(Emitter):
    """Emits a summary: the inputs are the keys and values of one page."""

    def __init__(self, lines: Lines, program: Program, keys: torch.dtype) -> None:
        super().__init__(lines, None, keys)
        self.program = program
        self.constants = [n for n in in_order(program.summary) if n.op == "constant"]

    def _expression(self, node: Node) -> str:
        if node.op in ("keys", "values"):
            return {"keys": "k_page", "values": "v_page"}[node.op]
        if node.op == "constant":
            if node.given[1] != "shared":
                raise fail("weights by layer and head are for scores", node.place)
            place, inside = offsets(node.shape, 0)
            start = f"summary_constant{self.constants.index(node)}"
            return f"tl.load({start} + {place}{', ' + inside + ', other=0.0' if inside else ''})"
        return super()._expression(node)


def append(program: Program, keys: torch.dtype) -> str:
    """Writes the heads of tokens, and the fields of the pages they finish."""
    page, size = program.page, program.head_size
    wide_d = padded(size)
    used = {node.op for node in in_order(program.summary)}
    lines = Lines(0)
    arguments = ["k_pool", "v_pool", "k_new", "v_new", "slots"]
    arguments += [pointer(program, name) for name in blocks_of(program, keys)]
    summary_constants = [n for n in in_order(program.summary) if n.op == "constant"]
    arguments += [f"summary_constant{i}" for i in range(len(summary_constants))]
    arguments += ["k_token", "k_head", "v_token", "v_head"]
    for line in signature("append", arguments, ("KV_HEADS", "WRITE", "OVERLAP"), ""):
        lines.add(line)
    lines.indent = 1
    lines.add("wait(OVERLAP)")
    lines.add("token, g = tl.program_id(0).to(tl.int64), tl.program_id(1)")
    lines.add("slot = tl.load(slots + token).to(tl.int64)")
    lines.add(f"page, offset = slot // {page}, slot % {page}")
    lines.add("head = page * KV_HEADS + g")
    lines.add(f"d = tl.arange(0, {wide_d})")
    lines.add(f"real_d = (d < {size}) & (slot >= 0)")
    kind = TRITON[keys]
    lines.add(f"new_k = tl.zeros([{wide_d}], {kind})")
    lines.add(f"new_v = tl.zeros([{wide_d}], {kind})")
    lines.add("if WRITE:")
    lines.indent = 2
    for name in ("k", "v"):
        place = f"token * {name}_token + g * {name}_head + d"
        lines.add(f"new_{name} = tl.load({name}_new + {place}, real_d, other=0.0).to({kind})")
        lines.add(
            f"tl.store({name}_pool + (head * {page} + offset) * {size} + d, new_{name}, real_d)"
        )
    lines.indent = 1
    if program.fields:
        lines.add(f"if (slot >= 0) & (offset == {page - 1}):")
        lines.indent = 2
        _load_page(lines, program, used, kind)
        emitter = PageOfKeys(lines, program, keys)
        for item, node in zip(program.fields, program.summary, strict=True):
            value = _shaped(emitter, node, item)
            _store_field(emitter, item, value)
    return str(lines)


def _load_page(lines: Lines, program: Program, used: set[str], kind: str) -> None:
    """Keys and values of the page as float32; the newest token may still be on its way."""
    page, size, wide_d = program.page, program.head_size, padded(program.head_size)
    lines.add(f"p = tl.arange(0, {page})")
    lines.add(f"inside = (d < {size})[None, :] & ((p < {page - 1}) | (not WRITE))[:, None]")
    lines.add(f"at = head * {page * size} + p[:, None] * {size} + d[None, :]")
    for name, op in (("k", "keys"), ("v", "values")):
        if op in used:
            lines.add(f"{name}_page = tl.load({name}_pool + at, inside, other=0.0).to(tl.float32)")
            lines.add("if WRITE:")
            lines.indent += 1
            last = f"(p == {page - 1})[:, None]"
            new = f"tl.broadcast_to(new_{name}.to(tl.float32)[None, :], ({page}, {wide_d}))"
            lines.add(f"{name}_page = tl.where({last}, {new}, {name}_page)")
            lines.indent -= 1


def _shaped(emitter: Emitter, node: Node, item: PageField) -> str:
    value = emitter.value(node)
    if not item.shape:
        return value
    return emitter.fresh(f"tl.full({wide(item.shape)}, 0.0, tl.float32) + {value}")


def _store_field(emitter: PageOfKeys, item: PageField, value: str) -> None:
    if item.form.scaled:
        value, scale = _scaled(emitter, item, value)
        _store(emitter, scale_of(item.name), item.shape[:-1], scale, "tl.float16")
    stored = {"int4": "tl.uint8", "fp8": "tl.float8e4nv"}.get(item.form.kind)
    shape = item.shape
    if item.form.kind == "int4":
        value, shape = _packed(emitter, item, value), (*item.shape[:-1], item.shape[-1] // 2)
    kinds = {"fp32": "tl.float32", "fp16": "tl.float16", "bf16": "tl.bfloat16"}
    kind = stored or kinds.get(item.form.kind, TRITON[emitter.keys])
    _store(emitter, item.name, shape, value, kind)


def _scaled(emitter: Emitter, item: PageField, value: str) -> tuple[str, str]:
    """The numbers of a scaled field before they are stored, and their scales."""
    most = float(MOST_INT4 if item.form.kind == "int4" else MOST_FP8)
    rank = len(item.shape)
    if padded(item.shape[-1]) != item.shape[-1]:
        inside = emitter.along(
            f"(tl.arange(0, {padded(item.shape[-1])}) < {item.shape[-1]})", rank - 1, rank
        )
        value = emitter.fresh(f"tl.where({inside}, {value}, 0.0)")
    top = f"tl.max(tl.abs({value}), {rank - 1})"
    even = f"tl.zeros_like({top})" if rank > 1 else "0.0"
    scale = emitter.fresh(f"tl.minimum(tl.div_rn({top}, {most} + {even}), {MOST_SCALE})")
    scale = emitter.fresh(f"{scale}.to(tl.float16)")
    step = emitter.fresh(f"{scale}.to(tl.float32)")
    step = f"{step}[{', '.join([':'] * (rank - 1) + ['None'])}]" if rank > 1 else step
    spread = emitter.fresh(f"tl.zeros_like({value}) + {step}")
    number = f"tl.where({spread} > 0, tl.div_rn({value}, {spread}), 0.0)"
    return emitter.fresh(f"tl.minimum(tl.maximum({number}, {-most}), {most})"), scale


def _packed(emitter: Emitter, item: PageField, value: str) -> str:
    """Two whole numbers a byte: the first half of a vector in the low bits, the second above."""
    lead, half = wide(item.shape[:-1]), item.shape[-1] // 2
    nibble = emitter.fresh(f"(({value} + {ROUND}) - {ROUND} + 8.0).to(tl.uint8)")
    order = (*range(len(lead)), len(lead) + 1, len(lead))
    pairs = emitter.fresh(f"tl.permute(tl.reshape({nibble}, {(*lead, 2, half)}), {order})")
    emitter.lines.add(f"low, high = tl.split({pairs})")
    return emitter.fresh("low | (high << 4)")


def _store(emitter: PageOfKeys, name: str, shape: tuple[int, ...], value: str, kind: str) -> None:
    place, inside = offsets(shape, 0)
    start = f"{pointer(emitter.program, name)} + head * {math.prod(shape)}"
    masked = f", {inside}" if inside else ""
    emitter.lines.add(f"tl.store({start} + {place}, {value}.to({kind}){masked})")
