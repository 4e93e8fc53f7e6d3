"""Hostile programs in the default sandbox: every kind is stopped, each layer stops its own.

`bench/sandbox_attacks.py` runs thousands of variants of them.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator

import pytest
from support.hostile import KINDS
from support.hostile.aims import (
    aims,
    end_processes,
    look,
    orphans,
    own_user,
    remove_files,
    settled,
)
from support.hostile.forgeries import FORGERIES
from support.hostile.kinds import Kind, complete
from support.hostile.layers import ALONE
from support.hostile.mutations import variant
from support.hostile.running import run_kind, run_source

from sparrow.sandbox.base import Limits
from sparrow.sandbox.bubblewrap import LAYERS, Bubblewrap, landlock_version
from sparrow.sandbox.unsafe import Unsafe
from sparrow.schema.code import CodeConfig
from sparrow.tasks.code.problems import parse_problem
from sparrow.tasks.code.running import ProgramJudge

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
# In the ordinary tier: something of each category; the others take a minute and are slow tests.
QUICK = (
    "tcp",
    "udp",
    "socket with a path",
    "every family of sockets",
    "the canary file, by many names",
    "a new file outside",
    "environments of processes",
    "devices",
    "fork",
    "fork and clone by raw calls",
    "subprocess, system, popen and posix_spawn",
    "signals to processes outside",
    "signals to the parent",
    "ptrace",
    "unshare",
    "mount",
    "prctl",
    "a filter of its own",
    "every other call, once",
    "memory by mmap and brk",
    "memory in pipes",
    "output to both from threads",
    "descriptors",
    "streams closed, and on it goes",
    "stopped by itself",
    "segmentation fault",
    "the harness replaced",
    "the streams replaced",
    "source that is too deep",
    "calls: other JSON",
    "calls: the channel taken",
)


@pytest.fixture(scope="module", autouse=True)
def user() -> Iterator[int | None]:
    """Who the programs run as."""
    with own_user() as found:
        yield found


def _marked(kind: Kind, *, slow: bool) -> object:
    marks = [pytest.mark.slow] if slow else []
    if kind.finding:
        marks.append(pytest.mark.xfail(reason=kind.finding, strict=True))
    return pytest.param(kind, id=kind.name, marks=marks)


@pytest.mark.parametrize(
    "kind", [_marked(kind, slow=kind.name not in QUICK) for kind in KINDS.values()]
)
def test_every_kind_is_stopped_and_leaves_nothing(kind: Kind, user: int | None) -> None:
    sandbox = Bubblewrap()
    with aims() as aim:
        known = (aim.canaries.victim.pid,)
        before = look(user, known)
        tried = run_kind(sandbox, kind, aim)
        assert not tried.problem, tried.outcome
        assert not aim.trace()
        assert not settled(before, user, known)


def test_nobody_else_has_to_wait_for_processes(user: int | None) -> None:
    if user is None:
        pytest.skip("orphans are known by their user")
    before = look(user)
    earlier = len(orphans)
    for source in ("print(1)", "import os; os._exit(3)", "import ctypes; ctypes.string_at(0)"):
        Bubblewrap().start(source, "script", Limits()).finish()
    assert not settled(before, user)
    assert len(orphans) == earlier


def test_closed_streams_do_not_hide_a_program_from_the_clock() -> None:
    """Without bwrap's processes, which hold the streams, nothing would be left to wait for."""
    limits = Limits(cpu_seconds=5, wall_seconds=0.5)
    source = "import os, time; os.closerange(0, 64); time.sleep(4)"
    begun = time.monotonic()
    outcome = Unsafe().start(source, "script", limits).finish()
    assert outcome.ending == "wall"
    assert time.monotonic() - begun < 3


def test_ending_twice_is_harmless() -> None:
    running = Bubblewrap().start("print(1)", "script", Limits())
    first = running.finish()
    with open(os.devnull) as other:  # takes the number of a descriptor that was closed
        assert running.end() == first
        os.fstat(other.fileno())


