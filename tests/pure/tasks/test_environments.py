"""The shape of environments, and limits that hold whatever an environment does."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow.functions import register
from sparrow.schema.environments import EnvironmentLimits
from sparrow.tasks.base import Example, encode
from sparrow.tasks.environments import (
    Environment,
    Limited,
    Observation,
    Synchronous,
    open_environment,
)
from sparrow.tasks.environments.crafting import Crafting, CraftingEnvironment
from sparrow.tasks.environments.opening import SETTING

ROOT = Path(__file__).parents[3]
EXAMPLE = Example(id="a", source="", prompt="?", ground_truth=None)
SHORT = EnvironmentLimits(seconds=0.05)


class Echo:
    """Says what it is told, or does what it is asked to."""

    tools = ()

    def __init__(self, **does: Callable[[], Any]) -> None:
        self.does, self.calls = does, list[str]()

    async def _do(self, call: str, text: str) -> Any:
        self.calls.append(call)
        return await self.does[call]() if call in self.does else Observation(text)

    async def reset(self, example: Example) -> Any:
        return await self._do("reset", str(example.prompt))

    async def step(self, action: str) -> Any:
        return await self._do("step", action)

    async def close(self) -> Any:
        return await self._do("close", "")


def play(environment: Any, actions: list[str], limits: EnvironmentLimits | None = None) -> Any:
    """All observations, and what is left of the environment."""

    async def run() -> list[Observation]:
        limited = Limited(environment, limits)
        seen = [await limited.reset(EXAMPLE)]
        seen += [await limited.step(action) for action in actions]
        await limited.close()
        return seen

    return asyncio.run(asyncio.wait_for(run(), 20))


async def forever() -> Any:
    await asyncio.Event().wait()


async def stubborn() -> Any:
    """Does not let itself be cancelled, for a while."""
    begun = time.monotonic()
    while time.monotonic() < begun + 0.3:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
    return Observation("too late")


async def fails() -> Any:
    raise ValueError("the world is broken")


def test_an_environment_within_its_limits_is_itself() -> None:
    environment = Echo()
    seen = play(environment, ["a", "b"])
    assert seen == [Observation("?"), Observation("a"), Observation("b")]
    assert environment.calls == ["reset", "step", "step", "close"]
    assert isinstance(Limited(environment), Environment)


@pytest.mark.parametrize("late", [forever, stubborn])
@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_late_call_ends_the_play(late: Any, call: str) -> None:
    environment = Echo(**{call: late})
    seen = play(environment, ["a", "b"], SHORT)
    ended = seen[0 if call == "reset" else 1]
    assert ended == seen[-1]
    assert (ended.done, ended.reward, ended.info["ended"]) == (True, 0, "timeout")
    assert "0.05 s" in ended.text
    assert environment.calls == (["reset"] if call == "reset" else ["reset", "step"])


@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_exception_ends_the_play(call: str) -> None:
    environment = Echo(**{call: fails})
    ended = play(environment, ["a", "b"])[-1]
    assert (ended.done, ended.info["ended"]) == (True, "failed")
    assert ended.info["reason"] == "ValueError: the world is broken"
    assert environment.calls == (["reset"] if call == "reset" else ["reset", "step"])


def test_whatever_is_raised_or_returned() -> None:
    async def leaves() -> Any:
        raise SystemExit(3)

    async def cancels() -> Any:
        raise asyncio.CancelledError

    async def gives_up() -> Any:
        raise TimeoutError("of its own")

    def gives(value: Any) -> Any:
        async def give() -> Any:
            return value

        return give

    bad = [
        None,
        "text",
        Observation(5),
        Observation("", float("nan")),
        Observation("", info={1: 2}),
    ]
    bad += [Observation("", info={"a": object()}), Observation("\ud800"), Observation("", "1", 5j)]
    for does in (leaves, cancels, gives_up, *map(gives, bad)):
        ended = play(Echo(step=does), ["a"])[-1]
        assert (ended.done, ended.reward, ended.info["ended"]) == (True, 0, "failed"), does
        assert ended.info["reason"]


def test_steps_end_and_the_last_one_counts() -> None:
    environment = Echo()
    seen = play(environment, ["a", "b", "c", "d"], EnvironmentLimits(steps=2))
    assert [one.done for one in seen] == [False, False, True, True, True]
    assert seen[2].text == "b\nAll 2 steps are used. This is the end."
    assert seen[2].info == {"ended": "steps"}
    assert environment.calls.count("step") == 2

    async def wins() -> Any:
        return Observation("won", 1.0, True)

    won = play(Echo(step=wins), ["a", "b"], EnvironmentLimits(steps=1))
    assert won[1:] == [Observation("won", 1.0, True), Observation("won", 0.0, True)]


def test_a_new_play_begins_with_all_steps_but_not_in_a_lost_environment() -> None:
    async def run() -> None:
        limited = Limited(Echo(), EnvironmentLimits(steps=1))
        for _ in range(2):
            assert not (await limited.reset(EXAMPLE)).done
            assert (await limited.step("a")).info["ended"] == "steps"
        lost = Limited(Echo(step=fails))
        await lost.reset(EXAMPLE)
        await lost.step("a")
        assert (await lost.reset(EXAMPLE)).info["ended"] == "failed"

    asyncio.run(run())


def test_a_shortened_text_says_so() -> None:
    limits = EnvironmentLimits(characters=10)
    for text, kept in (
        ("0123456789", "0123456789"),
        ("x12 x3 x45 x6", "x12 x3 x45 [3 more characters are left out]"),
        ("x12 x3 x456", "x12 x3 [5 more characters are left out]"),
        ("01234567890", "0123456789 [1 more characters are left out]"),
        (" " * 11, "           [1 more characters are left out]"),
    ):
        seen = play(Echo(), [text], limits)[-1]
        assert seen.text == kept
        assert not seen.done
        assert ("shortened" in seen.info) == (text != kept)


def test_notices_are_in_the_language_of_the_environment() -> None:
    """A model of the puzzle language can read nothing else."""
    row = Crafting(depth=2).row(0, 1)
    truth = {"family": row.family, "seed": 0, "length": 1}
    example = Example(id="a", source="", prompt="", ground_truth=truth)

    async def run(limits: EnvironmentLimits, breaks: bool = False) -> Observation:
        environment = CraftingEnvironment()
        limited = Limited(environment, limits)
        await limited.reset(example)
        if breaks:
            environment.parse = 5
        return await limited.step("find x1" if breaks else f"find {row.data['goal']}")

    for limits, breaks, info in (
        (EnvironmentLimits(characters=20), False, "shortened"),
        (EnvironmentLimits(steps=1), False, "ended"),
        (EnvironmentLimits(), True, "ended"),
    ):
        seen = asyncio.run(run(limits, breaks))
        assert info in seen.info
        encode(seen.text)


def test_a_failing_close_is_a_warning() -> None:
    for does, limits in ((fails, None), (forever, SHORT)):
        with pytest.warns(RuntimeWarning, match="closing"):
            play(Echo(close=does), ["a"], limits)


def test_agents_take_turns_and_one_that_stops_does_not_cut_a_step_short() -> None:
    inside: list[str] = []

    async def slow() -> Any:
        inside.append("begin")
        await asyncio.sleep(0.02)
        inside.append("end")
        return Observation("ok")

    async def run() -> None:
        limited = Limited(Echo(step=slow))
        await limited.reset(EXAMPLE)
        agents = [asyncio.create_task(limited.step("a")) for _ in range(3)]
        await asyncio.sleep(0.01)
        agents[0].cancel()  # in its step
        agents[1].cancel()  # before it
        await asyncio.gather(*agents, return_exceptions=True)
        assert [agent.cancelled() for agent in agents] == [True, True, False]
        assert limited.steps == 2
        assert (await limited.step("b")).text == "ok"

    asyncio.run(run())
    assert inside == ["begin", "end"] * 3


# Packages without async.


class Sleepy(Synchronous):
    """Blocks its thread at every action but 'awake'."""

    def __init__(self) -> None:
        self.wake, self.threads = threading.Event(), list[int]()

    def begin(self, example: Example) -> Observation:
        return Observation("good night")

    def act(self, action: str) -> Observation:
        self.threads.append(threading.get_ident())
        if action == "exit":
            sys.exit(1)
        if action != "awake":
            self.wake.wait()
        return Observation("awake", 1.0)


def test_a_late_thread_is_abandoned() -> None:
    environment = Sleepy()
    begun = time.monotonic()
    seen = play(environment, ["awake", "sleep", "awake"], EnvironmentLimits(seconds=0.3))
    assert time.monotonic() - begun < 10
    assert [one.info.get("ended") for one in seen] == [None, None, "timeout", "timeout"]
    assert len(environment.threads) == 2
    assert threading.get_ident() not in environment.threads
    environment.wake.set()  # it returns into a loop that is closed: nothing happens
    assert play(Sleepy(), ["exit"])[-1].info["reason"] == "RuntimeError: it raised SystemExit(1)"


def test_a_program_ends_though_a_thread_hangs() -> None:
    code = """
