"""Supervised training on documents: the warm-up that RL starts from.

    trainer = Supervised(model, OptimiserConfig(), steps=1000)
    stats = trainer.step(pack)

Weights are float32; with a 16-bit dtype the products run in it (autocast). The loss is the mean
negative log-prob of the learnt tokens, by the same chunked function as everywhere.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from sparrow import ops
from sparrow.models import Decoder
from sparrow.processes.worker import Worker, WorkerFault
from sparrow.schema.base import from_dict
from sparrow.schema.episode import Document
from sparrow.schema.train import OptimiserConfig
from sparrow.training.optimiser import adamw, rate_at
from sparrow.training.packing import Pack, pack, packed_attention
from sparrow_recipes.warmup.documents import PuzzleDocuments

AHEAD = 3  # packs in the making per worker
DEADLINE = 3600.0  # seconds that the documents of a step may take
LONGEST = 1 << 30  # bytes of them


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Statistics of a step, as tensors: reading them waits for the device."""

    step: int
    rate: float
    tokens: int
    learnt: int
    loss: Tensor
    entropy: Tensor
    gradient: Tensor

    def plain(self) -> dict[str, Any]:
        """A line of the curve; waits for the device."""
        means = {name: getattr(self, name).item() for name in ("loss", "entropy", "gradient")}
        return {
            "step": self.step,
            **{name: round(value, 6) for name, value in means.items()},
            "rate": self.rate,
            "tokens": self.tokens,
            "learnt": self.learnt,
        }


class Supervised:
    """A model, its optimiser, and the number of the next step."""

    def __init__(
        self,
        model: Decoder,
        optimiser: OptimiserConfig,
        *,
        steps: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if model.dtype != torch.float32:
            raise ValueError(f"training needs float32 weights, the model has {model.dtype}")
        self.model, self.config, self.steps, self.dtype = model, optimiser, steps, dtype
        self.optimiser = adamw(model.parameters(), optimiser)
        self.next = 0

    def step(self, pack: Pack) -> StepStats:
        """Take an optimiser step on a pack."""
        pack = pack.to(self.model.device)
        rate = rate_at(self.config, self.next, self.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        loss, entropy = self.loss(pack)
        loss.backward()
        gradient = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.next += 1
        return StepStats(
            step=self.next - 1,
            rate=rate,
            tokens=len(pack.ids_T),
            learnt=len(pack.targets_R),
            loss=loss.detach(),
            entropy=entropy,
            gradient=gradient,
        )

    def loss(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Mean negative log-prob of the learnt tokens, with gradients, and the mean entropy."""
        device = self.model.device.type
        with (
            torch.autocast(device, dtype=self.dtype, enabled=self.dtype != torch.float32),
            ops.using("reference"),
        ):
            attention = packed_attention(pack, self.dtype)
            hidden_TC = self.model(pack.ids_T, pack.positions_T, attention)
        stats = ops.token_stats(hidden_TC[pack.sources_R].float(), self.model.head, pack.targets_R)
        return -stats.logprob.mean(), stats.entropy.detach().mean()

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {
            "next": self.next,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.next = state["next"]


# Packs are made ahead by other processes; each is a function of its step, so neither a resume nor
# the number of processes changes them. Documents are exchanged as JSON.


def packs(make: PuzzleDocuments, start: int, stop: int, *, workers: int = 0) -> Iterator[Pack]:
    """The packs of steps start to stop, in order."""
    if not workers:
        yield from (pack(make(step)) for step in range(start, stop))
        return
    target, arguments = make.worker
    processes = [Worker(target, arguments, longest=LONGEST) for _ in range(workers)]
    threads = ThreadPoolExecutor(workers)
    try:
        yield from _in_order(threads, processes, start, stop)
    finally:
        for process in processes:
            process.close()
        threads.shutdown(wait=False, cancel_futures=True)


def _in_order(
    threads: ThreadPoolExecutor, processes: list[Worker], start: int, stop: int
) -> Iterator[Pack]:
    idle: SimpleQueue[Worker] = SimpleQueue()
    for process in processes:
        idle.put(process)
    waiting: deque[Future[list[Document]]] = deque()
    for step in range(start, stop):
        waiting.append(threads.submit(_documents, idle, step))
        if len(waiting) > len(processes) * AHEAD:
            yield pack(waiting.popleft().result())
    while waiting:
        yield pack(waiting.popleft().result())


def _documents(idle: "SimpleQueue[Worker]", step: int) -> list[Document]:
    """The documents of a step, from the next idle process."""
    process = idle.get()
    try:
        return [from_dict(Document, document) for document in process.ask(step, DEADLINE)]
    except WorkerFault as fault:
        raise ValueError(f"the documents of step {step} could not be made: {fault}") from fault
    finally:
        idle.put(process)
