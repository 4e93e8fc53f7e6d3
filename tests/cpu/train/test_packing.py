"""Packs: where documents begin and end, positions, and which token each place predicts."""

import pytest
import torch

from sparrow.schema.episode import Document
from sparrow.train.packing import pack

FIRST = Document(ids=[10, 11, 12, 13, 14], prompt=2)
SECOND = Document(ids=[20, 21], prompt=1)
THIRD = Document(ids=[30, 31, 32, 33], prompt=3)


def test_three_documents_by_hand() -> None:
    packed = pack([FIRST, SECOND, THIRD])
    assert packed.ids_T.tolist() == [10, 11, 12, 13, 14, 20, 21, 30, 31, 32, 33]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3]
    assert packed.bounds.tolist() == [0, 5, 7, 11]
    assert packed.longest == 5
    assert packed.sources_R.tolist() == [1, 2, 3, 5, 9]
    assert packed.targets_R.tolist() == [12, 13, 14, 21, 33]
    # The flash kernel wants int32 bounds, indexing wants int64.
    assert packed.bounds.dtype == torch.int32
    indices = (packed.ids_T, packed.positions_T, packed.sources_R, packed.targets_R)
    assert {tensor.dtype for tensor in indices} == {torch.int64}


def test_refuses_no_documents() -> None:
    with pytest.raises(ValueError, match="pack: no documents"):
        pack([])
