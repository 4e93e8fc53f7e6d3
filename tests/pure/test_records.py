"""Records: what they accept, what they refuse and how, equality, and the round trip."""

import copy
import json
import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from sparrow.records import (
    Completion,
    FieldError,
    Group,
    GroupStats,
    Record,
    SamplingParams,
    Trajectory,
    Turn,
    from_dict,
    to_dict,
)


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


def refused(start: str) -> "pytest.RaisesExc[ValueError]":
    """Expects a ValueError whose message starts like this."""
    return pytest.raises(ValueError, match="^" + re.escape(start))


def group(*rewards: float | None) -> Group:
    trajectories = tuple(trajectory(reward=reward) for reward in rewards)
    return Group(prompt_id="p", trajectories=trajectories)


SAMPLES = [
    SamplingParams(),
    SamplingParams(n=4, temperature=0.5, top_k=3, stop_token_ids=(1, 2), seed=7),
    completion(),
    completion(entropies=[0.5, 0.25], text="né", finish_reason="error", error="out of pages"),
    completion(token_ids=[], logprobs=[], weight_versions=[], finish_reason="abort"),
    Turn(start=0, stop=2, role="user"),
    GroupStats(mean=0.5, std=0.1, count=3),
    trajectory(reward=1),
    group(0.0, 1.0).stamp(),
]


def test_importing_records_needs_neither_torch_nor_pydantic() -> None:
    script = "import sys, sparrow.records; assert not {'torch', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


class TestSamplingParams:
    def test_defaults_are_the_models_own_distribution(self) -> None:
        params = SamplingParams()
        assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)

    @pytest.mark.parametrize(
        ("field", "value", "allowed"),
        [
            ("n", 0, ">= 1"),
            ("n", True, "an integer"),
            ("n", 1.0, "an integer"),
            ("temperature", -0.1, ">= 0.001"),
            ("temperature", 1e-9, ">= 0.001"),
            ("temperature", float("nan"), "a finite number"),
            ("temperature", "hot", "a finite number"),
            ("top_k", -1, "0 is off"),
            ("top_p", 0.0, ">= 1e-06 and <= 1"),
            ("top_p", 1.01, ">= 1e-06 and <= 1"),
            ("max_tokens", 0, ">= 1"),
            ("min_tokens", -1, "from 0 to max_tokens"),
            ("min_tokens", 1025, "max_tokens, 1024"),
            ("stop_token_ids", (3, -1), ">= 0"),
            ("stop_token_ids", 3, "a tuple"),
            ("ignore_eos", 1, "a bool"),
            ("seed", -1, ">= 0"),
            ("seed", 2**63, "< 2**63"),
        ],
    )
    def test_refusal_names_field_value_and_what_is_allowed(
        self, field: str, value: Any, allowed: str
    ) -> None:
        with refused(f"SamplingParams.{field}: got {value!r}, allowed: ") as error:
            SamplingParams(**{field: value})
        assert allowed in str(error.value)

    def test_all_broken_rules_are_reported_at_once(self) -> None:
        with pytest.raises(FieldError, match=r"n: got 0, .*top_p: got 2\.0, ") as error:
            SamplingParams(n=0, top_p=2.0)
        assert set(error.value.problems) == {"n", "top_p"}
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)

    def test_hashable(self) -> None:
        assert len({SamplingParams(), SamplingParams(), SamplingParams(n=2)}) == 2


class TestArrays:
    def test_declared_dtypes(self) -> None:
        record = trajectory()
        dtypes = [record.ids, record.loss_mask, record.rollout_logprob, record.weight_version]
        assert [array.dtype.name for array in dtypes] == ["int32", "bool", "float32", "int32"]
        assert record.policy_id.dtype == np.int16

    def test_fifteen_bytes_a_token(self) -> None:
        record = trajectory()
        arrays = [value for value in record._values().values() if isinstance(value, np.ndarray)]
        assert sum(array.nbytes for array in arrays) == 15 * len(record)

    def test_the_callers_array_is_copied(self) -> None:
        ids = np.arange(6, dtype=np.int32)
        record = trajectory(ids=ids)
        ids[0] = 99
        assert record.ids[0] == 0

    def test_read_only_and_frozen(self) -> None:
        record = trajectory()
        with pytest.raises(ValueError, match="read-only"):
            record.ids[0] = 1
        with pytest.raises(FrozenInstanceError):
            record.ids = np.zeros(6, dtype=np.int32)  # type: ignore[misc]

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda r: r])
    def test_copies_and_pickles_are_read_only_too(self, duplicate: Any) -> None:
        record = pickle.loads(pickle.dumps(duplicate(trajectory())))
        assert record == trajectory()
        assert not record.ids.flags.writeable

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("ids", [1.0, 2, 3, 4, 5, 6], "got float64"),
            ("ids", [1, 2, 3, 4, 5, 2**31], "got 2147483648 at token 5"),
            ("ids", [1, 2, 3, 4, 5, 2**70], "got object"),
            ("ids", [[1, 2, 3, 4, 5, 6]], r"shape \(1, 6\)"),
            ("ids", [[1], [2, 3]], "got no array"),
            ("ids", 5, r"shape \(\)"),
            ("ids", None, r"shape \(\)"),
            ("ids", ["1", "2", "3", "4", "5", "6"], "got <U1"),
            ("ids", [True, 2, 3, 4, 5, 6], "a bool among numbers"),
            ("policy_id", [-1, -1, 2**15, 0, -1, 0], "got 32768 at token 2"),
            ("loss_mask", [0, 0, 1, 1, 0, 1], "got int64"),
            ("loss_mask", [float("nan")] * 6, "got float64"),
            ("rollout_logprob", [0, 0, float("nan"), 0, 0, 0], "got nan at token 2"),
            ("rollout_logprob", [0, 0, -1e300, 0, 0, 0], "finite float32"),
            ("rollout_logprob", [0, 0, 1j, 0, 0, 0], "got complex128"),
        ],
    )
    def test_lossy_conversions_are_refused(self, field: str, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=rf"^Trajectory.{field}: .*{message}"):
            trajectory(**{field: value})


