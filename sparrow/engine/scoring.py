"""Log-probs of the tokens of a given sequence, by one dense pass."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sparrow import ops
from sparrow.models import Decoder
from sparrow.models.attention import Packed
from sparrow.ops.reference.logprob import chunk_tokens, chunks


class TokenLogprobs(NamedTuple):
    """Of tokens 1 on: log-prob of each, and the most likely ones with theirs, [T - 1, K]."""

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@torch.no_grad()
def score_tokens(model: Decoder, ids: Sequence[int], top: int = 0) -> TokenLogprobs:
    """Score the tokens of a sequence under the dense model, at temperature 1."""
    ids_T = torch.tensor(ids, device=model.device)
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32, device=model.device)
    positions_T = torch.arange(len(ids), device=model.device)
    hidden_TC = model(ids_T, positions_T, Packed(bounds=bounds))[:-1]
    logprobs, top_ids, top_logprobs = [], [], []
    for part in chunks(len(hidden_TC), chunk_tokens(model.spec.vocabulary)):
        logp_nV = ops.logits(hidden_TC[part], model.head).log_softmax(1)
        logprobs.append(logp_nV.gather(1, ids_T[1:][part, None]).squeeze(1))
        values, places = logp_nV.topk(min(top, logp_nV.shape[1]), dim=1)
        top_ids.append(places.int())
        top_logprobs.append(values)
    if not logprobs:  # a sequence of one token
        shape = (0, top)
        return TokenLogprobs(
            np.zeros(0, np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        )
    parts = (torch.cat(part).cpu().numpy() for part in (logprobs, top_ids, top_logprobs))
    return TokenLogprobs(*parts)
