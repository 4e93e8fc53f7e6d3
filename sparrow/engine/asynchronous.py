"""The engine for many episodes at once: an asyncio face on one engine that steps in a thread.

    async with AsyncEngine(engine) as rollouts:
        completions = await rollouts.generate(ids, params)
        async for token in rollouts.stream(ids, params): ...

Coroutines may add, await and abort at any time; what they ask is done between steps. Leaving the
block aborts what is left.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from sparrow.engine.engine import Engine
from sparrow.engine.loop import Output
from sparrow.records import Completion, SamplingParams

T = TypeVar("T")


class AsyncEngine:
    """Owns an engine while it is entered; nobody else may step it then."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._listeners: dict[int, asyncio.Queue[Output | BaseException]] = {}
        self._wanted = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> "AsyncEngine":
        if self._thread is not None:
            raise ValueError("the asynchronous engine has been entered already")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="sparrow-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._thread is not None
        with self._wanted:
            self._closing = True
            self._wanted.notify()
        await asyncio.to_thread(self._thread.join)

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, **settings: Any
    ) -> list[Completion]:
        """The completions of one prompt, by sample; `settings` are those of `Engine.add`.

        A coroutine that is cancelled while it waits aborts its request.
        """
        done: dict[int, Completion] = {}
        async for output in self._outputs(prompt, params, settings):
            if output.completion is not None:
                done[output.sample] = output.completion
        return [done[sample] for sample in sorted(done)]

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, **settings: Any
    ) -> AsyncIterator[Output]:
        """What each step brings for one prompt, as it comes."""
        async for output in self._outputs(prompt, params, settings):
            yield output

    async def run(self, work: Callable[[Engine], T]) -> T:
        """Do something with the engine between steps: update weights, load an adapter, sleep."""
        return await self._order(lambda: work(self._engine))

    async def _outputs(
        self, prompt: Sequence[int], params: SamplingParams, settings: dict[str, Any]
    ) -> AsyncIterator[Output]:
        queue: asyncio.Queue[Output | BaseException] = asyncio.Queue()

        def add() -> int:
            number = self._engine.add(prompt, params, **settings)
            self._listeners[number] = queue
            return number

        number = await self._order(add)
        left = params.n
        try:
            while left:
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise RuntimeError("the engine has failed") from output
                left -= output.completion is not None
                yield output
        finally:
            if left:
                self._give_up(number)

    async def _order(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do this between steps, and wait for it."""
        if self._thread is None:
            raise ValueError("enter the asynchronous engine first: async with AsyncEngine(engine)")
        future: Future[T] = Future()
        self._place(work, future)
        return await asyncio.wrap_future(future)

    def _give_up(self, number: int) -> None:
        """Abort without waiting: the caller is being cancelled."""

        def abort() -> None:
            self._listeners.pop(number, None)
            self._engine.abort(number)

        if self._failure is None and not self._closing:
            self._place(abort, Future())

    def _place(self, work: Callable[[], Any], future: "Future[Any]") -> None:
        with self._wanted:
            if self._closing or self._failure is not None:
                raise RuntimeError("the asynchronous engine has ended") from self._failure
            self._orders.append((work, future))
            self._wanted.notify()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while self._serve_orders():
                if not self._engine.idle and not self._engine.asleep:
                    for output in self._engine.step():
                        self._tell(output)
        except BaseException as error:  # handed to whoever waits, never lost
            self._fail(error)
        finally:
            self._close()

    def _serve_orders(self) -> bool:
        """Do what was asked; wait while there is nothing to do; False at the end."""
        with self._wanted:
            while not (self._orders or self._closing or self._busy()):
                self._wanted.wait()
            orders, self._orders = self._orders, deque()
        for work, future in orders:
            try:
                future.set_result(work())
            except Exception as error:  # it belongs to whoever asked
                future.set_exception(error)
        return not self._closing

    def _busy(self) -> bool:
        return not (self._engine.idle or self._engine.asleep)

    def _tell(self, output: Output) -> None:
        queue = self._listeners.get(output.request)
        if queue is not None:
            self._loop.call_soon_threadsafe(queue.put_nowait, output)

    def _fail(self, error: BaseException) -> None:
        with self._wanted:
            self._failure = error
        for queue in self._listeners.values():
            self._loop.call_soon_threadsafe(queue.put_nowait, error)

    def _close(self) -> None:
        """Nobody waits for ever: requests are aborted and orders refused."""
        gone = self._failure or RuntimeError("the asynchronous engine was left")
        for _, future in self._orders:
            future.set_exception(gone)
        if self._failure is None:
            for number, queue in self._listeners.items():
                self._engine.abort(number)
                self._loop.call_soon_threadsafe(queue.put_nowait, gone)
