"""Records: what crosses a boundary between rooms, processes and files.

Each is a frozen dataclass that checks itself when it is built, so whoever receives one need not.
Standard library and numpy alone, so that a task, a report or a remote worker can read them
without torch.

Values per token are numpy arrays: a trajectory of 32K tokens takes about 15 bytes a token, where
tuples of Python numbers would take about 100. A record copies the arrays it is given and makes
its copies read-only.
"""

import math
import numbers
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

BoolArray = Annotated[npt.NDArray[np.bool_], "bool"]
Int16Array = Annotated[npt.NDArray[np.int16], "int16"]
Int32Array = Annotated[npt.NDArray[np.int32], "int32"]
Float32Array = Annotated[npt.NDArray[np.float32], "float32"]
Int32Matrix = Annotated[npt.NDArray[np.int32], "int32", 2]
Float32Matrix = Annotated[npt.NDArray[np.float32], "float32", 2]

FinishReason = Literal["stop", "length", "abort", "error"]
Role = Literal["system", "user", "assistant", "tool"]
R = TypeVar("R", bound="Record")

NOT_SAMPLED = -1  # weight version and policy id of a token that no policy sampled
LEAST_TEMPERATURE = 1e-3
"""Below it a distribution is a point mass in all but rounding; greedy says what is meant."""

LOGPROB_NOISE = 1e-4  # a log-prob may lie this far above 0: fp32 log-softmax rounds both ways


