"""Episodes: trajectories of one or several turns, and groups of them."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from sparrow.schema.agents import AgentNode
from sparrow.schema.base import (
    BoolArray,
    Float32Array,
    Float32Matrix,
    Int16Array,
    Int32Array,
    Record,
)
from sparrow.schema.sampling import LOGPROB_NOISE, SpeculationStats

Role = Literal["system", "user", "assistant", "tool"]
NOT_SAMPLED = -1  # weight version and policy id of a token that no policy sampled


class Turn(Record):
    """The tokens [start, stop) of a trajectory, and their role."""

    start: int
    stop: int
    role: Role

    def _check(self) -> None:
        self.require(0 <= self.start < self.stop, "start", f"0 to stop, {self.stop}")


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
    turns: tuple[Turn, ...]  # contiguous, covering every token
    reward: float | None = None
    rewards: dict[str, float] = {}  # noqa: RUF012 (pydantic copies it); by policy, if they differ
    team_reward: float | None = None  # of all who took part, for policies with a share of it
    # Its place in the episode: the play, then the number of a child, of that one's child.
    node: tuple[int, ...] = ()
    # Trajectories of a prompt are compared with those of the same subgroup: another problem that a
    # policy proposed, another depth of agents.
    subgroup: str = ""
    # Of the first trajectory of a tree: how each agent ended. Of a prompt's first trajectory also
    # those of plays without one.
    agents: tuple[AgentNode, ...] = ()
    acc: float | None = None  # accuracy, apart from a reward that may be shaped
    note: str | None = None  # the reason of the verdict
    text: str | None = None  # sampled text, for readers; training uses the ids
    truncated: bool = False  # whether an answer reached the token limit
    kept: Float32Array | None = None  # share of keys and values that each token's step read
    attention: str | None = None  # for example "dense"
    speculation: SpeculationStats | None = None  # of exact decoding
    worker: str = ""  # on another machine, that sampled it; "": of this machine
    dtype: str = ""  # of that worker
    excluded_from_gate: bool = False  # sampled in another way than the run's schedule says
    hidden: Float32Matrix | None = None  # the sampled tokens' final states in the actor, in order
    # Instead, where several policies sampled: those of each that was measured, by its number.
    hidden_of: dict[int, Float32Matrix] = {}  # noqa: RUF012 (pydantic copies it)

    def __len__(self) -> int:
        return len(self.ids)

    def _check(self) -> None:
        self._require_aligned(
            "ids", "loss_mask", "rollout_logprob", "weight_version", "policy_id", "kept"
        )
        self._check_turns()
        self._check_tokens()

    def _check_turns(self) -> None:
        spans = [(turn.start, turn.stop) for turn in self.turns]
        bounds = [0, *(stop for _, stop in spans)]
        whole = [start for start, _ in spans] == bounds[:-1] and bounds[-1] == len(self)
        self.require(whole, "turns", f"contiguous spans that cover [0, {len(self)})", spans)

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
        self._check_states("hidden", self.hidden, sampled)
        for number, states in self.hidden_of.items():
            self._check_states("hidden_of", states, self.policy_id == number)

    def _check_states(
        self, name: str, states: Float32Matrix | None, sampled: npt.NDArray[np.bool_]
    ) -> None:
        if states is not None:
            allowed = f"one for each of {sampled.sum()} sampled tokens"
            self.require(len(states) == sampled.sum(), name, allowed, f"{len(states)} states")


class Group(Record):
    """Trajectories of one prompt whose rewards are compared, or a part of them."""

    prompt_id: str
    trajectories: tuple[Trajectory, ...]
    baseline: float | None = None  # reward of the greedy answer, if the algorithm uses it

    def _check(self) -> None:
        prompts = {trajectory.prompt_id for trajectory in self.trajectories}
        allowed = f"one or more, all of prompt {self.prompt_id!r}"
        self.require(prompts == {self.prompt_id}, "trajectories", allowed, sorted(prompts))

    def plays(self) -> list[list[Trajectory]]:
        """Trajectories by play; one without a place in the episode is a play of its own."""
        found: dict[object, list[Trajectory]] = {}
        for number, trajectory in enumerate(self.trajectories):
            found.setdefault(trajectory.node[:1] or str(number), []).append(trajectory)
        return [*found.values()]

    def subgroups(self) -> list[list[int]]:
        """Numbers of the trajectories that are compared with each other."""
        found: dict[str, list[int]] = {}
        for number, trajectory in enumerate(self.trajectories):
            found.setdefault(trajectory.subgroup, []).append(number)
        return [*found.values()]


class TrainSample(Record):
    """A trajectory as the trainer sees it: tokens, loss mask and advantage.

    The advantage is that of every token in the loss. `old_logprob` is of the dense policy at the
    weights of the rollout; None until computed.
    """

    ids: Int32Array
    loss_mask: BoolArray
    rollout_logprob: Float32Array
    advantage: float
    old_logprob: Float32Array | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def learnt(self) -> int:
        """Number of tokens in the loss."""
        return int(self.loss_mask.sum())

    @classmethod
    def of(cls, trajectory: Trajectory, advantage: float) -> "TrainSample":
        return cls(
            ids=trajectory.ids,
            loss_mask=trajectory.loss_mask,
            rollout_logprob=trajectory.rollout_logprob,
            advantage=advantage,
        )

    def _check(self) -> None:
        self._require_aligned("ids", "loss_mask", "rollout_logprob", "old_logprob")
        first = np.arange(len(self)) == 0
        self._refuse("loss_mask", self.loss_mask & first, "False at the first token")


class Document(Record):
    """A text for supervised training: the first `prompt` tokens are not in the loss."""

    ids: Int32Array
    prompt: int

    def __len__(self) -> int:
        return len(self.ids)

    def _check(self) -> None:
        fits = 1 <= self.prompt < len(self.ids)
        self.require(fits, "prompt", f"at least 1, and fewer than all {len(self.ids)} tokens")
