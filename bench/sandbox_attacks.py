"""Hostile programs against a sandbox: kinds of attacks, and thousands of variants of them.

    python bench/sandbox_attacks.py --runs 10000                 # after all kinds as they are
    python bench/sandbox_attacks.py --runs 5000 --first 5000     # goes on where another stopped
    python bench/sandbox_attacks.py --layers                     # which layer stops what
    python bench/sandbox_attacks.py --forgeries                  # wrong solutions that try to pass
    python bench/sandbox_attacks.py --judges 100                 # judges that are killed

Variants are drawn from a seed and a number. After every wave: no marker was printed, no canary was
touched; no process, zombie, descriptor or file is left. Kinds with a known finding get through and
are counted apart (`--open` takes them into the variants too), as are those that a backend answers
in its own way. Prints a line of JSON at the end; exit
code 1 if anything else got through.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "")]

from support.hostile import KINDS  # noqa: E402
from support.hostile.aims import (  # noqa: E402
    aims,
    end_processes,
    look,
    orphans,
    own_user,
    remove_files,
    settled,
)
from support.hostile.backends import HARMLESS  # noqa: E402
from support.hostile.kinds import Kind  # noqa: E402
from support.hostile.mutations import Variant, variant  # noqa: E402
from support.hostile.running import Tried, run_kind, run_source  # noqa: E402

from sparrow.sandbox.base import Limits, Sandbox, SandboxRefused  # noqa: E402
from sparrow.sandbox.bubblewrap import LAYERS, Bubblewrap  # noqa: E402

HUNG_SECONDS = 90.0
START = """
import sys, time
sys.path[:0] = {paths!r}
import sparrow.sandbox.bubblewrap as module
module.sandbox_user = lambda: {user!r}
sandbox = module.Bubblewrap()
held = [sandbox.start("import time; time.sleep(1000)", "script", module.Limits())]
print("started", flush=True)
while True:
    held.append(sandbox.start("while True: pass", "script", module.Limits()))
    time.sleep({pause!r})
    held.append(sandbox.start("import os, time; os.closerange(0, 9); time.sleep(99)", "calls", module.Limits()))
    held = held[-12:]
