"""A document: what it accepts and refuses, its length, the round trip."""

import json
import pickle
import re
from typing import Any

import numpy as np
import pytest

from sparrow.records import Document, from_dict, to_dict


def document(**changes: Any) -> Document:
    return Document(**({"ids": [4, 5, 6, 7], "prompt": 2} | changes))


def refused(start: str) -> "pytest.RaisesExc[ValueError]":
    return pytest.raises(ValueError, match="^" + re.escape(start))


@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_a_prompt_and_something_to_learn(prompt: int) -> None:
    assert document(prompt=prompt).prompt == prompt
    assert len(document(prompt=prompt)) == 4


@pytest.mark.parametrize("prompt", [-1, 0, 4, 5])
def test_refuses_a_prompt_of_nothing_or_of_everything(prompt: int) -> None:
    message = f"Document.prompt: got {prompt} of 4 tokens, allowed: at least 1, and fewer than all"
    with refused(message):
        document(prompt=prompt)


@pytest.mark.parametrize("ids", [[], [3]])
def test_refuses_too_few_tokens(ids: list[int]) -> None:
    with refused(f"Document.prompt: got 1 of {len(ids)} tokens"):
        document(ids=ids, prompt=1)


@pytest.mark.parametrize("ids", [[1.5, 2.5, 3.5], [[1, 2], [3, 4]], [True, False], [2**31, 1, 2]])
def test_refuses_what_are_no_token_ids(ids: list[Any]) -> None:
    with refused("Document.ids: got "):
        document(ids=ids, prompt=1)


def test_ids_are_a_read_only_copy() -> None:
    ids = np.array([4, 5, 6], dtype=np.int64)
    one = document(ids=ids)
    ids[0] = 9
    assert one.ids.dtype == np.int32
    assert one.ids.tolist() == [4, 5, 6]
    with pytest.raises(ValueError, match="read-only"):
        one.ids[0] = 9


def test_equal_by_content() -> None:
    assert document() == document(ids=np.array([4, 5, 6, 7]))
    assert document() != document(prompt=1)
    assert document() != document(ids=[4, 5, 6, 8])


def test_round_trips() -> None:
    """Documents travel between processes, so they are pickled."""
    assert from_dict(Document, json.loads(json.dumps(to_dict(document())))) == document()
    assert pickle.loads(pickle.dumps(document())) == document()