class TestEquality:
    @pytest.mark.parametrize("record", SAMPLES, ids=lambda r: type(r).__name__)
    def test_by_content(self, record: Record) -> None:
        assert record == copy.deepcopy(record)
        assert record != "something else"

    def test_a_different_array_is_unequal(self) -> None:
        assert trajectory() != trajectory(ids=[5, 6, 7, 8, 9, 11])

    def test_an_absent_array_is_unequal(self) -> None:
        assert completion() != completion(entropies=[0, 0])
        empty: dict[str, Any] = {"token_ids": [], "logprobs": [], "weight_versions": []}
        assert completion(**empty) != completion(**empty, entropies=[])

    def test_records_with_arrays_are_not_hashable(self) -> None:
        with pytest.raises(TypeError, match="unhashable"):
            hash(trajectory())


class TestCompletion:
    @pytest.mark.parametrize("field", ["token_ids", "logprobs", "weight_versions", "entropies"])
    def test_token_aligned(self, field: str) -> None:
        with pytest.raises(ValueError, match=rf"Completion: got lengths .*'{field}': 3"):
            completion(**{field: [0, 0, 0]})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompt_ids": [-1]}, "Completion.prompt_ids: got -1 at token 0"),
            ({"token_ids": [4, -5]}, "Completion.token_ids: got -5 at token 1"),
            ({"logprobs": [0.5, 0]}, "Completion.logprobs: got 0.5 at token 0"),
            ({"weight_versions": [0, -1]}, "Completion.weight_versions: got -1 at token 1"),
            ({"finish_reason": "tired"}, "Completion.finish_reason: got 'tired', allowed: one of"),
            ({"finish_reason": "error"}, "Completion.error: got None"),
            ({"error": "why"}, "Completion.error: got 'why' with finish_reason 'stop'"),
            ({"attention": None}, "Completion.attention: got None"),
        ],
    )
    def test_refusals(self, changes: dict[str, Any], message: str) -> None:
        with refused(message):
            completion(**changes)


class TestTrajectory:
    def test_rounding_noise_above_zero_is_a_log_prob(self) -> None:
        trajectory(rollout_logprob=[0, 0, 1e-6, 0, 0, 0])

    def test_a_sampled_token_may_stay_out_of_the_loss(self) -> None:
        trajectory(loss_mask=[False] * 6)

    @pytest.mark.parametrize(
        "spans",
        [
            [],
            [(0, 5)],
            [(0, 7)],
            [(1, 6)],
            [(0, 2), (3, 6)],
            [(0, 3), (2, 6)],
            [(3, 6), (0, 3)],
        ],
    )
    def test_turns_partition_the_tokens(self, spans: list[tuple[int, int]]) -> None:
        turns = tuple(Turn(start=start, stop=stop, role="assistant") for start, stop in spans)
        with pytest.raises(ValueError, match=r"Trajectory.turns: .* cover \[0, 6\)"):
            trajectory(turns=turns)

    @pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (-1, 2)])
    def test_a_turn_has_tokens(self, start: int, stop: int) -> None:
        with pytest.raises(ValueError, match="0 <= start < stop"):
            Turn(start=start, stop=stop, role="user")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"ids": [1]}, "Trajectory: got lengths {'ids': 1, "),
            ({"ids": [5, -6, 7, 8, 9, 10]}, "Trajectory.ids: got -6 at token 1"),
            (
                {"loss_mask": [False, True, True, True, False, True]},
                "Trajectory.loss_mask: got True at token 1, allowed: True in assistant turns only",
            ),
            (
                {"weight_version": [-1, -1, 3, -1, -1, 4]},
                "Trajectory.loss_mask: got True at token 3, allowed: True for sampled tokens only",
            ),
            ({"weight_version": [-2, -1, 3, 3, -1, 4]}, "Trajectory.weight_version: got -2"),
            ({"rollout_logprob": [0, 0, 0.5, 0, 0, 0]}, "Trajectory.rollout_logprob: got 0.5"),
            (
                {"rollout_logprob": [0, -1, 0, 0, 0, 0]},
                "Trajectory.rollout_logprob: got -1.0 at token 1, allowed: 0 for a token that was",
            ),
            ({"policy_id": [0, -1, 0, 0, -1, 0]}, "Trajectory.policy_id: got 0 at token 0"),
            ({"policy_id": [-1, -1, -1, 0, -1, 0]}, "Trajectory.policy_id: got -1 at token 2"),
            ({"reward": float("inf")}, "Trajectory.reward: got inf"),
            ({"reward": "1"}, "Trajectory.reward: got '1'"),
            ({"turns": ({"start": 0},)}, "Trajectory.turns[0]: got {'start': 0}, allowed: a Turn"),
            ({"group": GroupStats(mean=0, std=0, count=1)}, "Trajectory.group: got statistics"),
        ],
    )
    def test_refusals(self, changes: dict[str, Any], message: str) -> None:
        with refused(message):
            trajectory(**changes)


