"""The interpreter of flows, which defines them: every operation as plain torch.

A value is [n, G, M, *shape] in float32: n queries, G KV heads, M pages, with 1 where it does not
depend on one of them. What a query may see is its own number of finished pages. At the end: the
same over a page cache, and over whole sequences; any device, no graphs.
Legend of the dimension letters: sparrow/ops/types.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.ops.reference.pages import page_counts, rank_pages
from sparrow.ops.types import bits
from sparrow.sparse.flows.flow import Program, check_weights
from sparrow.sparse.flows.tensor import SHARE_PARTS, Node, in_order

LEAD = 3  # axes before the inner ones: queries, KV heads, pages

# Names of operations entry by entry are those of torch's functions, but for one.
ELEMENTWISE = {
    *("neg", "abs", "exp", "log", "sqrt", "relu", "sigmoid", "silu"),
    *("add", "sub", "mul", "div", "maximum", "minimum", "gt", "ge", "lt", "le", "where"),
}
REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
NOTHING = {"sum": 0.0, "max": -math.inf, "min": math.inf}  # what a page that is not there adds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreContext:
    """Inputs of a score beside its query and fields: lengths, layer, reserved pages.

    lengths  [n], the current token included; layer: for weights that differ by layer
    budgets  tokens kept, [n] or [n, G]; only `among_best` needs them
    first, last: reserved pages; pages beyond `lengths // page` do not exist for a query
    """

    lengths: Tensor
    budgets: Tensor | None = None
    layer: int = 0
    first: int = 1
    last: int = 2


def summarise(
    program: Program, k_MGPD: Tensor, v_MGPD: Tensor, *, layer: int = 0
) -> dict[str, Tensor]:
    """The blocks of every field for M pages, by name, each [M, G, ...]."""
    check_weights(program, layers=layer + 1, kv_heads=k_MGPD.shape[1])
    pages = {"keys": k_MGPD, "values": v_MGPD}
    page_inputs = {name: x.float().transpose(0, 1).unsqueeze(0) for name, x in pages.items()}

    def read(node: Node) -> Tensor:
        if node.op in page_inputs:
            return page_inputs[node.op]
        return _constant(node, layer).to(k_MGPD.device)

    values = _evaluate(program.summary, read, {})
    blocks: dict[str, Tensor] = {}
    for field, node in zip(program.fields, program.summary, strict=True):
        lead = (1, k_MGPD.shape[1], k_MGPD.shape[0])
        value = values[id(node)].expand(*lead, *field.shape)[0].transpose(0, 1)
        blocks |= field.encode(value, k_MGPD.dtype)
    return blocks


def score(
    program: Program,
    q_nHD: Tensor,
    blocks: Mapping[str, Tensor],
    scene: ScoreContext,
    state: Mapping[str, Tensor] | None = None,
    *,
    pages: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores of M pages for n queries, fp32 [n, G, M], and the new state by name, alike.

    pages    M
    blocks   [M, G, ...] where the queries share their pages, or [n, M, G, ...] for one's own
    state    [n, G, M] by name. A page that does not exist for a query scores -inf and keeps its
             state
    """
    assert program.score is not None, f"{program.name} has no score: it keeps every page"
    kv_heads = q_nHD.shape[1] // program.group
    check_weights(program, layers=scene.layer + 1, kv_heads=kv_heads)
    if not pages:
        return q_nHD.new_empty((len(q_nHD), kv_heads, 0), dtype=torch.float32), {}
    state = state or {}
    exists_nM = _visible(program, scene, torch.arange(pages, device=q_nHD.device))
    read = _reader(program, q_nHD, blocks, scene, state, pages)
    choosable_nG = _choosable(program, scene) if program.budgeted else None
    values = _evaluate((program.score, *program.updates), read, exists_nM, choosable_nG)
    shape = (len(q_nHD), kv_heads, pages)
    missing = ~exists_nM["finished"][:, None]
    score_nGM = values[id(program.score)].expand(shape).masked_fill(missing, -math.inf)
    fresh = {
        name: torch.where(missing, state[name], values[id(node)].expand(shape))
        for (name, _), node in zip(program.state, program.updates, strict=True)
    }
    return score_nGM, fresh


