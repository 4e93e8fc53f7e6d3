"""Forced mode: given sequences, seen densely and as sparse decoding would have seen them.

Nothing is sampled. Tokens before the start are a prompt; from there on keys and values are written
by the sparse stream, and every position counts.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sparrow import ops
from sparrow.calibrate.arms import Arm
from sparrow.calibrate.replay import Dense, read, sparse_hidden
from sparrow.calibrate.rollouts import TOP_K, Prompt, measured
from sparrow.calibrate.trajectories import Measured
from sparrow.engine.pool import PAGE
from sparrow.models import Decoder
from sparrow.models.attention import PagedPrefill

CHUNK = 512  # tokens of a dense pass through the page cache


def force(
    model: Decoder, prompt: Prompt, arms: Sequence[Arm], temperature: float = 1.0
) -> Iterator[tuple[Arm, Measured]]:
    """One sequence under every arm; the dense policy reads it once."""
    start = 1 if prompt.start is None else prompt.start
    if not 1 <= start <= len(prompt.ids) - 2:
        raise ValueError(
            f"{prompt.name}: got {len(prompt.ids)} tokens and a start of {start}, allowed: a start "
            "of 1 at least and two tokens after it"
        )
    dense = read(model, prompt.ids)
    for arm in arms:
        yield arm, _compare(model, dense, prompt, start, arm, temperature)


@torch.no_grad()
def _compare(
    model: Decoder, dense: Dense, prompt: Prompt, start: int, arm: Arm, temperature: float
) -> Measured:
    if arm.schedule is None:
        actor_TC = through_cache(model, dense.ids_T)
    else:
        actor_TC = sparse_hidden(model, dense, start, arm.schedule, arm.flow)
    found = ops.compare(
        dense.hidden_TC[start:-1],
        actor_TC[start:-1],
        model.head,
        dense.ids_T[start + 1 :],
        temperature=temperature,
        top_k=min(TOP_K, model.spec.vocabulary),
    )
    ids = np.asarray(prompt.ids)
    return measured(found, ids, number=prompt.number, sample=0, prompt=start, drawn=False)


@torch.no_grad()
def through_cache(model: Decoder, ids_T: Tensor) -> Tensor:
    """A dense pass as the engine makes it: in chunks, over pages. What rounding alone changes."""
    spec, device = model.spec, model.device
    pages = -(-len(ids_T) // PAGE)
    cache = ops.PageCache(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        page=PAGE,
        pages=pages,
        page_fields=ops.kv_fields(PAGE, spec.head_size, model.dtype),
        device=device,
    )
    parts = []
    for begin in range(0, len(ids_T), CHUNK):
        place_T = torch.arange(begin, min(begin + CHUNK, len(ids_T)), device=device)
        attention = PagedPrefill(
            cache=cache,
            table_BM=torch.arange(pages, device=device)[None],
            lengths_B=place_T[-1:] + 1,
            bounds=torch.tensor([0, len(place_T)], device=device),
            slots_T=place_T,
        )
        parts.append(model(ids_T[place_T], place_T, attention))
    return torch.cat(parts)
