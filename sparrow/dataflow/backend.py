"""The rollout backend: the engine as training and evaluation use it.

    backend = open_backend(model, rule)
    async with backend.serving() as sampler:
        completions = await sampler.generate(ids, params, schedule=schedule)

Another backend (another library's engine, a server) is a class with the methods of
`RolloutBackend`, made in `open_backend`: nothing else of a run knows what is behind it.
"""

from collections.abc import Mapping

import torch

from sparrow.engine.asynchronous import AsyncEngine
from sparrow.engine.engine import Engine
from sparrow.models import Decoder
from sparrow.sparse.rule import Rule


class RolloutBackend:
    """Our own engine, in this process; it takes the learner's weights between rollouts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.max_context = engine.max_context  # tokens of the longest sequence, with its prompt

    def serving(self) -> AsyncEngine:
        """Entered while prompts are answered, by many coroutines at once."""
        return AsyncEngine(self.engine)

    def sync_weights(self, weights: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Take weights by their Hugging Face names; tokens drawn from now on have this version."""
        self.engine.update(weights, version=version)

    def sleep(self) -> None:
        """Give memory back while the learner works; weights may be lost: `sync_weights` follows."""
        self.engine.sleep(weights="drop")

    def wake(self) -> None:
        if self.engine.asleep:
            torch.cuda.empty_cache()  # what the learner let go of: the engine counts free bytes
            self.engine.wake()

    def header(self) -> str:
        """One line that says what runs."""
        return self.engine.header()


def open_backend(model: Decoder, rule: Rule | None, **limits: int | None) -> RolloutBackend:
    """The backend of a run or an evaluation; rule: of sparse requests, None: dense only.

    limits: max_running, max_context, kv_bytes; None, or not given: what there is room for.
    """
    return RolloutBackend(Engine(model, rule=rule, **limits))  # type: ignore[arg-type]
