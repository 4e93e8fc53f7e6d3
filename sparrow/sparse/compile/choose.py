"""The kernel `choose`: passes over all pages of a row, and the choice.

Where a formula goes over pages, this finishes the scores of a row and chooses in one go.
"""

from collections.abc import Sequence

import torch

from sparrow.sparse.compile.emit import NOTHING, Lines, literal, signature, wide
from sparrow.sparse.compile.pages import PageEmitter, constants
from sparrow.sparse.compile.scores import PAGE_OPS, cut_place, cuts, levels
from sparrow.sparse.flows.nodes import Node, fail
from sparrow.sparse.flows.tracing import Program

CHUNK = 1024  # pages that `choose` looks at together
JOINED = {"sum": "{0} + {1}", "max": "tl.maximum({0}, {1})", "min": "tl.minimum({0}, {1})"}


class RowEmitter(PageEmitter):
    """Emits values of CHUNK pages in a loop; cuts come from memory."""

    def __init__(self, lines: Lines, program: Program, keys: torch.dtype) -> None:
        super().__init__(lines, CHUNK, program, keys)
        self.cuts = cuts(program)

    def _expression(self, node: Node) -> str:
        for index, cut in enumerate(self.cuts):
            if cut.node is node:
                place, mask = cut_place(cut, "m", "real")
                return f"tl.load(cut{index} + {place}, {mask}, other=0.0)"
        if node.op == "convolve":
            return self._convolve(node)
        return super()._expression(node)

    def _convolve(self, node: Node) -> str:
        (source,) = node.inputs
        found = [index for index, cut in enumerate(self.cuts) if cut.node is source]
        if not found:
            raise fail("a convolution of what depends on all pages is not compiled", node.place)
        cut, taps = self.cuts[found[0]], node.given[0]
        total = "0.0"
        for j, tap in enumerate(taps):
            near = f"(m + {j - len(taps) // 2})"
            place, mask = cut_place(cut, near, f"({near} >= 0) & ({near} < finished)")
            part = self.fresh(f"tl.load(cut{found[0]} + {place}, {mask}, other=0.0)")
            total = self.fresh(f"{total} + {literal(tap)} * {part}")
        return total


def choose(program: Program, keys: torch.dtype) -> str:
    """Finishes the scores of one row and KV head, pass after pass, and chooses its pages."""
    assert program.score is not None
    level = levels(program)
    lines = Lines(0)
    arguments = ["pages_out", "counts_out", "score"]
    arguments += [f"cut{i}" for i in range(len(cuts(program)))]
    arguments += ["q", "lengths", "budgets"]
    arguments += [f"constant{i}" for i in range(len(constants(program.nodes)))]
    arguments += ["layer", "width", "q_row", "q_head", "budget_row", "budget_head"]
    loose = '"layer", "width", "budget_row"'
    fixed = ("KV_HEADS", "FIRST", "LAST", "MASS", "SIZE", "OVERLAP")
    for line in signature("choose", arguments, fixed, loose):
        lines.add(line)
    lines.indent = 1
    lines.add("wait(OVERLAP)")
    lines.add("b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)")
    lines.add("length = tl.load(lengths + b).to(tl.int32)")
    lines.add(f"length = tl.minimum(length, width * {program.page})")
    lines.add(f"finished = length // {program.page}")
    lines.add("budget = tl.load(budgets + b * budget_row + g * budget_head)")
    lines.add(f"pages, reserved, most = row_counts(length, budget, {program.page}, FIRST, LAST)")
    lines.add("place = b * KV_HEADS + g")
    lines.add("q += b * q_row")
    lines.add("score += place * width")
    lines.add("if sure_pages(reserved, most, budget, MASS) < pages:")
    lines.indent = 2
    emitter = RowEmitter(lines, program, keys)
    for step in range(1, level[id(program.score)] + 1):
        _pass(emitter, [n for n in program.nodes if n.op in PAGE_OPS and level[id(n)] == step])
    _open_loop(lines)
    lines.add(f"tl.store(score + m, {emitter.value(program.score)}, real)")
    emitter.leave_loop()
    lines.add("tl.debug_barrier()")
    lines.indent = 1
    lines.add(
        "select_row(pages_out + place * width, counts_out + place, score, length, budget, width, "
        f"{program.page}, FIRST, LAST, MASS, SIZE)"
    )
    return str(lines)


def _open_loop(lines: Lines) -> None:
    """A loop over the pages of a row, chunk by chunk."""
    lines.open_loop(f"for chunk in range(0, finished, {CHUNK}):")
    lines.add(f"m = chunk + tl.arange(0, {CHUNK})")
    lines.add("real = m < finished")


def _pass(emitter: RowEmitter, nodes: Sequence[Node]) -> None:
    """One pass: every reduction over pages of this level."""
    if not nodes:
        return
    lines, totals = emitter.lines, {}
    for node in nodes:
        nothing = NOTHING[node.op.removeprefix("pages_")]
        totals[id(node)] = lines.name(f"tl.full({list(wide(node.shape))}, {nothing}, tl.float32)")
    _open_loop(lines)
    for node in nodes:
        op = node.op.removeprefix("pages_")
        (value,) = node.inputs
        every = emitter.fresh(
            f"tl.zeros({emitter.shape(value)}, tl.float32) + {emitter.value(value)}"
        )
        index = f"[{', '.join([':'] + ['None'] * len(node.shape))}]" if node.shape else ""
        among = {"finished": "real", "free": "(real & (m >= FIRST) & (m < pages - LAST))"}
        masked = f"tl.where({among[node.given[0]]}{index}, {every}, {NOTHING[op]})"
        total = totals[id(node)]
        lines.add(f"{total} = {JOINED[op].format(total, f'tl.{op}({masked}, 0)')}")
    emitter.leave_loop()
    for node in nodes:
        emitter.keep(node, totals[id(node)])