def _visible(program: Program, scene: ScoreContext, index_M: Tensor) -> dict[str, Tensor]:
    """Which pages are finished for each query, and which of them are free to be chosen, [n, M]."""
    lengths_n1 = scene.lengths.to(index_M.device)[:, None]
    finished_nM = index_M < lengths_n1 // program.page
    last_nM = index_M >= -(-lengths_n1 // program.page) - scene.last
    return {"finished": finished_nM, "free": finished_nM & (index_M >= scene.first) & ~last_nM}


def _choosable(program: Program, scene: ScoreContext) -> Tensor:
    """How many free pages each query keeps, [n, G] or [n, 1]."""
    assert scene.budgets is not None, f"{program.name} scores by budgets, and there are none"
    lengths_n, reserved = scene.lengths.long(), scene.first + scene.last
    budgets = scene.budgets.to(lengths_n)
    _, reserved_n1, kept_nG = page_counts(lengths_n, budgets, page=program.page, reserved=reserved)
    return kept_nG - reserved_n1


def _reader(
    program: Program,
    q_nHD: Tensor,
    blocks: Mapping[str, Tensor],
    scene: ScoreContext,
    state: Mapping[str, Tensor],
    pages: int,
) -> Callable[[Node], Tensor]:
    """The inputs of a score, laid out as values."""
    fields = {field.name: field for field in program.fields}
    lengths_n11 = scene.lengths.to(q_nHD.device)[:, None, None]
    score_inputs = {
        "query": q_nHD.float().unflatten(1, (-1, program.group)).unsqueeze(2),
        "length": lengths_n11.float(),
        "pages": (lengths_n11 // program.page).float(),
        "page": torch.arange(pages, device=q_nHD.device)[None, None].float(),
    }

    def read(node: Node) -> Tensor:
        if node.op == "state":
            return state[node.given[0]]
        if node.op != "field":
            value_ = score_inputs.get(node.op)
            return _constant(node, scene.layer).to(q_nHD.device) if value_ is None else value_
        field = fields[node.given[0]]
        value = field.decode(blocks)
        by_query = value.ndim - len(field.shape) == LEAD
        return value.transpose(1, 2) if by_query else value.transpose(0, 1).unsqueeze(0)

    return read


def _constant(node: Node, layer: int) -> Tensor:
    """The numbers of a constant as a value, those of a layer where they differ by layer."""
    if node.op == "full":
        return torch.full((1,) * LEAD + node.shape, node.given[0])
    data, kind, *lead = node.given
    array = torch.from_numpy(np.frombuffer(data, np.float32).copy())
    if kind == "shared":
        return array.view(1, 1, 1, *node.shape)
    return array.view(*lead[0], *node.shape)[layer][None, :, None]


# Operations.


def _evaluate(
    roots: tuple[Node, ...],
    read: Callable[[Node], Tensor],
    exists_nM: Mapping[str, Tensor],
    choosable_nG: Tensor | None = None,
) -> dict[int, Tensor]:
    values: dict[int, Tensor] = {}
    for node in in_order(roots):
        inputs = [values[id(operand)] for operand in node.inputs]
        if not inputs:
            values[id(node)] = read(node)
        elif node.op.startswith("pages_"):
            values[id(node)] = _over_pages(node, inputs[0], exists_nM[node.given[0]])
        elif node.op == "convolve":
            values[id(node)] = _convolve(node, inputs[0], exists_nM["finished"])
        elif node.op == "best":
            assert choosable_nG is not None
            values[id(node)] = _among_best(node, inputs[0], exists_nM["free"], choosable_nG)
        else:
            values[id(node)] = _apply(node, inputs)
    return values


def _apply(node: Node, inputs: list[Tensor]) -> Tensor:
    if node.op in ELEMENTWISE:
        functions = torch.nn.functional if node.op == "silu" else torch
        return getattr(functions, node.op)(*(_aligned(x, len(node.shape)) for x in inputs))
    if node.op in REDUCE:
        return REDUCE[node.op](inputs[0], dim=LEAD + node.given[0])
    match node.op:
        case "matmul":
            return _matmul(node, *inputs)
        case "transpose":
            return inputs[0].transpose(-1, -2)
        case "reshape":
            return inputs[0].reshape(*inputs[0].shape[:LEAD], *node.shape)
        case "take":
            axis, indices = node.given
            index = torch.tensor(indices, device=inputs[0].device)
            return inputs[0].index_select(LEAD + axis, index)
    raise AssertionError(f"unknown operation {node.op}")


def _aligned(x: Tensor, rank: int) -> Tensor:
    """Inner axes aligned at their ends: missing ones come after the leading axes."""
    missing = rank - (x.ndim - LEAD)
    return x.reshape(*x.shape[:LEAD], *(1,) * missing, *x.shape[LEAD:])


def _matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """One contraction over all leading axes that an operand really has: no copies of the others."""
    letters_a = "rk" if a.ndim - LEAD == 2 else "k"
    letters_b = "ks" if b.ndim - LEAD == 2 else "k"
    out = letters_a[:-1] + letters_b[1:]
    lead_a, small_a = _present(a)
    lead_b, small_b = _present(b)
    lead = [letter for letter in "ngm" if letter in lead_a + lead_b]
    result = torch.einsum(
        f"{lead_a}{letters_a},{lead_b}{letters_b}->{''.join(lead)}{out}", small_a, small_b
    )
    shape = [result.shape[lead.index(letter)] if letter in lead else 1 for letter in "ngm"]
    return result.reshape(*shape, *node.shape)


def _present(x: Tensor) -> tuple[str, Tensor]:
    """The letters of the leading axes that are not 1, and the tensor without the others."""
    letters = "".join(letter for letter, size in zip("ngm", x.shape, strict=False) if size != 1)
    return letters, x.reshape(*(size for size in x.shape[:LEAD] if size != 1), *x.shape[LEAD:])


def _over_pages(node: Node, x: Tensor, exists_nM: Tensor) -> Tensor:
    op = node.op.removeprefix("pages_")
    filled = torch.where(_beside(exists_nM, node), x, NOTHING[op])
    return REDUCE[op](filled, dim=2, keepdim=True)


def _beside(exists_nM: Tensor, node: Node) -> Tensor:
    n, pages = exists_nM.shape
    return exists_nM.view(n, 1, pages, *(1,) * len(node.shape))


def _convolve(node: Node, x: Tensor, exists_nM: Tensor) -> Tensor:
    taps, filled = node.given[0], torch.where(_beside(exists_nM, node), x, 0.0)
    pages, middle = filled.shape[2], len(taps) // 2
    total = torch.zeros_like(filled)
    for j, tap in enumerate(taps):
        shift = j - middle
        start, stop = max(0, -shift), min(pages, pages - shift)
        if start < stop:
            total[:, :, start:stop] += tap * filled[:, :, start + shift : stop + shift]
    return total


def _among_best(node: Node, x: Tensor, free_nM: Tensor, choosable_nG: Tensor) -> Tensor:
    n, kv_heads = len(free_nM), max(x.shape[1], choosable_nG.shape[1])
    x_nGM = x.expand(n, kv_heads, free_nM.shape[1])
    order_nGM = rank_pages(x_nGM, torch.zeros_like(free_nM), free_nM)
    index_M = torch.arange(free_nM.shape[1], device=x.device)
    rank_nGM = torch.empty_like(order_nGM).scatter_(2, order_nGM, index_M.expand_as(order_nGM))
    count_nG = -(-choosable_nG * node.given[0] // SHARE_PARTS)
    return (rank_nGM < count_nG[:, :, None]) & free_nM[:, None]


# Over a page cache, and over whole sequences.


def summarise_slots(program: Program, cache: ops.PageCache, layer: int, slots_T: Tensor) -> None:
    """Fill the fields of every page that one of these slots finishes."""
    page = cache.page
    finished = slots_T[(slots_T >= 0) & (slots_T % page == page - 1)] // page
    if not program.fields or not len(finished):
        return
    pools = (cache.field(name, layer) for name in ("k", "v"))
    blocks = summarise(program, *(pool[finished] for pool in pools), layer=layer)
    for name, block in blocks.items():
        bits(cache.field(name, layer))[finished] = bits(block)


def score_cache(
    program: Program,
    cache: ops.PageCache,
    q_BHD: Tensor,
    table_BM: Tensor,
    scene: ScoreContext,
    rows_B: Tensor | None = None,
) -> Tensor:
    """Scores of every page of every row, fp32 [B, G, M]; state of the rows moves on."""
    if program.state and rows_B is None:
        raise ValueError(f"{program.name} has state: its rows must be named")
    layer, pages = scene.layer, table_BM.shape[1]
    finished_B1 = (scene.lengths // cache.page)[:, None]
    exists_BM = torch.arange(pages, device=table_BM.device) < finished_B1
    place_BM = torch.where(exists_BM, table_BM, 0).long()
    fields = {name: cache.field(name, layer) for name in program.blocks(q_BHD.dtype)}
    blocks = {name: bits(f)[place_BM].view(f.dtype) for name, f in fields.items()}
    state = {name: cache.state(name, layer)[rows_B][:, :, :pages] for name, _ in program.state}
    score_BGM, fresh = score(program, q_BHD, blocks, scene, state, pages=pages)
    for name, value in fresh.items():
        assert rows_B is not None
        real = scene.lengths > 0
        cache.state(name, layer)[rows_B[real], :, :pages] = value[real]
    return score_BGM


def score_sequence(
    program: Program,
    q_SHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    scene: ScoreContext,
    *,
    dense: int,
) -> ops.Scores:
    """Scores for the queries of a whole sequence: a function of a range of them.

    What decoding would have scored when each was the newest token: [n, G, M] for the pages
    that are finished at the end of the range. The first `dense` tokens are a prompt. A flow with
    state is scored token after token, once: calls only look scores up.
    """
    page, whole, kv_heads = program.page, len(k_SGD) // program.page, k_SGD.shape[1]
    pages = (x[: whole * page].unflatten(0, (whole, page)).transpose(1, 2) for x in (k_SGD, v_SGD))
    blocks = summarise(program, *pages, layer=scene.layer)

    def scores(start: int, stop: int, state: dict[str, Tensor] | None = None) -> tuple:
        seen = {name: block[: stop // page] for name, block in blocks.items()}
        budgets = None if scene.budgets is None else scene.budgets[start:stop]
        part = replace(scene, lengths=scene.lengths[start:stop], budgets=budgets)
        return score(program, q_SHD[start:stop], seen, part, state, pages=stop // page)

    if not program.state:
        return lambda start, stop: scores(start, stop)[0]
    every_SGM = torch.full((len(q_SHD), kv_heads, whole), -math.inf, device=q_SHD.device)
    state = {name: torch.full_like(every_SGM[:1], start) for name, start in program.state}
    for token in range(dense, len(q_SHD)):
        finished = (token + 1) // page
        seen = {name: value[:, :, :finished] for name, value in state.items()}
        every_SGM[token : token + 1, :, :finished], fresh = scores(token, token + 1, seen)
        for name, value in fresh.items():
            state[name][:, :, :finished] = value
    return lambda start, stop: every_SGM[start:stop, :, : stop // page]
