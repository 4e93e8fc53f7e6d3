"""The kernel `score_pages`: reads the fields of blocks of pages for one row and KV head.

It gives scores. Where a formula goes over pages it gives cuts instead: what it knows of each page
by itself, and `choose` goes on from there.
"""

import math
from dataclasses import dataclass

import torch

from sparrow.sparse.compile.emit import Lines, offsets, signature
from sparrow.sparse.compile.pages import PageEmitter, blocks_of, constants, pointer, state_pointer
from sparrow.sparse.flows.nodes import Node
from sparrow.sparse.flows.tracing import Program

PAGE_OPS = ("pages_sum", "pages_max", "pages_min")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What `score` hands to `choose` of every page: a value of the program."""

    node: Node

    @property
    def numbers(self) -> int:
        return math.prod(self.node.shape)


def levels(program: Program) -> dict[int, int]:
    """How many passes over all pages each value needs before it is known."""
    found: dict[int, int] = {}
    for node in program.nodes:
        own = int(node.op in PAGE_OPS or node.op == "convolve")
        found[id(node)] = own + max((found[id(each)] for each in node.inputs), default=0)
    return found


def cuts(program: Program) -> list[Cut]:
    """The values by page that are known before any pass, and needed after one."""
    level = levels(program)
    needed: dict[int, Node] = {}
    for node in program.nodes:
        if level[id(node)] > 0:
            for each in node.inputs:
                if level[id(each)] == 0 and each.paged and each.op not in ("page", "full"):
                    needed[id(each)] = each
    return [Cut(node=node) for node in needed.values()]


def staged(program: Program) -> bool:
    """Whether scores need passes over all pages."""
    return program.score is not None and levels(program)[id(program.score)] > 0


def score(program: Program, keys: torch.dtype, block: int) -> str:
    """Scores of BLOCK pages, or what `choose` needs of them; state moves on."""
    lines = Lines(0)
    out = ["score"] if not staged(program) else [f"cut{i}" for i in range(len(cuts(program)))]
    arguments = [*out, "q", "table", "lengths", "budgets", "rows"]
    arguments += _inputs(program, keys)
    arguments += [state_pointer(program, name) for name, _ in program.state]
    arguments += ["layer", "width", "state_pages", "q_row", "q_head"]
    arguments += ["table_row", "table_column", "budget_row", "budget_head"]
    loose = '"layer", "width", "state_pages", "table_row", "budget_row"'
    fixed = ("KV_HEADS", "FIRST", "LAST", "LOOPS", "STAGES", "OVERLAP")
    for line in signature("score_pages", arguments, fixed, loose):
        lines.add(line)
    lines.indent = 1
    lines.add("wait(OVERLAP)")
    lines.add(f"g, begin = tl.program_id(0), tl.program_id(1) * (LOOPS * {block})")
    lines.add("b = tl.program_id(2).to(tl.int64)")
    lines.add("length = tl.load(lengths + b).to(tl.int32)")
    lines.add(f"finished = tl.minimum(length // {program.page}, width)")
    lines.add("budget = tl.load(budgets + b * budget_row + g * budget_head)")
    condition = "begin < finished"
    if not program.state:
        lines.add(
            f"pages, reserved, most = row_counts(length, budget, {program.page}, FIRST, LAST)"
        )
        condition += f") & (sure_pages(reserved, most, budget, {program.mass}) < pages"
    lines.add(f"if ({condition}):")
    lines.indent = 2
    lines.add("q += b * q_row")
    lines.add("table += b * table_row")
    lines.add("place = b * KV_HEADS + g")
    if program.state:
        lines.add("slot = tl.load(rows + b).to(tl.int64)")
        lines.add("state_at = (slot * KV_HEADS + g) * state_pages")
    lines.add(f"end = tl.minimum(begin + LOOPS * {block}, finished)")
    lines.add(f"m = begin + tl.arange(0, {block})")
    lines.add("page = tl.load(table + m * table_column, m < end, other=0)")
    emitter = PageEmitter(lines, block, program, keys)
    lines.open_loop(f"for start in tl.range(begin, end, {block}, num_stages=STAGES):")
    lines.add(f"m = start + tl.arange(0, {block})")
    lines.add("real = m < end")
    lines.add("base = page.to(tl.int64) * KV_HEADS + g")
    # The pages of the next block: looked up beside fields, they would delay these.
    lines.add(f"page = tl.load(table + (m + {block}) * table_column, m + {block} < end, other=0)")
    _store_scores(lines, emitter)
    emitter.leave_loop()
    return str(lines)


def _store_scores(lines: Lines, emitter: PageEmitter) -> None:
    """Scores or cuts of a block, and its new state."""
    program = emitter.program
    if not staged(program):
        assert program.score is not None
        lines.add(f"tl.store(score + place * width + m, {emitter.value(program.score)}, real)")
    for index, cut in enumerate(cuts(program) if staged(program) else []):
        value = emitter.value(cut.node)
        at, mask = cut_place(cut, "m", "real")
        lines.add(f"tl.store(cut{index} + {at}, {value}, {mask})")
    for (name, _), node in zip(program.state, program.updates, strict=True):
        place = f"{state_pointer(program, name)} + state_at + m"
        lines.add(f"tl.store({place}, {emitter.value(node)}, real)")


def _inputs(program: Program, keys: torch.dtype) -> list[str]:
    names = [pointer(program, name) for name in blocks_of(program, keys)]
    return names + [f"constant{i}" for i in range(len(constants(program.nodes)))]


def cut_place(cut: Cut, pages: str, real: str) -> tuple[str, str]:
    """Where a cut of some pages lies, and which entries are real."""
    shape = cut.node.shape
    index = f"[{', '.join([':'] + ['None'] * len(shape))}]" if shape else ""
    place, inside = offsets(shape, 1)
    at = f"(place * {cut.numbers} + ({place})) * width + {pages}{index}"
    return at, f"({real}){index}" + (f" & {inside}" if inside else "")
