"""The standard shape of an environment: reset to a row, then steps, each an action in text.

environment = open_environment("crafting")
seen = await environment.reset(example)
while not seen.done:
    seen = await environment.step(await reply(seen.text))
await environment.close()
"""

import threading
from abc import ABC, abstractmethod
from asyncio import wrap_future
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from sparrow.tasks.base import END_THINK, Example

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Observation:
    """What an agent reads after its action.

    reward: of this step alone. info: JSON data, which the agent does not read.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """A world that an agent acts in, one play at a time.

    An action is text, and what a wrong one does is an observation, not an exception. Where there
    are `tools` (OpenAI function schemas), an action is a call as JSON, with name and arguments.
    An environment for models that do not read English also has `notices` (see `Limited`).
    """

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    async def reset(self, example: Example) -> Observation:
        """Begin the play of a row; all that is drawn comes from the row, such as its seed."""

    async def step(self, action: str) -> Observation: ...

    async def close(self) -> None: ...


class Synchronous(ABC):
    """An environment over a package without async: its calls run in threads, one at a time.

    A thread cannot be killed. One that is late is abandoned: it goes on, and may keep a core busy,
    but nobody waits for it, and `Limited` never calls the environment again.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    async def reset(self, example: Example) -> Observation:
        return await in_thread(lambda: self.begin(example))

    async def step(self, action: str) -> Observation:
        return await in_thread(lambda: self.act(action))

    async def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Release what it holds."""

    @abstractmethod
    def begin(self, example: Example) -> Observation: ...

    @abstractmethod
    def act(self, action: str) -> Observation: ...


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread of its own, which does not keep the program from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # sys.exit of a package: it would end the event loop
            future.set_exception(RuntimeError(f"it raised {error!r}"))

    threading.Thread(target=run, daemon=True).start()
    return await wrap_future(future)


def without_thoughts(said: str) -> str:
    """Return what follows the thoughts of a reply, if there are any."""
    return said.rpartition(END_THINK)[2].strip()


class RowKey(NamedTuple):
    """What a generated row is a function of."""

    family: str
    seed: int
    length: int

    @classmethod
    def of(cls, example: Example) -> "RowKey":
        """Read it from the ground truth; ValueError if the row was not generated."""
        truth = example.ground_truth
        if not isinstance(truth, Mapping) or not {*cls._fields} <= {*truth}:
            raise ValueError(
                f"{example.id}: expected a ground truth with family, seed and length, "
                f"got {truth!r:.80}"
            )
        return cls(str(truth["family"]), truth["seed"], truth["length"])
