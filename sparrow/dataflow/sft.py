"""`sparrow sft`: supervised fine-tuning on conversations, in a folder that can be resumed.

    {"prompt": "countdown 3 4 reach 7 <think>", "completion": "3 + 4 = 7 ..."}
    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}, {"role": "tool", ...}, ...]}

Token ids are those that an episode's `Conversation` would have; what the assistant says is learnt,
its end token included. It is the learner of RL with log pi as the objective.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any

import numpy as np

from sparrow.dataflow.checkpoints import Checkpoints
from sparrow.dataflow.language import Language, load_language, speaks_puzzles
from sparrow.files import FolderLock, remove_unfinished
from sparrow.models import Decoder, fingerprint, load, save
from sparrow.models.checkpoint import pick_device, pick_dtype
from sparrow.schema.episode import TrainSample
from sparrow.schema.run_folder import MODEL
from sparrow.schema.sft import SFT, SftConfig, SftResult
from sparrow.schema.train import OptimiserConfig
from sparrow.schema.types import Progress, Report
from sparrow.tasks.base import keyed_random
from sparrow.tasks.rows import files_digest, locate_files, read_files, read_prompt
from sparrow.training.learner import Learner
from sparrow.training.objectives.surrogates import Objective, reinforce, token_mean
from sparrow.training.policy import Policy

CHECKPOINTS = "checkpoints"
OTHER = "it has another model, rows or settings: choose another out"
ROLES = ("system", "developer", "user", "assistant", "tool")
LIKELIHOOD = Objective(surrogate=reinforce, aggregate=token_mean)


def sft(
    config: SftConfig, *, progress: Progress | None = None, report: Report | None = None
) -> SftResult:
    """Fit the model and write it; only one process may use the folder."""
    place = config.folder
    place.mkdir(parents=True, exist_ok=True)
    with closing(FolderLock(place, setting="--out")):
        remove_unfinished(place)
        return _Fit(config, progress, report or (lambda text: None)).run()


class _Fit:
    """The parts of a fit."""

    def __init__(self, config: SftConfig, progress: Progress | None, report: Report) -> None:
        self.config, self.progress, self.report = config, progress, report
        device = pick_device(config.device)
        model = load(config.model, dtype="float32", device=device, report=report)
        files = locate_files(config.rows)
        self.identity = _identity(config, model, files_digest(files))
        language = load_language(model, puzzles=speaks_puzzles(model), chat=config.chat)
        longest = model.spec.max_positions
        self.samples, self.left_out = read_conversations(read_files(files), language, longest)
        if not self.samples:
            why = "; ".join(self.left_out[:5]) or "there is none"
            raise ValueError(f"{config.rows}: no usable row: {why}")
        if self.left_out:
            report(f"{len(self.left_out)} rows are left out, such as {self.left_out[0]}")
        self.steps = config.steps or -(-config.epochs * len(self.samples) // config.batch)
        optimiser = OptimiserConfig(
            rate=config.rate,
            warm_up=self.steps // 10,
            decay=self.steps,
            final=0.1,
            weight_decay=0.0,
        )
        self.dtype = pick_dtype(config.dtype, device, {})
        policy = Policy(model, dtype=self.dtype, recompute=True)
        self.learner = Learner(policy, optimiser, steps=self.steps, tokens=config.batch_tokens)

    def run(self) -> SftResult:
        """Take the steps that are left, and write the model."""
        place, config = self.config.folder, self.config
        if (place / SFT).exists() and (place / MODEL).is_dir():
            ended = SftResult.load(place / SFT)
            if ended.identity != self.identity:
                raise ValueError(f"{place}: {OTHER}")
            return ended.replace(model=str(place / MODEL))  # the folder may have been moved
        checkpoints = Checkpoints(place / CHECKPOINTS, 1, report=self.report)
        losses = self._resume(checkpoints)
        if (place / MODEL).exists() and not losses:
            raise ValueError(f"{place / MODEL} is not of sparrow sft: choose another out")
        while len(losses) < self.steps:
            losses.append(self._step(len(losses)))
            if self.progress is not None:
                self.progress(len(losses), self.steps, f"loss {losses[-1]:.3f}")
            if len(losses) % config.save_every == 0:
                state = {"learner": self.learner.state(), "losses": losses}
                checkpoints.save(len(losses), state, self.identity)
        shutil.rmtree(place / MODEL, ignore_errors=True)  # of a process that ended right behind it
        result = SftResult(
            model=str(save(self.learner.policy.model.to(self.dtype), place / MODEL)),
            base=config.model,
            rows=len(self.samples),
            left_out=tuple(self.left_out),
            tokens=sum(sample.learnt for sample in self.samples),
            losses=tuple(losses),
            identity=self.identity,
        )
        result.save(place / SFT)
        return result

    def _resume(self, checkpoints: Checkpoints) -> list[float]:
        """Go on from the latest checkpoint; the losses before it."""
        step = checkpoints.latest()
        if step is None:
            return []
        try:
            state = checkpoints.load(step, self.identity)
        except ValueError as error:
            raise ValueError(f"{self.config.folder}, step {step}: {OTHER} ({error})") from error
        self.learner.restore(state["learner"])
        return list(state["losses"])

    def _step(self, number: int) -> float:
        """Take one optimiser step; ValueError if its loss or gradient is not finite."""
        size, count = self.config.batch, len(self.samples)
        places = [divmod(n, count) for n in range(number * size, (number + 1) * size)]
        seed = self.config.seed
        batch = [self.samples[_order(seed, epoch, count)[place]] for epoch, place in places]
        ones = [np.ones(sample.learnt, np.float32) for sample in batch]
        stats = self.learner.update(batch, ones, LIKELIHOOD)
        if stats.skipped:
            raise ValueError(f"step {number}: the loss or gradient is not finite; lower the rate")
        return stats.loss


def _identity(config: SftConfig, model: Decoder, rows: str) -> str:
    """What must not change when it is resumed."""
    settings = config.model_dump_json(exclude={"model", "rows", "out", "save_every", "device"})
    return hashlib.sha256(f"{fingerprint(model)} {rows} {settings}".encode()).hexdigest()[:16]


@lru_cache(2)
def _order(seed: int, epoch: int, count: int) -> Sequence[int]:
    """Of the rows in an epoch."""
    order = list(range(count))
    keyed_random("sft", seed, epoch).shuffle(order)
    return order


# From rows to tokens.


def read_conversations(
    rows: Sequence[Any], language: Language, longest: int
) -> tuple[list[TrainSample], list[str]]:
    """The samples of rows, and which rows cannot be used, with the reason."""
    samples, problems = [], []
    for number, row in enumerate(rows):
        try:
            sample = conversation_sample(row, language)
            if len(sample) > longest:
                raise ValueError(f"{len(sample)} tokens, the model reads at most {longest}")
            samples.append(sample)
        except ValueError as error:
            problems.append(f"row {number}: {error}")
    return samples, problems


def conversation_sample(row: Any, language: Language) -> TrainSample:
    """The tokens of a conversation, those of the assistant learnt."""
    prompt, turns = _turns(row)
    plain = language.tokenizer.chat_template is None
    if plain and not isinstance(prompt, str):
        prompt = " ".join(message["content"] for message in prompt)
    ids = language.encode(prompt)
    learnt = [False] * len(ids)
    for role, content in turns:
        if role == "assistant":
            if not content.strip():
                raise ValueError("an empty text of the assistant")
            more = [*language.encode_text(content), language.tokenizer.eos_token_id]
        elif plain:
            more = language.encode_text(content)
        else:
            more = language.encode_turn([{"role": role, "content": content}], after=ids)
        ids = [*ids, *more]
        learnt += [role == "assistant"] * len(more)
    mask, zeros = np.array(learnt), np.zeros(len(ids), np.float32)
    return TrainSample(
        ids=np.array(ids, np.int32),
        loss_mask=mask,
        rollout_logprob=zeros,
        old_logprob=zeros,
        advantage=1.0,
    )


def _turns(row: Any) -> tuple[Any, list[tuple[str, str]]]:
    """The prompt of a conversation (a text or messages), then roles and texts."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if messages is None:
        prompt = read_prompt(row)
        completion = row.get("completion")
        if "completion" not in row:
            raise ValueError(f"expected messages, or prompt and completion, got {[*row]!r:.80}")
        if not isinstance(completion, str) or not completion:
            raise ValueError(
                f"completion: expected a text that is not empty, got {completion!r:.80}"
            )
        return prompt, [("assistant", completion)]
    opened = read_prompt({"prompt": messages})
    if isinstance(opened, str):
        raise ValueError(f"messages: expected a list with roles and contents, got {opened!r:.80}")
    roles = [message["role"] for message in opened]
    if unknown := sorted({*roles} - {*ROLES}):
        raise ValueError(f"unknown roles {unknown!r:.80}; expected {', '.join(ROLES)}")
    if "assistant" not in roles or roles[0] == "assistant":
        raise ValueError(f"expected messages before and of the assistant, got roles {roles!r:.80}")
    first = roles.index("assistant")
    turns = [(message["role"], message["content"]) for message in opened[first:]]
    return opened[:first], turns