class TestGroup:
    def test_stamp_gives_mean_unbiased_std_and_count(self) -> None:
        stats = GroupStats(mean=0.5, std=float(np.std([0, 1, 0, 1], ddof=1)), count=4)
        assert {t.group for t in group(0, 1, 0, 1).stamp().trajectories} == {stats}

    @pytest.mark.parametrize(
        "rewards", [(0.1,) * 3, (0.1 + 0.2, 0.3), (0.0, -0.0), (1.0,) * 7, (-0.7,)]
    )
    def test_a_constant_group_has_exactly_no_spread(self, rewards: tuple[float, ...]) -> None:
        stats = group(*rewards).stamp().trajectories[0].group
        assert stats is not None
        assert stats.std == 0.0
        assert stats.mean == pytest.approx(rewards[0])

    def test_a_split_keeps_the_statistics(self) -> None:
        whole = group(0, 1, 1, 1).stamp()
        parts = [whole.trajectories[:1], whole.trajectories[1:]]
        halves = [replace(whole, trajectories=part) for part in parts]
        assert {t.group for half in halves for t in half.trajectories} == {
            whole.trajectories[0].group
        }
        with pytest.raises(ValueError, match="already stamped"):
            halves[1].stamp()

    def test_stamped_once(self) -> None:
        with pytest.raises(ValueError, match="already stamped for prompt 'p'"):
            group(0, 1).stamp().stamp()

    def test_rewards_must_be_complete(self) -> None:
        with pytest.raises(ValueError, match="1 without reward, prompt 'p'"):
            group(0, None, 1).stamp()

    def test_one_prompt(self) -> None:
        with pytest.raises(ValueError, match=r"got those of prompts \['p'\], .* all of 'q'"):
            Group(prompt_id="q", trajectories=(trajectory(),))

    def test_never_empty(self) -> None:
        with pytest.raises(ValueError, match="one or more"):
            Group(prompt_id="p", trajectories=())

    def test_no_mixture_of_statistics(self) -> None:
        stamped = group(0, 1).stamp().trajectories
        with pytest.raises(ValueError, match="several reward statistics"):
            Group(prompt_id="p", trajectories=(*stamped, trajectory(reward=1)))


class TestRoundTrip:
    @pytest.mark.parametrize("record", SAMPLES, ids=lambda r: type(r).__name__)
    def test_through_json(self, record: Record) -> None:
        line = json.dumps(to_dict(record), allow_nan=False)
        assert from_dict(type(record), json.loads(line)) == record

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"extra": 1}, "Trajectory: unknown key 'extra', allowed: ['prompt_id', "),
            ({"ids": "123456"}, "Trajectory.ids: got <U6"),
            ({"prompt_id": 3}, "Trajectory.prompt_id: got 3, allowed: a str"),
            ({"turns": [{"start": 0}]}, "Turn: missing key 'stop'"),
            ({"turns": {"start": 0}}, "Trajectory.turns: got {'start': 0}, allowed: a tuple"),
            ({"turns": [None]}, "Trajectory.turns[0]: got None, allowed: a Turn"),
            ({"group": [1, 0, 1]}, "GroupStats: got [1, 0, 1], allowed: a mapping of ['mean'"),
        ],
    )
    def test_strict(self, changes: dict[str, Any], message: str) -> None:
        with refused(message):
            from_dict(Trajectory, to_dict(trajectory()) | changes)

    def test_defaults_must_be_there_too(self) -> None:
        data = to_dict(SamplingParams())
        del data["seed"]
        with pytest.raises(ValueError, match="SamplingParams: missing key 'seed'"):
            from_dict(SamplingParams, data)
