"""Generated mode: the engine writes under an arm's budgets, the dense policy reads what it wrote.

The actor's distributions are those of the engine itself, by the hidden states its completions
carry: no second sparse pass, and no assumption that one would choose the same pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparrow import ops
from sparrow.calibrate.arms import Arm
from sparrow.calibrate.replay import read
from sparrow.calibrate.trajectories import Measured
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.schema.sampling import Completion, OutputOptions, SamplingParams
from sparrow.sparse.rule import Rule

TOP_K = 20  # log-probs of each side that the cheap bounds know, as in the paper
AHEAD = 2  # requests that wait in the engine, as a multiple of those that run
WRONG = 1e-4  # by which bounds may miss what they bracket before rounding is no excuse
MOST_ARMS = 14  # that run together: an engine looks up so many schedules at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt in tokens; or, in forced mode, a whole sequence of which `start` are the prompt."""

    number: int
    name: str
    ids: tuple[int, ...]
    start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt for one arm: params.n samples."""

    arm: Arm
    prompt: Prompt
    params: SamplingParams


def engine_for(model: Decoder, rule: Rule | None, prompts: Sequence[Prompt], tokens: int) -> Engine:
    """An engine just large enough for these prompts and so many new tokens."""
    longest = max(len(prompt.ids) for prompt in prompts) + tokens
    context = min(longest, model.spec.max_positions)
    return Engine(model, rule=rule, max_context=context, reuse="none")


def roll_out(engine: Engine, jobs: Sequence[Job]) -> Iterator[tuple[Job, Measured]]:
    """Every sample of every job as it ends."""
    options = OutputOptions(hidden_states=True, training=True)
    waiting = list(reversed(jobs))
    running: dict[int, tuple[Job, int]] = {}  # by request: its job, and samples that still run
    try:
        while waiting or running:
            while waiting and len(running) < AHEAD * engine.max_running:
                job = waiting.pop()
                number = engine.add(
                    job.prompt.ids, job.params, schedule=job.arm.schedule, options=options
                )
                running[number] = (job, job.params.n)
            for output in engine.step():
                if output.completion is None:
                    continue
                job, left = running.pop(output.request)
                if left > 1:
                    running[output.request] = (job, left - 1)
                yield job, measure(engine.model, job, output.sample, output.completion)
    finally:
        for number in running:
            engine.abort(number)


@torch.no_grad()
def measure(model: Decoder, job: Job, sample: int, completion: Completion) -> Measured:
    """What the dense policy thinks of a completion, token by token from its second on."""
    if completion.error is not None:
        raise ValueError(
            f"{job.arm.name}, prompt {job.prompt.name}: the engine failed: {completion.error}"
        )
    prompt, answer = len(completion.prompt_ids), completion.token_ids
    assert completion.hidden is not None, "hidden states were asked for"
    ids = np.concatenate([completion.prompt_ids, answer])
    dense = read(model, ids.tolist())
    actor_TC = torch.tensor(completion.hidden[1:], device=model.device).to(model.dtype)
    found = ops.compare(
        dense.hidden_TC[prompt:-1],
        actor_TC,
        model.head,
        dense.ids_T[prompt + 1 :],
        temperature=job.params.temperature,
        top_k=min(TOP_K, model.spec.vocabulary),
    )
    return measured(found, ids, number=job.prompt.number, sample=sample, prompt=prompt, drawn=True)


def measured(
    found: ops.Comparison, ids: np.ndarray, *, number: int, sample: int, prompt: int, drawn: bool
) -> Measured:
    """A comparison of the tokens from prompt + 1 on, as it is kept."""
    found = ops.Comparison(*(part.float().cpu() for part in found))
    alpha = found.alpha.numpy()
    missed = torch.maximum(found.lower - found.alpha, found.alpha - found.upper)
    if (missed > WRONG).any():
        raise ArithmeticError(f"top-K bounds miss the acceptance by up to {missed.max():.2g}")
    ratio = (found.logp - found.logq).exp().clamp(max=1.0).numpy() if drawn else None
    return Measured(
        prompt=number,
        sample=sample,
        prompt_tokens=prompt,
        first=prompt + 1,
        ids=ids.astype(np.int32),
        alpha=alpha,
        entropy=found.entropy.numpy(),
        below=np.maximum(alpha - found.lower.numpy(), 0),
        above=np.maximum(found.upper.numpy() - alpha, 0),
        ratio=ratio,
    )