"""  # noqa: E501


class Report:
    """What got through, and counts."""

    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []
        self.known: Counter[str] = Counter()
        self.counts: dict[str, Counter[str]] = {}

    def count(self, kind: Kind, tried: Tried) -> None:
        ending = "refused" if tried.outcome is None else tried.outcome.ending
        self.counts.setdefault(kind.category, Counter())[ending] += 1

    def add(self, name: str, problem: str, source: str = "", *, known: bool = False) -> None:
        if known:
            self.known[f"{name}: {problem}"] += 1
            return
        print(f"GOT THROUGH: {name}: {problem}", flush=True)
        self.found.append({"name": name, "problem": problem, "source": source[-20_000:]})


def is_harmless(sandbox: Sandbox, kinds: Sequence[Kind]) -> bool:
    """Whether a backend answers one of these kinds in its own way."""
    return any(kind.name in HARMLESS.get(sandbox.name, {}) for kind in kinds)


def open_backend(name: str) -> Sandbox:
    """The backend of that name, without its self-test: this is a longer one."""
    from sparrow.sandbox.backends import open_sandbox

    return open_sandbox(name, test=False)  # type: ignore[arg-type]


def run_kinds(sandbox: Sandbox, user: int | None, report: Report, kinds: list[Kind]) -> None:
    """Every kind once, as it is, one after the other."""
    for kind in kinds:
        with aims() as aim:
            known = (aim.canaries.victim.pid,)
            before = look(user, known)
            tried = run_kind(sandbox, kind, aim)
            trace = aim.trace() or settled(before, user, known)
        report.count(kind, tried)
        if trace or tried.problem:
            is_known = bool(kind.finding) or (not trace and is_harmless(sandbox, [kind]))
            report.add(kind.name, trace or tried.problem, kind.source, known=is_known)
        remove_files(user)


def run_variants(
    sandbox: Sandbox, user: int | None, report: Report, options: argparse.Namespace
) -> int:
    """Variants in waves; how many were run."""
    pool = [kind for kind in KINDS.values() if options.open or not kind.finding]
    pool = [kind for kind in pool if options.only in (None, kind.category, kind.name)]
    begun, done, last = time.monotonic(), 0, options.first + options.runs
    for start in range(options.first, last, options.wave):
        if options.minutes and time.monotonic() - begun > 60 * options.minutes:
            break
        numbers = range(start, min(start + options.wave, last))
        with aims() as aim, ThreadPoolExecutor(options.parallel) as threads:
            known = (aim.canaries.victim.pid,)
            values = aim.values()
            made = [variant(number, options.seed, values, pool) for number in numbers]
            list(threads.map(lambda _: time.sleep(0.01), range(options.parallel)))
            before = look(user, known)
            runs = [threads.submit(_run, sandbox, one, aim.marker) for one in made]
            for one, run in zip(made, runs, strict=True):
                try:
                    tried = run.result(timeout=HUNG_SECONDS)
                except TimeoutError:
                    report.add(one.name, "the judge hangs", one.source)
                    end_processes(user, known)
                    continue
                report.count(one.kinds[0], tried)
                if tried.problem:
                    is_known = any(kind.finding for kind in one.kinds)
                    is_known |= is_harmless(sandbox, one.kinds)
                    report.add(one.name, tried.problem, one.source, known=is_known)
            trace = aim.trace() or settled(before, user, known)
        if trace:
            report.add(f"wave {start}-{numbers[-1]}", trace)
            end_processes(user, ())
            remove_files(user)
        done += len(numbers)
        rate = done / (time.monotonic() - begun)
        print(
            f"{options.first + done} of {last}: {rate:.1f} a second, "
            f"{len(report.found)} got through",
            flush=True,
        )
    return done


def _run(sandbox: Sandbox, one: Variant, marker: str) -> Tried:
    return run_source(sandbox, one.source, one.mode, one.limits, one.endings, marker)


def print_layers(user: int | None, only: str | None) -> None:
    """A table: which kinds get through without a layer, with a layer alone, and with none."""
    columns = {"all": frozenset[str](), "none": frozenset(LAYERS)}
    columns |= {f"-{layer[:4]}": frozenset({layer}) for layer in LAYERS}
    columns |= {f"={layer[:4]}": frozenset(LAYERS) - {layer} for layer in LAYERS}
    print(f"{'':52}", *(f"{name:>5}" for name in columns))
    for kind in KINDS.values():
        if only not in (None, kind.category, kind.name) or "wall" in kind.endings:
            continue  # the judge ends those that wait
        cells = []
        for without in columns.values():
            if kind.reckless and user is None and "namespaces" in without:
                cells.append("?")
                continue
            cells.append("." if stops(kind, without, user) else "X")
        print(f"{kind.category[:4]} {kind.name:47}", *(f"{cell:>5}" for cell in cells), flush=True)


def stops(kind: Kind, without: frozenset[str], user: int | None) -> bool:
    """Whether the sandbox without these layers stops a kind."""
    with aims() as aim:
        tried = run_kind(Bubblewrap(without=without), kind, aim)
        stopped = not (tried.problem or aim.trace())
        known = (aim.canaries.victim.pid,)
        end_processes(user, known)
        remove_files(user)
    return stopped


def run_forgeries(sandbox: Sandbox, report: Report) -> Counter[str]:
    """Wrong solutions before the judge of programs."""
    from support.hostile.forgeries import FORGERIES

    from sparrow.schema.code import CodeConfig
    from sparrow.tasks.base import FailedVerdict
    from sparrow.tasks.code.problems import parse_problem
    from sparrow.tasks.code.running import ProgramJudge

    config = CodeConfig(cpu_seconds=1, wall_seconds=5.0, memory_mib=128, output_kib=64)
    judge, counts = ProgramJudge(sandbox=sandbox, config=config), Counter[str]()
    for name, problem, solution in FORGERIES:
        try:
            verdict = judge(solution, parse_problem(problem))
            if verdict.score:
                found = "right"
            else:
                found = "no verdict" if isinstance(verdict, FailedVerdict) else "wrong"
        except Exception as error:
            found = f"the judge raised {type(error).__name__}"
        counts[found] += 1
        if found not in ("wrong", "no verdict"):
            report.add(f"forgery: {name}", found, solution)
    return counts


def kill_judges(count: int, seed: int, user: int | None, report: Report) -> int:
    """Judges that are killed while they start programs: everything of theirs must end."""
    for number in range(count):
        dice = random.Random(f"judge {seed}/{number}")
        before = look(user)
        code = START.format(
            paths=[str(ROOT), str(ROOT / "tests")], user=user, pause=dice.choice((0, 0.01, 0.05))
        )
        judge = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert judge.stdout is not None
        judge.stdout.readline()
        time.sleep(dice.random() * 0.6)
        judge.send_signal(dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
        judge.wait()
        judge.stdout.close()
        if left := settled(before, user, soon=5.0):
            report.add(f"judge {number} was killed", left)
            end_processes(user, ())
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="bwrap")
    parser.add_argument("--runs", type=int, default=0, help="variants")
    parser.add_argument("--first", type=int, default=0, help="the number of the first variant")
    parser.add_argument("--minutes", type=float, help="no wave begins after that many")
    parser.add_argument("--wave", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a category, or a kind")
    parser.add_argument("--open", action="store_true", help="kinds with a finding in variants too")
    parser.add_argument("--no-kinds", action="store_true", help="do not run every kind as it is")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--forgeries", action="store_true")
    parser.add_argument("--judges", type=int, default=0, help="judges to kill")
    parser.add_argument("--out", type=Path, help="where to write what got through, with sources")
    options = parser.parse_args()
    begun, report = time.monotonic(), Report()
    result: dict[str, object] = {"backend": options.backend, "seed": options.seed}
    with contextlib.ExitStack() as stack:
        tempfile.tempdir = stack.enter_context(_folder())
        sandbox = open_backend(options.backend)  # imports what is patched next
        user = stack.enter_context(own_user())
        if options.layers:
            print_layers(user, options.only)
            return
        with contextlib.suppress(SandboxRefused):
            sandbox = open_backend(options.backend)
        sandbox.start("pass", "script", Limits()).finish()
        if not options.no_kinds:
            chosen = [k for k in KINDS.values() if options.only in (None, k.category, k.name)]
            run_kinds(sandbox, user, report, chosen)
            result["kinds"] = len(chosen)
        if options.runs:
            started = time.monotonic()
            result["variants"] = done = run_variants(sandbox, user, report, options)
            result["first"] = options.first
            result["a_second"] = round(done / (time.monotonic() - started), 2)
        if options.forgeries:
            result["forgeries"] = run_forgeries(sandbox, report)
        if options.judges:
            result["judges"] = kill_judges(options.judges, options.seed, user, report)
    result |= {
        "orphans": len(orphans),
        "seconds": round(time.monotonic() - begun),
        "counts": report.counts,
        "known": report.known,
        "got_through": [{k: one[k] for k in ("name", "problem")} for one in report.found],
    }
    if options.out is not None:
        options.out.write_text(json.dumps({**result, "programs": report.found}) + "\n")
    print(json.dumps(result))
    sys.exit(bool(report.found))


@contextlib.contextmanager
def _folder():  # type: ignore[no-untyped-def]
    """A place for files of the judge, which must be empty at the end."""
    with tempfile.TemporaryDirectory(prefix="sparrow-attacks-") as name:
        os.chmod(name, 0o755)
        yield name


if __name__ == "__main__":
    main()
