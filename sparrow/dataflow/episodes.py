"""Episodes: rollouts of one row, from its prompt to trajectories with rewards.

An episode is any `async def episode(actor, example) -> list[Trajectory]`. The training loop knows
nothing of what happens inside, so tools and multi-turn agents need no other loop:

    async def with_tool(actor, example):
        async def play(sample):
            conversation = actor.conversation(example, sample)
            text = await conversation.reply(max_tokens=200)
            if "compute" in text and conversation.room > 0:
                conversation.add(calculator(text))
                await conversation.reply()
            return conversation.trajectory(await actor.judge(example, conversation.text))

        return await asyncio.gather(*map(play, range(actor.samples)))
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from sparrow.dataflow.backend import Sampler
from sparrow.dataflow.language import Language
from sparrow.engine.answer import ResolvedDecoding
from sparrow.functions import resolve
from sparrow.schema.agents import AgentsConfig
from sparrow.schema.base import Float32Matrix, Int32Array
from sparrow.schema.episode import NOT_SAMPLED, Group, Trajectory, Turn
from sparrow.schema.sampling import Completion, OutputOptions, SamplingParams, SpeculationStats
from sparrow.tasks.base import Example, Judge, Message, Verdict, keyed_random
from sparrow.tasks.judging import parse_verdict
from sparrow.training.objectives.advantages import informative, overlong_penalty
from sparrow.training.objectives.algorithms import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The policy that an episode samples from: engine, sampling, decoding and judge of one row.

    samples: trajectories that the loop asks for. watched: how many of them carry the hidden states
    that acceptance is measured from. context: most tokens of a trajectory. key: seeds of this row.
    """

    engine: Sampler
    language: Language
    judge: Judge
    params: SamplingParams
    decoding: ResolvedDecoding
    samples: int
    context: int
    watched: int = 0
    key: tuple[Any, ...] = ()
    greedy: bool = False
    policy: int = 0  # its number, of several
    vocabulary: int = 0  # number of the first policy whose token ids have the same meaning
    agents: AgentsConfig = field(default_factory=AgentsConfig)  # limits of trees of agents

    def encode(self, example: Example) -> list[int]:
        """Encode the prompt of a row: where the model has a chat template, a new chat."""
        if not isinstance(example, Example):
            raise TypeError(
                f"actor.encode opens a new chat and takes an Example, got {example!r:.80}; later "
                "in an episode use actor.encode_text(text) or actor.encode_turn(messages)"
            )
        return self.language.encode(example.prompt)

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text, such as what a tool says: no chat template, no system prompt."""
        return self.language.encode_text(text)

    def encode_turn(
        self, messages: Sequence[Message], after: Sequence[int] | None = None
    ) -> list[int]:
        """Encode chat messages, such as a tool's, between an answer and the next.

        after: the tokens before; None: an answer that ended by itself, not by the token limit.
        """
        return self.language.encode_turn(messages, after)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self.language.decode(list(ids))

    def conversation(self, example: Example, sample: int = 0) -> "Conversation":
        """Start a conversation about a row; sample: which of `samples` it is."""
        return Conversation(self, example, sample)

    def room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens an answer to this prompt may have; below 1: none."""
        return min(self.params.max_tokens, self.context - len(prompt))

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        turn: int = 0,
        sample: int = 0,
        watched: int | None = None,
    ) -> list[Completion]:
        """Sample n completions of a prompt, the last `watched` of them with hidden states.

        turn, sample: distinguish the calls of an episode; calls with equal values sample alike.
        watched: by default what the loop asks for in the first call, and none later, where an
        episode passes 1 for trajectories that are to be measured to their end.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        limit = min(self.room(prompt), max_tokens or self.params.max_tokens)
        if limit < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer in a context of "
                f"{self.context}: check actor.room(prompt) first"
            )
        if watched is None:
            watched = self.watched if turn == sample == 0 else 0
        measured = min(n, watched)
        parts = await asyncio.gather(
            *(
                self.engine.generate(
                    list(prompt),
                    self._params(count, limit, (turn, sample, hidden)),
                    **self.decoding.request,
                    options=OutputOptions(hidden_states=hidden, training=not self.greedy),
                )
                for count, hidden in ((n - measured, False), (measured, True))
                if count > 0
            )
        )
        found = [completion for part in parts for completion in part]
        return [completion.model_copy(update={"policy": self.policy}) for completion in found]

    def _params(self, count: int, limit: int, call: tuple[int, int, bool]) -> SamplingParams:
        seed = keyed_random("answers", *self.key, *call).getrandbits(62)
        changes: dict[str, Any] = {"temperature": 0.0} if self.greedy else {}
        return self.params.replace(n=count, max_tokens=limit, seed=seed, **changes)

    def as_greedy(self) -> "Actor":
        """Return an actor for one greedy answer: a baseline."""
        return replace(self, samples=1, watched=0, greedy=True, key=(*self.key, "greedy"))


class Conversation:
    """One trajectory of a multi-turn episode, under construction: replies, and turns between them.

    ids: all tokens so far. replies: the sampled answers.
    """

    def __init__(self, actor: Actor, example: Example, sample: int = 0) -> None:
        self.actor, self.example, self.sample = actor, example, sample
        self.ids = actor.encode(example)
        self.replies: list[Completion] = []

    @property
    def room(self) -> int:
        """Tokens that the next reply may have; below 1: none."""
        return self.actor.room(self.ids)

    @property
    def text(self) -> str:
        """The sampled text of all replies."""
        return self.actor.decode([i for reply in self.replies for i in reply.token_ids.tolist()])

    def add(self, content: str, role: str = "tool") -> Self:
        """Add a chat message, by the model's chat template."""
        message = {"role": role, "content": content}
        self.ids += self.actor.encode_turn([message], after=self.ids)
        return self

    def add_text(self, text: str) -> Self:
        """Add plain text, for models without a chat template."""
        self.ids += self.actor.encode_text(text)
        return self

    async def reply(self, max_tokens: int | None = None, *, actor: Actor | None = None) -> str:
        """Sample the next answer and return its text.

        actor: another policy, which goes on with the same tokens; None: the conversation's own.
        """
        actor = actor or self.actor
        if actor.vocabulary != self.actor.vocabulary:
            raise ValueError(
                "another policy with another tokenizer cannot go on with these token ids: give "
                "its own conversation the text (conversation.add_text)"
            )
        (reply,) = await actor.generate(
            self.ids,
            max_tokens=max_tokens,
            turn=len(self.replies),
            sample=self.sample,
            watched=int(self.sample < actor.watched),
        )
        self.replies.append(reply)
        self.ids = [*reply.prompt_ids.tolist(), *reply.token_ids.tolist()]
        return self.actor.decode(reply.token_ids.tolist())

    def trajectory(self, verdict: Verdict | float | Mapping[str, Any]) -> Trajectory:
        """Return all turns with their reward; only sampled tokens are learnt from.

        verdict: of `actor.judge`, or whatever a reward function may return.
        """
        if not self.replies:
            raise ValueError(f"{self.example.id}: a conversation without a reply is no trajectory")
        verdict = parse_verdict(verdict)
        whole = build_trajectory(self.example.id, self.replies, verdict, self.text)
        return whole.replace(node=(self.sample,))


