"""Packs made ahead of the training step, by other processes; each is a function of its step.

Nothing is remembered between steps, so a resumed run sees the packs that it would have seen, and
it does not matter how many processes make them. Documents come from them as JSON.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol

from sparrow.processes.worker import Worker, WorkerFault
from sparrow.schema.base import from_dict
from sparrow.schema.episode import Document
from sparrow.train.packing import Pack, pack

AHEAD = 3  # packs in the making per worker
DEADLINE = 3600.0  # seconds that the documents of a step may take
LONGEST = 1 << 30  # bytes of them


class DocumentMaker(Protocol):
    """Makes the documents of a step, and says how another process makes the same ones."""

    def __call__(self, step: int) -> list[Document]: ...

    @property
    def worker(self) -> tuple[str, dict[str, Any]]:
        """Target and arguments of a `Worker` that answers a step with its documents."""


def packs(make: DocumentMaker, start: int, stop: int, *, workers: int = 0) -> Iterator[Pack]:
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
    """The documents of a step, from the process that is idle next."""
    process = idle.get()
    try:
        return [from_dict(Document, document) for document in process.ask(step, DEADLINE)]
    except WorkerFault as fault:
        raise ValueError(f"the documents of step {step} could not be made: {fault}") from fault
    finally:
        idle.put(process)
