"""Documents side by side in one row of tokens, without padding and without seeing each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sparrow.records import Document


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """T tokens of several documents, and the places R that predict a token which is learnt."""

    ids_T: Tensor
    positions_T: Tensor
    bounds: Tensor  # where documents begin and end, int32 [B + 1]
    longest: int
    sources_R: Tensor  # places whose next token is learnt
    targets_R: Tensor  # that token

    def to(self, device: torch.device) -> "Pack":
        """The same on a device, without waiting for it."""

        def move(tensor: Tensor) -> Tensor:
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        return Pack(
            ids_T=move(self.ids_T),
            positions_T=move(self.positions_T),
            bounds=move(self.bounds),
            longest=self.longest,
            sources_R=move(self.sources_R),
            targets_R=move(self.targets_R),
        )


def pack(documents: Sequence[Document]) -> Pack:
    """All documents in one pack, in their order."""
    if not documents:
        raise ValueError("pack: no documents")
    lengths = [len(document) for document in documents]
    bounds = [0, *accumulate(lengths)]
    ids = np.concatenate([document.ids for document in documents])
    positions = np.concatenate([np.arange(length) for length in lengths])
    sources = np.concatenate(
        [
            np.arange(start + document.prompt - 1, start + len(document) - 1)
            for start, document in zip(bounds, documents, strict=False)
        ]
    )
    return Pack(
        ids_T=torch.from_numpy(ids.astype(np.int64)),
        positions_T=torch.from_numpy(positions),
        bounds=torch.tensor(bounds, dtype=torch.int32),
        longest=max(lengths),
        sources_R=torch.from_numpy(sources),
        targets_R=torch.from_numpy(ids[sources + 1].astype(np.int64)),
    )