Episode = Callable[[Actor, Example], Awaitable[list[Trajectory]]]
# Of a run with several policies, by name: `async def episode(actors, example)`.
TeamEpisode = Callable[[Mapping[str, Actor], Example], Awaitable[list[Trajectory]]]


async def single_turn(actor: Actor, example: Example) -> list[Trajectory]:
    """Sample `actor.samples` answers to the prompt and judge each."""
    prompt = actor.encode(example)
    completions = await actor.generate(prompt, n=actor.samples, max_tokens=example.max_tokens)
    texts = [actor.decode(completion.token_ids.tolist()) for completion in completions]
    verdicts = await asyncio.gather(*(actor.judge(example, text) for text in texts))
    return [
        build_trajectory(example.id, [completion], verdict, text)
        for completion, verdict, text in zip(completions, verdicts, texts, strict=True)
    ]


def build_trajectory(
    prompt_id: str, answers: Sequence[Completion], verdict: Verdict, text: str
) -> Trajectory:
    """Build a trajectory of a prompt and its answers, turn by turn.

    Tokens go from engine to trainer unchanged: the prompt of an answer begins with all tokens
    before it, followed by what a tool or user said.
    """
    ids = _joined_ids(prompt_id, answers)
    spans = [
        slice(len(answer.prompt_ids), len(answer.prompt_ids) + len(answer.token_ids))
        for answer in answers
    ]

    def spread(name: str, filler: float, dtype: type) -> Any:
        """A value of every answer, or of every token of it, in the place of its tokens."""
        values: Any = np.full(len(ids), filler, dtype)
        for span, answer in zip(spans, answers, strict=True):
            values[span] = getattr(answer, name)
        return values

    sampled = spread("weight_versions", NOT_SAMPLED, np.int32)
    states = _joined_states(answers)
    shared = len({answer.policy for answer in answers}) > 1
    return Trajectory(
        prompt_id=prompt_id,
        ids=ids,
        loss_mask=sampled >= 0,
        rollout_logprob=spread("logprobs", 0, np.float32),
        weight_version=sampled,
        policy_id=spread("policy", NOT_SAMPLED, np.int16),
        turns=_turns(spans),
        reward=verdict.score,
        acc=verdict.acc,
        note=verdict.reason,
        text=text,
        truncated=any(answer.finish_reason == "length" for answer in answers),
        kept=None if any(a.kept is None for a in answers) else spread("kept", 1, np.float32),
        attention=answers[0].attention,
        speculation=_joined_speculation(answers),
        hidden=None if shared else states.get(answers[0].policy),
        hidden_of=states if shared else {},
    )


