"""Records: what they accept, what they refuse and how, equality, and the round trip."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from sparrow.schema.base import FieldError, from_dict, problems, to_dict
from sparrow.schema.episode import Document, Group, Trajectory, Turn
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.surface import Surface

ROOT = Path(__file__).parents[2]


def trajectory(**changes: Any) -> Trajectory:
    """A prompt of two tokens, an answer of two, a tool's reply, a last token."""
    values: dict[str, Any] = {
        "prompt_id": "p",
        "ids": [5, 6, 7, 8, 9, 10],
        "loss_mask": [False, False, True, True, False, True],
        "rollout_logprob": [0, 0, -0.1, -2.5, 0, -1],
        "weight_version": [-1, -1, 3, 3, -1, 4],
        "policy_id": [-1, -1, 0, 0, -1, 0],
        "turns": (
            Turn(start=0, stop=2, role="user"),
            Turn(start=2, stop=4, role="assistant"),
            Turn(start=4, stop=5, role="tool"),
            Turn(start=5, stop=6, role="assistant"),
        ),
    }
    return Trajectory(**(values | changes))


def completion(**changes: Any) -> Completion:
    values: dict[str, Any] = {
        "prompt_ids": [1, 2, 3],
        "token_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "weight_versions": [0, 1],
        "finish_reason": "stop",
        "attention": "dense",
    }
    return Completion(**(values | changes))


def refused(*fields: str) -> "pytest.RaisesExc[ValidationError]":
    """Expects a ValidationError that names these fields, by their place or in its message."""

    def names_them(error: ValidationError) -> bool:
        text = problems(error)
        return all(field in text for field in fields)

    return pytest.raises(ValidationError, check=names_them)


def test_sampling_params() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert len({SamplingParams(), SamplingParams(), SamplingParams(n=2)}) == 2
    wrong: dict[str, tuple[Any, ...]] = {
        "n": (0, True, 1.0),
        "temperature": (-0.1, 1e-9, float("nan"), "hot"),
        "top_k": (-1,),
        "top_p": (0.0, 1.01),
        "max_tokens": (0,),
        "min_tokens": (-1, 1025),
        "stop_token_ids": ((3, -1), 3),
        "ignore_eos": (1,),
        "seed": (-1, 2**63),
    }
    for field, values in wrong.items():
        for value in values:
            with refused(field):
                SamplingParams(**{field: value})
    with refused("n: ", "top_p: "):
        SamplingParams(n=0, top_p=2.0)
    broken = FieldError("n", 0, "1")
    assert str(pickle.loads(pickle.dumps(broken))) == str(broken)


class TestArrays:
    def test_dtypes_take_fifteen_bytes_a_token(self) -> None:
        record = trajectory()
        arrays = [value for value in dict(record).values() if isinstance(value, np.ndarray)]
        names = [array.dtype.name for array in arrays]
        assert names == ["int32", "bool", "float32", "int32", "int16"]
        assert sum(array.nbytes for array in arrays) == 15 * len(record)

    def test_copied_read_only_and_frozen(self) -> None:
        ids = np.arange(6, dtype=np.int32)
        record = trajectory(ids=ids)
        ids[0] = 99
        assert record.ids[0] == 0
        with pytest.raises(ValueError, match="read-only"):
            record.ids[0] = 1
        with pytest.raises(ValidationError, match="frozen"):
            record.ids = ids
        for again in (record, copy.copy(record), copy.deepcopy(record)):
            duplicate = pickle.loads(pickle.dumps(again))
            assert duplicate == record
            assert not duplicate.ids.flags.writeable

    def test_lossy_conversions_are_refused(self) -> None:
        wrong: dict[str, tuple[Any, ...]] = {
            "ids": (
                *([*range(5), last] for last in (2**31, 2**70, 1.0, "1", True, None)),
                *([[1, 2, 3, 4, 5, 6]], [[1], [2, 3]], 5, None),
            ),
            "policy_id": ([-1, -1, 2**15, 0, -1, 0],),
            "loss_mask": ([0, 0, 1, 1, 0, 1], [float("nan")] * 6),
            "rollout_logprob": ([*[0] * 5, last] for last in (float("nan"), -1e300, 1j)),
        }
        for field, values in wrong.items():
            for value in values:
                with refused(field):
                    trajectory(**{field: value})


