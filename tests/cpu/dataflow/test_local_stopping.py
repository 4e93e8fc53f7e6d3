"""Ctrl-C as a wish."""

import asyncio
import os
import signal

import pytest

from sparrow.dataflow.stopping import GracefulShutdown, Stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_is_a_wish_and_the_second_an_order(number: signal.Signals) -> None:
    outside = signal.signal(number, signal.default_int_handler)  # under nohup SIGHUP is ignored
    try:
        _check_twice(number)
    finally:
        signal.signal(number, outside)


def _check_twice(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with GracefulShutdown() as stopping:
        assert not stopping.requested
        os.kill(os.getpid(), number)
        assert stopping.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulShutdown() as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopping.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_work_is_cancelled_and_cleans_up_before_it_ends() -> None:
    done: list[str] = []

    async def long() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            done.append("cleaned up")

    with GracefulShutdown() as stopping, pytest.raises(Stopped):
        asyncio.run(stopping.run_until_stopped(long()))
    assert done == ["cleaned up"]


def test_work_that_is_done_counts_and_its_faults_are_its_own() -> None:
    async def quick() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 7

    async def broken() -> int:
        raise KeyError("own")

    with GracefulShutdown() as stopping:
        assert asyncio.run(stopping.run_until_stopped(quick())) == 7, "nothing is thrown away"
        assert stopping.requested
    with pytest.raises(KeyError, match="own"):
        asyncio.run(GracefulShutdown().run_until_stopped(broken()))
