"""Limits of any environment: whatever it does, every step ends in an observation."""

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparrow.schema.environments import EnvironmentLimits
from sparrow.tasks.base import Example, check_json
from sparrow.tasks.environments.base import Environment, Observation

NOTICES: Mapping[str, str] = {
    "timeout": "The environment gave no answer within {seconds:g} s. This is the end.",
    "failed": "The environment failed. This is the end.",
    "steps": "All {steps} steps are used. This is the end.",
    "shortened": "[{left} more characters are left out]",
}


class Limited:
    """An environment under limits; agents that share it take turns.

    A step that is late, an exception of the environment, or the last step that is allowed ends the
    play: the observation is done, says so, and has "ended" in its info: timeout, failed (with the
    "reason") or steps. After timeout and failed the environment is never called again, not even to
    close it, as a call may still run in it. A text that is too long is shortened at a space, says
    so, and "shortened" in its info is what it lacks.

    Code that blocks the event loop (time.sleep in async code) cannot be stopped: see `Synchronous`.
    """

    def __init__(self, environment: Environment, limits: EnvironmentLimits | None = None) -> None:
        self.environment, self.limits = environment, limits or EnvironmentLimits()
        self.steps = 0
        self._last: Observation | None = None  # of a play that is over
        self._lost = False  # late or failed
        self._turn = asyncio.Lock()

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.environment.tools

    async def reset(self, example: Example) -> Observation:
        """Begin a play, unless the environment is lost."""
        await self._turn.acquire()
        if not self._lost:
            self.steps, self._last = 0, None
        return await self._whole(lambda: self.environment.reset(example))

    async def step(self, action: str) -> Observation:
        """Take one step; of a play that is over, the last observation again, without reward."""
        await self._turn.acquire()
        self.steps += self._last is None
        return await self._whole(lambda: self.environment.step(action))

    async def close(self) -> None:
        """Close the environment after a step under way, unless it is lost; warn if that fails."""
        async with self._turn:
            if self._lost:
                return
            try:
                await self._in_time(self.environment.close)
            except Exception as error:  # of somebody's environment: the play itself is over
                said = f"closing {self.environment!r}: {error!r}"
                warnings.warn(said, RuntimeWarning, stacklevel=2)

    async def _whole(self, call: Callable[[], Awaitable[Observation]]) -> Observation:
        """Observe, in one piece: an agent that is stopped meanwhile does not cut its step short."""
        task = asyncio.ensure_future(self._observed(call))
        task.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(task)

    async def _observed(self, call: Callable[[], Awaitable[Observation]]) -> Observation:
        if self._last is not None:
            return self._last
        try:
            seen = self._shortened(_checked(await self._in_time(call)))
        except TimeoutError:
            seen = self._lose("timeout", f"no answer within {self.limits.seconds:g} s")
        except Exception as error:  # of somebody's environment: anything may be raised
            seen = self._lose("failed", f"{type(error).__name__}: {error}"[:500])
        if not seen.done and self.steps >= self.limits.steps:
            text = f"{seen.text}\n{self._notice('steps')}"
            seen = replace(seen, text=text, done=True, info={**seen.info, "ended": "steps"})
        if seen.done:
            self._last = replace(seen, reward=0.0)
        return seen

    async def _in_time(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await a call; TimeoutError if it is late, even if it does not let itself be cancelled."""
        task = asyncio.ensure_future(_settled(call))
        try:
            await asyncio.wait({task}, timeout=self.limits.seconds)
        finally:
            late = task.cancel()  # False: it has ended
        if late:
            raise TimeoutError
        value, error = task.result()
        if error is not None:
            raise RuntimeError(str(error)) if isinstance(error, TimeoutError) else error
        return value

    def _lose(self, ended: str, reason: str) -> Observation:
        self._lost = True
        return Observation(self._notice(ended), 0.0, True, {"ended": ended, "reason": reason})

    def _shortened(self, seen: Observation) -> Observation:
        most = self.limits.characters
        if len(seen.text) <= most:
            return seen
        kept = seen.text[: most + 1]  # one more: the cut may fall behind a whole word
        kept = kept[: max(kept.rfind(" "), kept.rfind("\n"))].rstrip() or seen.text[:most]
        left = len(seen.text) - len(kept)
        text = f"{kept} {self._notice('shortened', left=left)}"
        return replace(seen, text=text, info={**seen.info, "shortened": left})

    def _notice(self, what: str, **values: Any) -> str:
        words: Mapping[str, str] = {**NOTICES, **getattr(self.environment, "notices", {})}
        return words[what].format(**dict(self.limits), **values)


async def _settled(call: Callable[[], Awaitable[Any]]) -> tuple[Any, Exception | None]:
    """Return what a call returns or raises."""
    try:
        return await call(), None
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the last two are not ours
        return None, error if isinstance(error, Exception) else RuntimeError(repr(error))


def _checked(seen: Any) -> Observation:
    if not isinstance(seen, Observation) or not isinstance(seen.text, str):
        raise ValueError(f"expected an Observation with a text, got {seen!r:.80}")
    check_json([seen.text, seen.reward, seen.done, dict(seen.info)], "an observation")
    return seen