class FieldError(ValueError):
    """Values that do not fit a record.

    `problems` maps a field to (what was given, what is allowed), so that a caller who knows where
    each value came from, such as the configuration, can say so.
    """

    def __init__(self, record: str, problems: Mapping[str, tuple[object, str]]) -> None:
        super().__init__(record, problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(
            f"{self.args[0]}.{field}: got {given!r}, allowed: {allowed}"
            for field, (given, allowed) in self.problems.items()
        )


class Record:
    """Base of all records: fields converted to their declared types, `==` by content.

    A subclass states its own rules in `_check`. Records with arrays are not hashable.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in self._hints().items():
            value = _conform(hint, getattr(self, name), f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        """Raise ValueError if the fields, each of the right type, do not fit together."""

    @classmethod
    @cache
    def _hints(cls) -> dict[str, Any]:
        """The declared type of each field, in order."""
        return get_type_hints(cls, include_extras=True)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._hints()}

    def _refuse(self, name: str, bad: npt.NDArray[np.bool_], allowed: str) -> None:
        """Raise if any token is marked in `bad`."""
        if bad.any():
            given = f"{getattr(self, name)[bad][0]} at token {bad.argmax()}"
            raise ValueError(f"{type(self).__name__}.{name}: got {given}, allowed: {allowed}")

    def _require_aligned(self, *names: str) -> None:
        arrays = {name: getattr(self, name) for name in names}
        lengths = {name: len(array) for name, array in arrays.items() if array is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{type(self).__name__}: got lengths {lengths}, allowed: equal ones")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record) or type(other) is not type(self):
            return NotImplemented
        return all(map(_same, self._values().values(), other._values().values()))

    def __hash__(self) -> int:
        return hash((type(self), *self._values().values()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies are built anew: numpy does not pickle that an array is read-only.
        return partial(type(self), **self._values()), ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingParams(Record):
    """How to sample. The defaults are those of RL training: the model's own distribution."""

    n: int = 1  # samples per prompt
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    max_tokens: int = 1024
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: a fresh one for every request

    def _check(self) -> None:
        most = self.max_tokens
        rules = {
            "n": (self.n >= 1, "an integer >= 1"),
            "temperature": (
                self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE,
                f"0 (greedy) or a number >= {LEAST_TEMPERATURE}",
            ),
            "top_k": (self.top_k >= 0, "an integer >= 0 (0 is off)"),
            "top_p": (0 < self.top_p <= 1, "a number > 0 and <= 1 (1 is off)"),
            "max_tokens": (most >= 1, "an integer >= 1"),
            "min_tokens": (
                0 <= self.min_tokens <= most,
                f"an integer from 0 to max_tokens, {most}",
            ),
            "stop_token_ids": (min(self.stop_token_ids, default=0) >= 0, "integers >= 0"),
            "seed": (0 <= (self.seed or 0) < 2**63, "an integer >= 0 and < 2**63"),
        }
        broken = {name: text for name, (holds, text) in rules.items() if not holds}
        if broken:
            problems = {name: (getattr(self, name), text) for name, text in broken.items()}
            raise FieldError("SamplingParams", problems)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutputOptions(Record):
    """What a completion shall carry beyond tokens, log-probs and entropies."""

    top_logprobs: int = 0  # how many of the most likely tokens of each step; 0: none
    hidden_states: bool = False  # final hidden state that each token was drawn from
    training: bool = False  # log-probs of the model's own distribution: nothing may truncate it

    def _check(self) -> None:
        if self.top_logprobs < 0:
            allowed = "an integer >= 0 (0 is none)"
            raise FieldError("OutputOptions", {"top_logprobs": (self.top_logprobs, allowed)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion(Record):
    """What the engine returns for one sample of one prompt.

    `logprobs` and `entropies` are of the distribution each token was sampled from: after
    temperature and truncation, and under the attention that ran. `top_logprobs` are those of the
    most likely tokens after temperature and before truncation. `hidden` holds the final hidden
    state that each token was drawn from, so LM head and temperature give its whole distribution.
    `kept` is the share of the sequence's keys and values that the token's step read, over all
    layers. `recomputed` lists the lengths at which keys and values were computed anew, densely.
    """

    prompt_ids: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    weight_versions: Int32Array
    finish_reason: FinishReason
    attention: str  # what ran, for example "dense"
    entropies: Float32Array | None = None
    kept: Float32Array | None = None
    top_ids: Int32Matrix | None = None
    top_logprobs: Float32Matrix | None = None
    hidden: Float32Matrix | None = None
    seed: int | None = None  # that of this sample: with its number of tokens it gives every draw
    adapter: str | None = None
    swaps: int = 0  # how often it was moved to host memory and back
    restarts: int = 0  # how often it began anew, because weights changed
    recomputed: tuple[int, ...] = ()
    text: str | None = None
    error: str | None = None  # present exactly if finish_reason is "error"

    def _check(self) -> None:
        self._require_aligned(
            "token_ids",
            "logprobs",
            "weight_versions",
            "entropies",
            "kept",
            "top_ids",
            "top_logprobs",
            "hidden",
        )
        self._refuse("prompt_ids", self.prompt_ids < 0, "token ids >= 0")
        self._refuse("token_ids", self.token_ids < 0, "token ids >= 0")
        self._refuse("logprobs", self.logprobs > LOGPROB_NOISE, "log-probs <= 0")
        self._refuse("weight_versions", self.weight_versions < 0, "versions >= 0")
        if (self.finish_reason == "error") != (self.error is not None):
            raise ValueError(
                f"Completion.error: got {self.error!r} with finish_reason {self.finish_reason!r}, "
                "allowed: a text if the reason is 'error', None otherwise"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn(Record):
    """The tokens [start, stop) of a trajectory, and who said them."""

    start: int
    stop: int
    role: Role

    def _check(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"Turn: got [{self.start}, {self.stop}), allowed: 0 <= start < stop")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStats(Record):
    """Rewards of the whole group that a trajectory was sampled in, however it is split later."""

    mean: float
    std: float  # unbiased; exactly 0 if all rewards are equal or there is only one
    count: int

    def _check(self) -> None:
        if self.std < 0 or self.count < 1:
            raise ValueError(f"GroupStats: got {self}, allowed: std >= 0 and count >= 1")

    @classmethod
    def of(cls, rewards: list[float]) -> "GroupStats":
        """Exact sums, and a spread of rounding errors is none: no advantage is made of noise."""
        constant = math.isclose(min(rewards), max(rewards))
        std = 0.0 if constant else statistics.stdev(rewards)
        return cls(mean=statistics.mean(rewards), std=std, count=len(rewards))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory(Record):
    """One episode as token-aligned arrays: prompt and answers, over one turn or many.

    A token was sampled if its weight version is >= 0; it then has the policy that sampled it and
    its log-prob under that policy. Every other token has NOT_SAMPLED as version and policy, and
    log-prob 0. Only sampled tokens of assistant turns may enter the loss.
    """

    prompt_id: str
    ids: Int32Array
    loss_mask: BoolArray
    rollout_logprob: Float32Array
    weight_version: Int32Array
    policy_id: Int16Array
    turns: tuple[Turn, ...]  # side by side, covering every token
    reward: float | None = None
    group: GroupStats | None = None  # stamped once, when the rewards of the group are complete

    def __len__(self) -> int:
        return len(self.ids)

    def stamp(self, stats: GroupStats) -> "Trajectory":
        """The same trajectory with its group's statistics, which can be given only once."""
        if self.group is not None:
            raise ValueError(f"Trajectory.group: already stamped for prompt {self.prompt_id!r}")
        return replace(self, group=stats)

    def _check(self) -> None:
        self._require_aligned("ids", "loss_mask", "rollout_logprob", "weight_version", "policy_id")
        self._check_turns()
        self._check_tokens()
        if self.group is not None and self.reward is None:
            raise ValueError("Trajectory.group: got statistics of rewards, but reward is None")

    def _check_turns(self) -> None:
        bounds = [0, *(turn.stop for turn in self.turns)]
        if [turn.start for turn in self.turns] != bounds[:-1] or bounds[-1] != len(self):
            spans = [(turn.start, turn.stop) for turn in self.turns]
            allowed = f"spans side by side that cover [0, {len(self)})"
            raise ValueError(f"Trajectory.turns: got {spans}, allowed: {allowed}")

    def _check_tokens(self) -> None:
        sampled = self.weight_version >= 0
        assistant = np.zeros(len(self), dtype=bool)
        for turn in self.turns:
            assistant[turn.start : turn.stop] = turn.role == "assistant"
        self._refuse("ids", self.ids < 0, "token ids >= 0")
        self._refuse("weight_version", self.weight_version < NOT_SAMPLED, "-1 or a version >= 0")
        self._refuse("loss_mask", self.loss_mask & ~assistant, "True in assistant turns only")
        self._refuse("loss_mask", self.loss_mask & ~sampled, "True for sampled tokens only")
        self._refuse("rollout_logprob", self.rollout_logprob > LOGPROB_NOISE, "log-probs <= 0")
        unsampled_logprob = ~sampled & (self.rollout_logprob != 0)
        self._refuse("rollout_logprob", unsampled_logprob, "0 for a token that was not sampled")
        policy_fits = np.where(sampled, self.policy_id >= 0, self.policy_id == NOT_SAMPLED)
        self._refuse("policy_id", ~policy_fits, ">= 0 if the token was sampled, otherwise -1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group(Record):
    """Trajectories of one prompt that are judged against each other, or a part of such a group."""

    prompt_id: str
    trajectories: tuple[Trajectory, ...]

    def stamp(self) -> "Group":
        """The group with its reward statistics on every trajectory, so that it may be split."""
        rewards = [t.reward for t in self.trajectories if t.reward is not None]
        missing = len(self.trajectories) - len(rewards)
        if missing:
            raise ValueError(f"Group.stamp: {missing} without reward, prompt {self.prompt_id!r}")
        stats = GroupStats.of(rewards)
        return replace(self, trajectories=tuple(t.stamp(stats) for t in self.trajectories))

    def _check(self) -> None:
        prompts = {trajectory.prompt_id for trajectory in self.trajectories}
        if prompts != {self.prompt_id}:
            raise ValueError(
                f"Group.trajectories: got those of prompts {sorted(prompts)}, "
                f"allowed: one or more, all of {self.prompt_id!r}"
            )
        if len({trajectory.group for trajectory in self.trajectories}) > 1:
            raise ValueError(
                "Group.trajectories: got several reward statistics, "
                "allowed: the same on all, or none on any"
            )


def to_dict(record: Record) -> dict[str, Any]:
    """The record as JSON-safe data: dicts, lists, strings, numbers, None. Loses nothing."""
    return {name: _to_plain(value) for name, value in record._values().items()}


def from_dict(cls: type[R], data: object) -> R:
    """Inverse of `to_dict`. Exactly the record's keys must be there, defaults included."""
    hints = cls._hints()
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__}: got {data!r}, allowed: a mapping of {list(hints)}")
    for key in [*data, *hints]:
        if key not in hints or key not in data:
            fault = "missing" if key in hints else "unknown"
            raise ValueError(f"{cls.__name__}: {fault} key {key!r}, allowed: {list(hints)}")
    return cls(**{name: _from_plain(hint, data[name]) for name, hint in hints.items()})


def _to_plain(value: Any) -> Any:
    match value:
        case Record():
            return to_dict(value)
        case np.ndarray():
            return value.tolist()
        case tuple():
            return [_to_plain(item) for item in value]
    return value


def _from_plain(hint: Any, value: Any) -> Any:
    """Build nested records. What is not one is left as it is, for the record to check."""
    hint = _required(hint)
    if isinstance(hint, type) and issubclass(hint, Record) and value is not None:
        return from_dict(hint, value)
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_from_plain(get_args(hint)[0], item) for item in value)
    return value


def _required(hint: Any) -> Any:
    """`hint` without its `| None`."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    return hint


def _conform(hint: Any, value: Any, where: str) -> Any:
    """`value` as an immutable value of type `hint`, if that changes nothing but its form."""
    required = _required(hint)
    if value is None and required is not hint:
        return None
    if get_origin(required) is Annotated:
        dtype, *dimensions = required.__metadata__
        return _frozen_array(np.dtype(dtype), value, where, *dimensions)
    if get_origin(required) is tuple and isinstance(value, tuple | list):
        item = get_args(required)[0]
        return tuple(_conform(item, member, f"{where}[{i}]") for i, member in enumerate(value))
    return _conform_scalar(required, value, where)


def _conform_scalar(hint: Any, value: Any, where: str) -> Any:
    number = not isinstance(value, bool) and isinstance(value, numbers.Real)
    if get_origin(hint) is Literal:
        fits, allowed = value in get_args(hint), f"one of {get_args(hint)}"
    elif hint is float:
        fits, allowed = number and math.isfinite(value), "a finite number"
    elif hint is int:
        fits, allowed = number and isinstance(value, numbers.Integral), "an integer"
    else:
        kind = get_origin(hint) or hint
        fits, allowed = isinstance(value, kind), f"a {kind.__name__}"
    if not fits:
        raise ValueError(f"{where}: got {value!r}, allowed: {allowed}")
    return hint(value) if hint in (int, float) else value


def _frozen_array(
    dtype: np.dtype[Any], value: Any, where: str, dimensions: int = 1
) -> npt.NDArray[Any]:
    """A read-only copy. Integers stay equal; floats stay finite and may round to float32."""
    given = _as_array(dtype, value, where, dimensions)
    with np.errstate(over="ignore"):
        array = given.astype(dtype)
    lost = ~np.isfinite(array) if dtype.kind == "f" else array != given
    if lost.any():
        got = f"{given[lost][0]} at token {lost.argmax() // max(1, lost[0].size)}"
        raise ValueError(f"{where}: got {got}, allowed: finite {dtype}")
    array.setflags(write=False)
    return array


def _as_array(dtype: np.dtype[Any], value: Any, where: str, dimensions: int) -> npt.NDArray[Any]:
    """`value` as an array of a kind that may become `dtype`: no floats or bools as integers."""
    allowed = f"allowed: {dimensions}-D {dtype}"
    try:
        given = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: got no array ({error}), {allowed}") from error
    if given.size == 0 and given.ndim == 1 < dimensions:
        given = given.reshape(0, *[0] * (dimensions - 1))
    kinds = {"b": "b", "i": "iu", "f": "iuf"}[dtype.kind]
    if given.ndim != dimensions or (given.size > 0 and given.dtype.kind not in kinds):
        raise ValueError(f"{where}: got {given.dtype} of shape {given.shape}, {allowed}")
    if dtype.kind != "b" and isinstance(value, list | tuple) and bool in map(type, value):
        raise ValueError(f"{where}: got a bool among numbers, {allowed}")
    return given


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)
