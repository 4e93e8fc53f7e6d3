"""Records survive JSON exactly, whatever they hold."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from sparrow.schema.base import Record, from_dict, to_dict
from sparrow.schema.episode import NOT_SAMPLED, Group, Role, Trajectory, Turn
from sparrow.schema.sampling import Completion, FinishReason

token_ids = st.integers(0, 2**31 - 1)
versions = st.integers(0, 2**31 - 1)
logprobs = st.floats(-(2.0**100), 0, width=32)
entropies = st.floats(0, 2.0**5, width=32)
policy_ids = st.integers(0, 2**15 - 1)
rewards = st.floats(-1e6, 1e6)
roles: st.SearchStrategy[Role] = st.sampled_from(["system", "user", "assistant", "tool"])


def columns(draw: st.DrawFn, *values: st.SearchStrategy[Any], count: int) -> list[Any]:
    """`count` rows of these values, as columns."""
    rows = draw(st.lists(st.tuples(*values), min_size=count, max_size=count))
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in values]


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    count = draw(st.integers(0, 5))
    ids, scores, stamps, spreads = columns(
        draw, token_ids, logprobs, versions, entropies, count=count
    )
    reason: FinishReason = draw(st.sampled_from(["stop", "length", "abort", "error"]))
    return Completion(
        prompt_ids=draw(st.lists(token_ids, max_size=5)),
        token_ids=ids,
        logprobs=scores,
        weight_versions=stamps,
        finish_reason=reason,
        attention=draw(st.text()),
        entropies=draw(st.sampled_from([None, spreads])),
        text=draw(st.none() | st.text()),
        error=draw(st.text()) if reason == "error" else None,
    )


@st.composite
def trajectories(draw: st.DrawFn, prompt_id: str = "p") -> Trajectory:
    stops = sorted(draw(st.sets(st.integers(1, 12), max_size=4)))
    turns = tuple(
        Turn(start=start, stop=stop, role=draw(roles)) for start, stop in pairwise([0, *stops])
    )
    count = max(stops, default=0)
    assistant = [turn.role == "assistant" for turn in turns for _ in range(turn.start, turn.stop)]
    ids, scores, stamps, policies, masked, sampled = columns(
        draw, token_ids, logprobs, versions, policy_ids, st.booleans(), st.booleans(), count=count
    )
    return Trajectory(
        prompt_id=prompt_id,
        ids=ids,
        loss_mask=np.array([assistant, masked, sampled], dtype=bool).all(axis=0),
        rollout_logprob=np.where(sampled, scores, 0.0),
        weight_version=np.where(sampled, stamps, NOT_SAMPLED),
        policy_id=np.where(sampled, policies, NOT_SAMPLED),
        turns=turns,
        reward=draw(rewards),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    prompt_id = draw(st.text())
    members = draw(st.lists(trajectories(prompt_id=prompt_id), min_size=1, max_size=4))
    return Group(prompt_id=prompt_id, trajectories=tuple(members))


@given(completions() | trajectories() | groups())
def test_round_trip_through_json_is_exact(record: Record) -> None:
    back = from_dict(type(record), json.loads(json.dumps(to_dict(record), allow_nan=False)))
    assert back == record
    assert to_dict(back) == to_dict(record)