import asyncio, time
from sparrow.tasks.base import Example
from sparrow.tasks.environments import EnvironmentLimits, Limited, Observation, Synchronous

class Hangs(Synchronous):
    def begin(self, example): time.sleep(3600)
    def act(self, action): return Observation("")

example = Example(id="a", source="", prompt="?", ground_truth=None)
print(asyncio.run(Limited(Hangs(), EnvironmentLimits(seconds=0.1)).reset(example)).info["ended"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "timeout\n"


# Names.


def test_environments_by_name(tmp_path: Path) -> None:
    assert isinstance(open_environment("crafting"), CraftingEnvironment)
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    tools = ()\n"
        "    def __init__(self, size): self.size = size\n"
        "    async def reset(self, example): ...\n"
        "    async def step(self, action): ...\n"
        "    async def close(self): ...\n"
    )
    mine: Any = open_environment(f"{tmp_path}/mine.py:Mine", size=5)
    assert mine.size == 5
    here = register(Echo, SETTING)
    assert isinstance(open_environment(here), Echo)


def test_names_of_nothing() -> None:
    for name, settings, message in (
        (
            "chess",
            {},
            "expected crafting, gym/NAME, textarena/NAME or module:function, got 'chess'",
        ),
        ("crafting", {"depth": 3}, "expected no settings, got depth"),
        ("json:dumps", {"obj": 1}, "reset, step and close, got str"),
        ("nowhere_at_all:f", {}, "nowhere_at_all"),
    ):
        with pytest.raises(ValueError, match=message):
            open_environment(name, **settings)
