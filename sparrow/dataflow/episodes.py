"""Episodes: what is played against the engine for one row, and the trajectories that come of it.

An episode is any `async def episode(actor, example) -> list[Trajectory]`, each with its reward. The
loop knows nothing of what happens inside, so tools and agents of many turns need no other loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparrow.dataflow.backend import Sampler
from sparrow.dataflow.language import Language
from sparrow.functions import resolve
from sparrow.schema.base import Float32Matrix, Int32Array
from sparrow.schema.episode import NOT_SAMPLED, Trajectory, Turn
from sparrow.schema.sampling import Completion, OutputOptions, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.tasks.base import Example, Judge, Verdict, drawn
from sparrow.training.objectives.advantages import overlong_penalty
from sparrow.training.objectives.algorithms import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The rollout backend under a run's sampling and schedule, for one row, and a judge.

    samples: trajectories that the loop wants of the row. watched: so many of them carry the hidden
    states by which acceptance is measured. context: tokens that a trajectory may have in all. key:
    what every draw of this row depends on.
    """

    engine: Sampler
    language: Language
    judge: Judge
    params: SamplingParams
    schedule: Schedule | None
    samples: int
    context: int
    watched: int = 0
    key: tuple[Any, ...] = ()
    greedy: bool = False

    def encode(self, example: Example) -> list[int]:
        return self.language.encode(example.prompt)

    def decode(self, ids: Sequence[int]) -> str:
        return self.language.decode(list(ids))

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that an answer to this prompt may have; less than 1: none."""
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
        """n completions of a prompt, the last `watched` of them with hidden states.

        turn, sample: tell the calls of one episode apart; calls with equal ones draw alike.
        watched: by default as many as the loop wants in the first call, and none later, where an
        episode says 1 for the trajectories that it wants watched to their end.
        """
        most = min(self.room(prompt), max_tokens or self.params.max_tokens)
        if most < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer in a context of "
                f"{self.context}: ask actor.room(prompt) first"
            )
        if watched is None:
            watched = self.watched if turn == sample == 0 else 0
        seen = min(n, watched)
        found = await asyncio.gather(
            *(
                self.engine.generate(
                    list(prompt),
                    self._params(count, most, (turn, sample, hidden)),
                    schedule=self.schedule,
                    options=OutputOptions(hidden_states=hidden, training=not self.greedy),
                )
                for count, hidden in ((n - seen, False), (seen, True))
                if count > 0
            )
        )
        return [completion for part in found for completion in part]

    def _params(self, count: int, most: int, call: tuple[int, int, bool]) -> SamplingParams:
        seed = drawn("answers", *self.key, *call).getrandbits(62)
        changes: dict[str, Any] = {"temperature": 0.0} if self.greedy else {}
        return self.params.replace(n=count, max_tokens=most, seed=seed, **changes)

    def as_greedy(self) -> "Actor":
        """The same for one answer by the most likely tokens: a baseline."""
        return replace(self, samples=1, watched=0, greedy=True, key=(*self.key, "greedy"))


Episode = Callable[[Actor, Example], Awaitable[list[Trajectory]]]


async def single_turn(actor: Actor, example: Example) -> list[Trajectory]:
    """One prompt, `actor.samples` answers, a verdict on each."""
    prompt = actor.encode(example)
    completions = await actor.generate(prompt, n=actor.samples, max_tokens=example.max_tokens)
    texts = [actor.decode(completion.token_ids.tolist()) for completion in completions]
    verdicts = await asyncio.gather(*(actor.judge(example, text) for text in texts))
    return [
        trajectory_of(example.id, [completion], verdict, text)
        for completion, verdict, text in zip(completions, verdicts, texts, strict=True)
    ]


def trajectory_of(
    prompt_id: str, answers: Sequence[Completion], verdict: Verdict, text: str
) -> Trajectory:
    """A prompt and its answers, turn by turn; each was asked of all before it and what a tool said.

    Tokens go from engine to trainer as they are, so each prompt must begin with them.
    """
    ids = _joined_ids(prompt_id, answers)
    spans = [
        slice(len(one.prompt_ids), len(one.prompt_ids) + len(one.token_ids)) for one in answers
    ]

    def spread(name: str, filler: float, dtype: type) -> Any:
        values: Any = np.full(len(ids), filler, dtype)
        for span, answer in zip(spans, answers, strict=True):
            values[span] = getattr(answer, name)
        return values

    sampled = spread("weight_versions", NOT_SAMPLED, np.int32)
    return Trajectory(
        prompt_id=prompt_id,
        ids=ids,
        loss_mask=sampled >= 0,
        rollout_logprob=spread("logprobs", 0, np.float32),
        weight_version=sampled,
        policy_id=np.where(sampled >= 0, 0, NOT_SAMPLED).astype(np.int16),
        turns=_turns(spans),
        reward=verdict.score,
        acc=verdict.acc,
        note=verdict.reason,
        text=text,
        truncated=any(one.finish_reason == "length" for one in answers),
        kept=None if any(one.kept is None for one in answers) else spread("kept", 1, np.float32),
        attention=answers[0].attention,
        hidden=_joined_states(answers),
    )


def _joined_ids(prompt_id: str, answers: Sequence[Completion]) -> Int32Array:
    """All tokens, in the order in which they came."""
    ids = np.zeros(0, np.int32)
    for turn, answer in enumerate(answers):
        if answer.error is not None:
            raise RuntimeError(f"{prompt_id}: the engine failed: {answer.error}")
        if not np.array_equal(answer.prompt_ids[: len(ids)], ids):
            raise ValueError(
                f"{prompt_id}: the prompt of turn {turn} does not begin with the tokens before it; "
                "go on from token ids, not from text that is encoded again"
            )
        ids = np.concatenate([answer.prompt_ids, answer.token_ids])
    return ids


def _turns(spans: Sequence[slice]) -> tuple[Turn, ...]:
    """What was sampled is the assistant's; the first tokens are the user's, others a tool's."""
    found: list[Turn] = []
    for span in spans:
        before = found[-1].stop if found else 0
        if before < span.start:
            found.append(Turn(start=before, stop=span.start, role="tool" if found else "user"))
        found.append(Turn(start=span.start, stop=span.stop, role="assistant"))
    return tuple(found)


def _joined_states(answers: Sequence[Completion]) -> Float32Matrix | None:
    """Those of all sampled tokens, or none: acceptance is of whole trajectories."""
    states = [one.hidden for one in answers if one.hidden is not None]
    return np.concatenate(states) if len(states) == len(answers) else None


def shaped_reward(trajectory: Trajectory, algorithm: Algorithm, limit: int) -> float:
    """Its reward, with the penalty on answers near the limit where the algorithm has one."""
    assert trajectory.reward is not None, "the episode gave one"
    if not algorithm.overlong:
        return trajectory.reward
    tokens = int((trajectory.weight_version >= 0).sum())
    return trajectory.reward + overlong_penalty(tokens, limit=limit, cushion=algorithm.overlong)


def episode_of(path: str | None) -> Episode:
    """Return the episode that a configuration names; None: a single turn."""
    if path is None:
        return single_turn
    function = resolve(path, "rollout.episode")
    if not asyncio.iscoroutinefunction(function):
        raise ValueError(f"rollout.episode: expected an async function, got {path!r}")
    return function