def test_equality_is_by_content() -> None:
    assert trajectory() != trajectory(ids=[5, 6, 7, 8, 9, 11])
    assert completion() != completion(entropies=[0, 0])
    empty: dict[str, Any] = {"token_ids": [], "logprobs": [], "weight_versions": []}
    assert completion(**empty) != completion(**empty, entropies=[])
    with pytest.raises(TypeError, match="unhashable"):
        hash(trajectory())


def test_completions() -> None:
    for field in ("token_ids", "logprobs", "weight_versions", "entropies"):
        with refused("equal lengths", field):
            completion(**{field: [0, 0, 0]})
    for field, value in {
        "prompt_ids": [-1],
        "token_ids": [4, -5],
        "logprobs": [0.5, 0],
        "weight_versions": [0, -1],
        "finish_reason": "tired",
        "error": "why",
        "attention": None,
    }.items():
        with refused(field):
            completion(**{field: value})
    with refused("error"):
        completion(finish_reason="error")


class TestTrajectory:
    def test_noise_above_zero_is_a_log_prob_and_not_every_token_is_learnt(self) -> None:
        trajectory(rollout_logprob=[0, 0, 1e-6, 0, 0, 0], loss_mask=[False] * 6)

    def test_turns_partition_the_tokens(self) -> None:
        whole = ([(0, 5)], [(0, 7)], [(1, 6)], [])
        for spans in (*whole, [(0, 2), (3, 6)], [(0, 3), (2, 6)], [(3, 6), (0, 3)]):
            turns = tuple(Turn(start=start, stop=stop, role="assistant") for start, stop in spans)
            with refused("turns"):
                trajectory(turns=turns)
        for start, stop in ((0, 0), (2, 1), (-1, 2)):
            with refused("start"):
                Turn(start=start, stop=stop, role="user")

    def test_refusals(self) -> None:
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("ids", {"ids": [1]}),
            ("ids", {"ids": [5, -6, 7, 8, 9, 10]}),
            ("loss_mask", {"loss_mask": [False, True, True, True, False, True]}),
            ("loss_mask", {"weight_version": [-1, -1, 3, -1, -1, 4]}),
            ("weight_version", {"weight_version": [-2, -1, 3, 3, -1, 4]}),
            ("rollout_logprob", {"rollout_logprob": [0, 0, 0.5, 0, 0, 0]}),
            ("rollout_logprob", {"rollout_logprob": [0, -1, 0, 0, 0, 0]}),
            ("policy_id", {"policy_id": [0, -1, 0, 0, -1, 0]}),
            ("policy_id", {"policy_id": [-1, -1, -1, 0, -1, 0]}),
            ("reward", {"reward": float("inf")}),
            ("reward", {"reward": "1"}),
            ("turns", {"turns": ({"start": 0},)}),
        ]
        for field, changes in wrong:
            with refused(field):
                trajectory(**changes)


def test_groups_and_what_dictionaries_lack() -> None:
    for prompt, trajectories in (("q", (trajectory(),)), ("p", ())):
        with refused("trajectories"):
            Group(prompt_id=prompt, trajectories=trajectories)
    for field, value in {"extra": 1, "ids": "123456", "prompt_id": 3}.items():
        with pytest.raises(ValueError, match=field):
            from_dict(Trajectory, to_dict(trajectory()) | {field: value})
    data = to_dict(SamplingParams())
    del data["seed"]  # defaults must be there too
    with pytest.raises(ValueError, match="seed"):
        from_dict(SamplingParams, data)


def test_a_document_has_a_prompt_and_something_to_learn() -> None:
    for prompt in (1, 2, 3):
        assert len(Document(ids=[4, 5, 6, 7], prompt=prompt)) == 4
    for ids, prompt in (([4, 5], 0), ([4, 5], 2), ([4, 5], -1), ([], 1), ([3], 1)):
        with refused("prompt"):
            Document(ids=ids, prompt=prompt)


def test_numbers_of_a_surface_have_bounds() -> None:
    surface = Surface.load(ROOT / "bench/2026-11-15-calibrate-tiny-arm.json")
    variant = surface.variants[0]
    for field, value in {
        "lengths": (2**62,),
        "prompt_tokens": -1,
        "cells": (surface.cells[0].model_dump() | {"budget": 2**40},),
        "variants": (variant.model_dump() | {"shares": (-1.0,)},),
    }.items():
        with refused(field):
            surface.replace(**{field: value})
