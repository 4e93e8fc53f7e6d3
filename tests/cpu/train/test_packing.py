"""Packs: where documents begin and end, positions, and which token each place predicts."""

from itertools import pairwise

import numpy as np
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


def test_no_place_predicts_across_documents() -> None:
    """Of random documents: a source and its target lie in one document, behind its prompt."""
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(20):
        length = int(rng.integers(2, 30))
        prompt = int(rng.integers(1, length))
        documents.append(Document(ids=rng.integers(512, size=length), prompt=prompt))
    packed = pack(documents)
    learnt = [token for document in documents for token in document.ids[document.prompt :].tolist()]
    assert packed.targets_R.tolist() == learnt
    assert torch.equal(packed.ids_T[packed.sources_R + 1], packed.targets_R)
    spans = list(pairwise(packed.bounds.tolist()))
    for (start, stop), document in zip(spans, documents, strict=True):
        assert packed.ids_T[start:stop].tolist() == document.ids.tolist()
        inside = (packed.sources_R >= start) & (packed.sources_R < stop)
        wanted = list(range(start + document.prompt - 1, stop - 1))
        assert packed.sources_R[inside].tolist() == wanted


def test_refuses_no_documents() -> None:
    with pytest.raises(ValueError, match="pack: no documents"):
        pack([])