def _joined_speculation(answers: Sequence[Completion]) -> SpeculationStats | None:
    parts = [answer.speculation for answer in answers if answer.speculation is not None]
    return SpeculationStats.total(parts) if parts else None


def _joined_ids(prompt_id: str, answers: Sequence[Completion]) -> Int32Array:
    """Return all tokens in order; ValueError if a prompt does not continue the turn before."""
    ids = np.zeros(0, np.int32)
    for turn, answer in enumerate(answers):
        if answer.error is not None:
            raise RuntimeError(f"{prompt_id}: the engine failed: {answer.error}")
        if not np.array_equal(answer.prompt_ids[: len(ids)], ids):
            raise ValueError(
                f"{prompt_id}: the prompt of turn {turn} does not begin with the tokens before it; "
                "append token ids to it instead of encoding its text again"
            )
        ids = np.concatenate([answer.prompt_ids, answer.token_ids])
    return ids


def _turns(spans: Sequence[slice]) -> tuple[Turn, ...]:
    """Sampled tokens are the assistant's; the first tokens are the user's, others a tool's."""
    turns: list[Turn] = []
    for span in spans:
        before = turns[-1].stop if turns else 0
        if before < span.start:
            turns.append(Turn(start=before, stop=span.start, role="tool" if turns else "user"))
        turns.append(Turn(start=span.start, stop=span.stop, role="assistant"))
    return tuple(turns)


def _joined_states(answers: Sequence[Completion]) -> dict[int, Float32Matrix]:
    """The hidden states of all tokens of a policy, if each of its answers has them."""
    parts: dict[int, list[Float32Matrix | None]] = {}
    for answer in answers:
        parts.setdefault(answer.policy, []).append(answer.hidden)
    known = {policy: [s for s in states if s is not None] for policy, states in parts.items()}
    return {n: np.concatenate(s) for n, s in known.items() if len(s) == len(parts[n])}


def shaped_reward(trajectory: Trajectory, algorithm: Algorithm, limit: int) -> float:
    """Return the reward, less the algorithm's penalty on answers near the token limit."""
    assert trajectory.reward is not None, "checked when the episode ended"
    if not algorithm.overlong:
        return trajectory.reward
    tokens = int((trajectory.weight_version >= 0).sum())
    return trajectory.reward + overlong_penalty(tokens, limit=limit, cushion=algorithm.overlong)


def is_informative(group: Group) -> bool:
    """Whether some answers that are compared are right and others wrong, for dynamic sampling."""
    accs = [trajectory.acc or 0 for trajectory in group.trajectories]
    return any(informative([accs[n] for n in numbers]) for numbers in group.subgroups())


def load_episode(path: str | None) -> Episode:
    """Return the episode that a configuration names; None: a single turn."""
    if path is None:
        return single_turn
    function = resolve(path, "rollout.episode")
    if not asyncio.iscoroutinefunction(function):
        raise ValueError(f"rollout.episode: expected an async function, got {path!r}")
    return function
