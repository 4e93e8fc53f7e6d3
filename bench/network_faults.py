"""Faults of a run whose rollouts come over the network, until it has ended.

    python bench/network_faults.py --out /tmp/network --kills 100 --faults 1000      # resumes

An asynchronous run whose own worker samples by two servers, and two workers of other machines that
connect through a bad line (faults/proxy.py). Kills (SIGKILL): the run (learner and coordinator),
its worker, its verifier, a server, a worker of another machine or the process below it. Faults:
those of async_faults.py (judge, buffer, disk, group); requests of workers that are cut, stalled,
damaged or repeated; a worker with a wrong key; one that lies about its version. After every end of
the run, and at the end, the ledger is audited. Prints JSON.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import async_faults
import httpx2
from async_faults import LOG, RATE, children, kill_one, processes
from faults.proxy import Line, bad_line

HERE = Path(__file__).resolve()
KEYS = {
    "SPARROW_WORKER_KEY": "the worker key of this campaign",
    "SPARROW_ADMIN_KEY": "the-admin-key-of-this-campaign",
}
LIAR_SECONDS = 5.0  # between two attempts of those who lie


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


class Kept:
    """A process that is started again whenever it has ended."""

    def __init__(self, what: str, words: list[str], log: Path, environment: dict[str, str]) -> None:
        self.what, self._words, self._log, self._environment = what, words, log, environment
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as output:
            return subprocess.Popen(
                self._words, env=self._environment, stdout=output, stderr=output
            )

    def look(self) -> None:
        if self.process.poll() is not None:
            self.process = self._start()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


class Liars(threading.Thread):
    """One who has a wrong key, and one who joins and lies about versions and leases."""

    def __init__(self, address: str, faults: Counter[str]) -> None:
        super().__init__(daemon=True)
        self.address, self.faults, self.calm = address, faults, False
        self.believed: list[str] = []  # what should have been refused

    def run(self) -> None:
        while True:
            time.sleep(LIAR_SECONDS)
            if not self.calm:
                with suppress(httpx2.HTTPError):
                    self._wrong_key()
                    self._lie()

    def _client(self, key: str) -> httpx2.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.Client(base_url=f"{self.address}/worker/", headers=headers, timeout=10)

    def _wrong_key(self) -> None:
        with self._client("a wrong key, and a long one") as client:
            answer = client.post("open", content=b"")
        self.faults["wrong key"] += 1
        if answer.status_code not in (401, 502):
            self.believed.append(f"a wrong key: {answer.status_code}")

    def _lie(self) -> None:
        from sparrow import __version__
        from sparrow.dataflow.asynchronous.exchange import FrameBody, seal, unseal
        from sparrow.dataflow.asynchronous.messages import Join, Joined, WeightsLoaded, encode
        from sparrow.schema.base import from_dict, to_dict

        with self._client(KEYS["SPARROW_WORKER_KEY"]) as client:
            join = Join(name="liar", sparrow=__version__)
            answer = client.post("open", content=seal(json.dumps(to_dict(join)).encode()))
            if answer.status_code != 200:
                return
            joined = from_dict(Joined, json.loads(unseal(answer.content)))
            lie = WeightsLoaded(version=10**6, seconds=0.0, tokens=0)
            body = FrameBody(0, 1, (encode(lie),) * 3).pack()
            client.post("exchange", content=body, headers={"x-sparrow-session": joined.session})
            self.faults["lies about its version"] += 3


def targets(run: "subprocess.Popen[bytes]", others: list[Kept]) -> list[tuple[int, str]]:
    """All processes that may be killed."""
    found = processes(run)
    for kept in others:
        below = [pid for pid, words in children(kept.process.pid) if "asynchronous.worker" in words]
        found += [(kept.process.pid, kept.what)]
        found += [(pid, f"process of a {kept.what}") for pid in below]
    return found


class Campaign:
    """The campaign with what it has counted, in a file after every end of the run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.state = args, args.out / "state.json"
        self.counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("kills", "ends", "faults")
        }
        self.problems: list[str] = []
        self.seconds = 0.0
        if self.state.exists():
            found = json.loads(self.state.read_text())
            self.counts = {name: Counter(found[name]) for name in self.counts}
            self.problems, self.seconds = found["problems"], found["seconds"]

    def save(self) -> None:
        plain: dict[str, Any] = {name: dict(count) for name, count in self.counts.items()}
        self.state.write_text(
            json.dumps(plain | {"problems": self.problems, "seconds": self.seconds})
        )

    @property
    def log(self) -> Path:
        return Path(self.args.out / "faults.txt")

    def faults(self) -> Counter[str]:
        """Of the network, and those that the run's processes have logged."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return self.counts["faults"] + Counter(lines)

    @property
    def calm(self) -> bool:
        enough = self.faults().total() >= self.args.faults
        return enough and self.counts["kills"].total() >= self.args.kills

    def play(self) -> None:
        args, draw = self.args, random.Random()
        ports = {name: free_port() for name in ("listen", "s1", "a1", "s2", "a2")}
        urls = [f"http://127.0.0.1:{ports[name]}/v1" for name in ("s1", "s2")]
        dispatch = {"listen": f"127.0.0.1:{ports['listen']}", "worker_timeout": 8.0}
        file = async_faults.config(args, rollout={"url": urls}, dispatch=dispatch)
        rates = dict.fromkeys(("cut", "corrupt", "repeat", "stall"), args.line)
        line = Line(delay=0.02, jitter=0.02, stall_seconds=3.0, seed=draw.getrandbits(30), **rates)
        base = os.environ | KEYS | {LOG: str(self.log)}
        sparrow = [sys.executable, "-m", "sparrow"]
        others = []
        for number in ("1", "2"):
            serve = ["serve", str(args.model), "--budget=48", "--kv-gib=0.05", "--dtype=float32"]
            serve += [f"--port={ports['s' + number]}", f"--admin-port={ports['a' + number]}"]
            log = args.out / f"server-{number}.txt"
            others.append(Kept("server", [*sparrow, *serve], log, base | {RATE: "0"}))
        there = f"http://127.0.0.1:{ports['listen']}"
        liars = Liars(there, self.counts["faults"])
        liars.start()
        opened = ExitStack()
        address = opened.enter_context(bad_line(there, line))
        for number in ("1", "2"):
            worker = ["worker", f"--connect={address}", f"--name=far-{number}", "--allow-code"]
            log, own = args.out / f"far-{number}.txt", base | {RATE: str(args.rate)}
            others.append(Kept("remote worker", [*sparrow, *worker, "--threads=1"], log, own))
        time.sleep(args.warm)
        try:
            while self._run(file, others, liars, line, draw) != 0:
                self.save()
        finally:
            for kept in others:
                kept.close()
            opened.close()
            self.problems += liars.believed
            self.save()

    def _run(
        self,
        file: Path,
        others: list[Kept],
        liars: Liars,
        line: Line,
        draw: random.Random,
    ) -> int:
        """Run it until it ends; its exit code."""
        from sparrow import api
        from sparrow.schema.asynchronous import AuditConfig

        args, calm, begun = self.args, self.calm, time.monotonic()
        liars.calm = calm
        if calm:
            line.cut = line.corrupt = line.repeat = line.stall = 0.0
        rate = {LOG: str(self.log), RATE: "0" if calm else str(args.rate)}
        script = HERE.with_name("async_faults.py")
        words = [sys.executable, str(script), "--out", str(args.out), "--train", str(file)]
        with (args.out / "run.txt").open("ab") as output:
            run = subprocess.Popen(
                words, env=os.environ | KEYS | rate, stdout=output, stderr=output
            )
        due = time.monotonic() + draw.expovariate(1 / args.pause)
        while run.poll() is None:
            time.sleep(0.5)
            for kept in others:
                kept.look()
            self.counts["faults"].update({f"line: {k}": n for k, n in line.faults.items()})
            line.faults.clear()
            if time.monotonic() < due or self.counts["kills"].total() >= args.kills:
                continue
            due = time.monotonic() + draw.expovariate(1 / args.pause)
            if (what := kill_one(targets(run, others), draw)) is not None:
                self.counts["kills"][what] += 1
        self.counts["ends"][str(run.returncode)] += 1
        self.seconds += time.monotonic() - begun
        if (args.out / "run" / "prompts.sqlite").exists():
            self.problems += api.audit(AuditConfig(run=args.out / "run")).problems
        return run.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--faults", type=int, default=1000, help="at least; then they stop")
    parser.add_argument("--pause", type=float, default=15.0, help="mean seconds between kills")
    parser.add_argument("--rate", type=float, default=1.0, help="of faults within the run")
    parser.add_argument("--line", type=float, default=0.01, help="chance of each fault of the line")
    parser.add_argument("--warm", type=float, default=15.0, help="seconds until servers listen")
    args = parser.parse_args()
    from sparrow import api
    from sparrow.schema.asynchronous import AuditConfig

    args.out.mkdir(parents=True, exist_ok=True)
    args.model = args.out / "model"
    if not args.model.exists():
        sys.path.insert(0, str(HERE.parents[1] / "tests"))
        from support.training import model_folder

        model_folder(args.model, chat=True)
    campaign = Campaign(args)
    campaign.play()
    found = api.audit(AuditConfig(run=args.out / "run"))
    figures = {
        "steps": found.steps,
        "kills": dict(campaign.counts["kills"]),
        "faults": dict(campaign.faults()),
        "starts_of_the_run_by_exit_code": dict(campaign.counts["ends"]),
        "prompts": found.prompts,
        "used": found.used,
        "dropped": found.dropped,
        "again": found.again,
        "lost_or_twice": [*campaign.problems, *found.problems],
        "seconds": round(campaign.seconds),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
