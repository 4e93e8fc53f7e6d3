"""Documents side by side in one row of tokens, without padding and without seeing each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sparrow.schema.base import BoolArray, Int32Array
from sparrow.schema.episode import Document, TrainSample


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
    """All documents in one pack, in their order; everything behind a prompt is learnt."""
    learnt = [np.arange(len(one)) >= one.prompt for one in documents]
    return _packed([document.ids for document in documents], learnt)


def pack_samples(samples: Sequence[TrainSample]) -> Pack:
    """All samples in one pack, in their order; what is in their loss is learnt."""
    return _packed([sample.ids for sample in samples], [sample.loss_mask for sample in samples])


def _packed(ids: Sequence[Int32Array], learnt: Sequence[BoolArray]) -> Pack:
    if not ids:
        raise ValueError("pack: no documents")
    lengths = [len(one) for one in ids]
    joined = np.concatenate(ids).astype(np.int64)
    sources = np.flatnonzero(np.concatenate(learnt)) - 1
    return Pack(
        ids_T=torch.from_numpy(joined),
        positions_T=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        bounds=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        longest=max(lengths),
        sources_R=torch.from_numpy(sources),
        targets_R=torch.from_numpy(joined[sources + 1]),
    )