def test_a_program_that_cannot_be_started_leaves_no_descriptor() -> None:
    sandbox = Bubblewrap()
    sandbox.start("pass", "script", Limits()).finish()
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(ValueError):
        sandbox.start("x = '\ud800'", "script", Limits()).finish()
    assert len(os.listdir("/proc/self/fd")) == before


# Each layer with the others off.


def _alone() -> Iterator[object]:
    for layer, names in ALONE.items():
        for kind in map(KINDS.__getitem__, names):
            quick = kind.name in QUICK and not kind.slow
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(kind, layer, id=f"{layer}: {kind.name}", marks=marks)


@pytest.mark.parametrize(("kind", "layer"), list(_alone()))
def test_a_layer_alone_stops_what_it_is_there_for(kind: Kind, layer: str, user: int | None) -> None:
    if kind.reckless and user is None and layer != "namespaces":
        pytest.skip("would hit other processes of this user")
    if layer == "landlock" and not landlock_version():
        pytest.skip("this kernel has no landlock")
    sandbox = Bubblewrap(without=frozenset(LAYERS) - {layer})
    with aims() as aim:
        tried = run_kind(sandbox, kind, aim)
        trace = aim.trace()
        end_processes(user, (aim.canaries.victim.pid,))
        remove_files(user)
    assert not tried.problem, tried.outcome
    assert not trace


@pytest.mark.parametrize("name", ["tcp", "the canary file, by many names", "memfd"])
def test_these_kinds_get_through_where_no_layer_is(name: str, user: int | None) -> None:
    """The attacks are real: without layers they succeed."""
    sandbox = Bubblewrap(without=frozenset(LAYERS))
    with aims() as aim:
        tried = run_kind(sandbox, KINDS[name], aim)
        trace = aim.trace()
        remove_files(user)
    assert tried.problem or trace


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_variants_are_stopped_and_leave_nothing(seed: int, user: int | None) -> None:
    sandbox = Bubblewrap()
    kinds = [kind for kind in KINDS.values() if not kind.finding and not kind.slow]
    with aims() as aim:
        known = (aim.canaries.victim.pid,)
        before = look(user, known)
        for number in range(20 if seed == 0 else 100):
            one = variant(number, seed, aim.values(), kinds)
            tried = run_source(sandbox, one.source, one.mode, one.limits, one.endings, aim.marker)
            assert not tried.problem, (one.name, tried.outcome)
        assert not aim.trace()
        assert not settled(before, user, known)


def test_variants_are_the_same_for_a_seed_and_a_number() -> None:
    aim = {"marker": "x"}
    assert variant(7, 3, aim) == variant(7, 3, aim)
    assert variant(7, 3, aim).source != variant(8, 3, aim).source


def test_there_are_many_kinds_that_are_python_or_meant_not_to_be() -> None:
    assert len(KINDS) >= 60
    broken = []
    for kind in KINDS.values():
        if len(kind.source) > 100_000:
            continue
        try:
            compile(complete(kind.source, {}), kind.name, "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            broken.append(kind.name)
    assert all(name.startswith("source ") for name in broken), broken


# Solutions that are wrong and try to pass.

QUICK_FORGERIES = ("by hand", "run a source", "equal to everything (", "large numbers", "nonces")


def _forgeries() -> Iterator[object]:
    for name, problem, solution in FORGERIES:
        marks = [] if any(part in name for part in QUICK_FORGERIES) else [pytest.mark.slow]
        yield pytest.param(problem, solution, id=name, marks=marks)


@pytest.mark.parametrize(("problem", "solution"), list(_forgeries()))
def test_a_forged_verdict_wins_nothing(problem: dict[str, object], solution: str) -> None:
    config = CodeConfig(cpu_seconds=1, wall_seconds=5.0, memory_mib=128, output_kib=64)
    judge = ProgramJudge(sandbox=Bubblewrap(), config=config)
    descriptors = len(os.listdir("/proc/self/fd"))
    verdict = judge(solution, parse_problem(problem))
    assert (verdict.score, verdict.acc) == (0.0, 0.0)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
