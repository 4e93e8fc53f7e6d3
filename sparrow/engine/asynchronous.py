"""An asyncio interface to the engine, which steps in a thread: for many concurrent episodes.

    async with AsyncEngine(engine) as rollouts:
        completions = await rollouts.generate(ids, params)
        async for token in rollouts.stream(ids, params): ...

Coroutines may add, await and abort at any time; what they ask is done between steps. Leaving the
block aborts what is left.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from sparrow.engine.engine import Engine
from sparrow.engine.loop import Output
from sparrow.engine.weights import Items
from sparrow.schema.sampling import Completion, SamplingParams

T = TypeVar("T")
# A burst of commands ends after this many seconds without one, for each that has come; at most so
# many: an event loop that reads hundreds of requests pauses between them. And after BURST at most.
QUIET, MOST_QUIET, BURST = 0.002, 0.01, 0.25

Command = tuple[Callable[[], Any], Future[Any]]  # what to do between steps, and who waits for it
# Where the outputs of a request go; an error is the last.
Listener = asyncio.Queue[Output | BaseException]


class _Refused(Exception):
    """Delivered instead of outputs where the engine did not take a request; the cause is why."""


async def _arrived(listener: Listener) -> list[Output]:
    """Wait for an output; return all that are there by then."""
    outputs = [await listener.get()]
    while not listener.empty():
        outputs.append(listener.get_nowait())
    arrived = []
    for output in outputs:
        if isinstance(output, _Refused):
            raise output.args[0]
        if isinstance(output, BaseException):
            raise RuntimeError("the engine has failed") from output
        arrived.append(output)
    return arrived


def _joined(outputs: Sequence[Output]) -> list[Output]:
    """One output for each sample; of one that began anew, what came since."""
    if len(outputs) == 1:
        return list(outputs)
    joined: dict[int, Output] = {}
    for output in outputs:
        before = joined.get(output.sample)
        if before is not None and before.restarts == output.restarts:
            output = output._replace(
                tokens=[*before.tokens, *output.tokens],
                logprobs=[*before.logprobs, *output.logprobs],
                top=[*before.top, *output.top],
            )
        joined[output.sample] = output
    return list(joined.values())


class AsyncEngine:
    """Steps one engine in a thread while it is entered; nothing else may step it then."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Command | None] = SimpleQueue()  # None: the end
        self._listeners: dict[int, Listener] = {}  # touched by the engine's thread alone
        self._ending = threading.Lock()
        self._ended = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> "AsyncEngine":
        if self._thread is not None:
            raise ValueError("the asynchronous engine has been entered already")
        if self._engine.owned:
            raise ValueError("another asynchronous engine steps this engine already")
        self._engine.owned = True
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="sparrow-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._thread is not None
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def running(self) -> bool:
        """Whether the engine's thread takes commands."""
        return self._thread is not None and not self._ended

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, **settings: Any
    ) -> list[Completion]:
        """Return the completions of one prompt, by sample; `settings` are those of `Engine.add`.

        A coroutine that is cancelled while it waits aborts its request.
        """
        done: dict[int, Completion] = {}
        async for output in self.stream(prompt, params, **settings, streamed=False):
            if output.completion is not None:
                done[output.sample] = output.completion
        return [done[sample] for sample in sorted(done)]

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        **settings: Any,
    ) -> AsyncIterator[Output]:
        """Yield the outputs of one prompt as they are drawn, or at the interval of `Engine.add`.

        Those of a sample that come while the caller does something else are joined.
        """
        listener: Listener = asyncio.Queue()

        def add() -> int:
            number = self._engine.add(prompt, params, **settings)
            self._listeners[number] = listener
            return number

        def tell(added: "Future[int]") -> None:  # of a refusal alone: that costs a wake-up
            if not added.cancelled() and (error := added.exception()) is not None:
                self._deliver([(listener, _Refused(error))])

        self._require_own_loop()
        added = self._submit(add)
        added.add_done_callback(tell)
        left = params.n
        try:
            while left:
                for output in _joined(await _arrived(listener)):
                    left -= output.completion is not None
                    yield output
        finally:
            if left:
                added.add_done_callback(self._forget)

    def abort(self, request: int, sample: int | None = None) -> None:
        """Abort a request, or one sample of it, whose completion then comes as it is."""
        with suppress(RuntimeError):  # the engine has ended, and the request with it
            self._submit(lambda: self._engine.abort(request, sample))

    async def run(self, work: Callable[[Engine], T]) -> T:
        """Run a function of the engine between steps: update weights, reschedule, sleep."""
        self._require_own_loop()
        return await asyncio.shield(asyncio.wrap_future(self._submit(lambda: work(self._engine))))

    async def update(self, items: Items, **settings: Any) -> int:
        """Load new weights between steps; `settings` are those of `Engine.update`."""
        return await self.run(lambda engine: engine.update(items, **settings))

    def _require_own_loop(self) -> None:
        if self._thread is not None and asyncio.get_running_loop() is not self._loop:
            raise ValueError("the asynchronous engine belongs to the event loop that entered it")

    def _forget(self, added: "Future[int]") -> None:
        """Abort a request whose caller has gone, once its id is known."""
        if added.cancelled() or added.exception() is not None:
            return
        number = added.result()

        def abort() -> None:
            self._listeners.pop(number, None)
            self._engine.abort(number)

        with suppress(RuntimeError):  # the engine has ended, and the request with it
            self._submit(abort)

    def _submit(self, work: Callable[[], T]) -> "Future[T]":
        """Queue a command for the engine's thread, which runs it between steps."""
        if self._thread is None:
            raise ValueError("enter the asynchronous engine first: async with AsyncEngine(engine)")
        future: Future[T] = Future()
        with self._ending:
            if self._ended:
                raise RuntimeError("the asynchronous engine has ended") from self._failure
            self._commands.put((work, future))
        return future

    # The engine's thread.

    def _run(self) -> None:
        device = self._engine.model.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread starts on the first one
            while self._run_commands():
                listeners, running = self._listeners, self._engine.loop.requests
                outputs = self._engine.step()
                due = [(listeners[o.request], o) for o in outputs if o.request in listeners]
                self._deliver(due)
                for output in outputs:
                    if output.completion is not None and output.request not in running:
                        listeners.pop(output.request, None)
        except BaseException as error:  # of a thread: handed to whoever waits, or it is lost
            self._failure = error
        finally:
            self._close()

    def _run_commands(self) -> bool:
        """Run queued commands until there is a step to run; False when the engine closes.

        An engine that was idle first waits for the rest of a burst: prompts that come together
        are computed together.
        """
        until, arrived = 0.0, 0
        while True:
            waits = self._engine.idle or not self._engine.ready
            if not waits and self._commands.empty() and time.monotonic() >= until:
                return True
            try:
                quiet = min(QUIET * arrived, MOST_QUIET)
                command = self._commands.get(timeout=None if waits else quiet)
            except Empty:
                return True
            if waits:
                until, arrived = time.monotonic() + BURST, 0
            arrived += 1
            if command is None:
                return False
            work, future = command
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:  # raised again where it was asked for
                    future.set_exception(error)

    def _deliver(self, outputs: Sequence[tuple[Listener, Output | BaseException]]) -> None:
        """Hand outputs over to the event loop: one call of it a step, however many there are."""

        def deliver() -> None:
            for listener, output in outputs:
                listener.put_nowait(output)

        if outputs:
            with suppress(RuntimeError):  # the caller's event loop has been closed
                self._loop.call_soon_threadsafe(deliver)

    def _close(self) -> None:
        """Abort all requests and refuse queued commands, so that no caller waits for ever."""
        gone = self._failure or RuntimeError("the asynchronous engine was left")
        with self._ending:
            self._ended = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(gone)
        self._deliver([(listener, gone) for listener in self._listeners.values()])
        self._listeners.clear()
        self._engine.loop.abandon(list(self._engine.loop.requests))
        self._engine.owned = False
