"""A program over a page cache, by its definition: any device, no graphs.

Legend of the dimension letters: sparrow/ops/types.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparrow import ops
from sparrow.sparse.flows import interpret
from sparrow.sparse.flows.flow import Program
from sparrow.sparse.flows.interpret import Scene


def summarise(program: Program, cache: ops.PageCache, layer: int, slots_T: Tensor) -> None:
    """Fill the fields of every page that one of these slots finishes."""
    page = cache.page
    finished = slots_T[(slots_T >= 0) & (slots_T % page == page - 1)] // page
    if not program.fields or not len(finished):
        return
    pools = (cache.field(name, layer) for name in ("k", "v"))
    blocks = interpret.summarise(program, *(pool[finished] for pool in pools), layer=layer)
    for name, block in blocks.items():
        _as_bytes(cache.field(name, layer))[finished] = _as_bytes(block)


def score(
    program: Program,
    cache: ops.PageCache,
    layer: int,
    q_BHD: Tensor,
    table_BM: Tensor,
    scene: Scene,
    rows_B: Tensor | None = None,
) -> Tensor:
    """Scores of every page of every row, fp32 [B, G, M]; state of the rows moves on."""
    exists_BM = (
        torch.arange(table_BM.shape[1], device=table_BM.device)
        < (scene.lengths // cache.page)[:, None]
    )
    place_BM = torch.where(exists_BM, table_BM, 0).long()
    names = [name for item in program.fields for name, *_ in item.storage(q_BHD.dtype)]
    fields = {name: cache.field(name, layer) for name in names}
    blocks = {name: _as_bytes(f)[place_BM].view(f.dtype) for name, f in fields.items()}
    state = _state(program, cache, layer, rows_B, table_BM.shape[1])
    score_BGM, fresh = interpret.score(
        program, q_BHD, blocks, scene, state, pages=table_BM.shape[1]
    )
    for name, value in fresh.items():
        assert rows_B is not None
        real = scene.lengths > 0
        cache.state(name, layer)[rows_B[real], :, : table_BM.shape[1]] = value[real]
    return score_BGM


def _as_bytes(tensor: Tensor) -> Tensor:
    """8-bit numbers as what any device can index: torch cannot do that with fp8 everywhere."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _state(
    program: Program, cache: ops.PageCache, layer: int, rows_B: Tensor | None, pages: int
) -> dict[str, Tensor]:
    if program.state and rows_B is None:
        raise ValueError(f"{program.name} has state: its rows must be named")
    return {name: cache.state(name, layer)[rows_B][:, :, :pages] for name, _ in program.state}


def sequence_scores(
    program: Program,
    q_SHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    *,
    dense: int,
    layer: int,
    first: int,
    last: int,
) -> ops.Scores:
    """Scores for the queries of a whole sequence: a function of a range of them.

    What decoding would have scored when each was the newest token: [n, G, M] for the pages
    that are finished at the end of the range. The first `dense` tokens are a prompt.
    """
    page, whole = program.page, len(k_SGD) // program.page
    pages = (x[: whole * page].unflatten(0, (whole, page)).transpose(1, 2) for x in (k_SGD, v_SGD))
    blocks = interpret.summarise(program, *pages, layer=layer)
    lengths_S = torch.arange(1, len(q_SHD) + 1, device=q_SHD.device)

    def scores(start: int, stop: int, state: dict[str, Tensor] | None = None) -> tuple:
        seen = {name: block[: stop // page] for name, block in blocks.items()}
        scene = Scene(lengths=lengths_S[start:stop], layer=layer, first=first, last=last)
        if not stop // page:
            kv_heads = q_SHD.shape[1] // program.group
            return q_SHD.new_empty((stop - start, kv_heads, 0), dtype=torch.float32), state
        return interpret.score(program, q_SHD[start:stop], seen, scene, state, pages=stop // page)

    if not program.state:
        return lambda start, stop: scores(start, stop)[0]
    return _remembered(program, scores, len(q_SHD), whole, k_SGD.shape[1], dense, q_SHD.device)


def _remembered(
    program: Program,
    scores: Callable[..., tuple],
    length: int,
    whole: int,
    kv_heads: int,
    dense: int,
    device: torch.device,
) -> ops.Scores:
    """All scores of a flow with state, token after token: later calls only look them up."""
    shape = (length, kv_heads, whole)
    every_SGM = torch.full(shape, float("-inf"), device=device)
    state = {
        name: torch.full((1, *shape[1:]), start, device=device) for name, start in program.state
    }
    for token in range(dense, length):
        pages = (token + 1) // program.page
        seen = {name: value[:, :, :pages] for name, value in state.items()}
        if pages:
            every_SGM[token : token + 1, :, :pages], fresh = scores(token, token + 1, seen)
            for name, value in fresh.items():
                state[name][:, :, :pages] = value
    return lambda start, stop: every_SGM[start:stop, :, : stop // program.page]
