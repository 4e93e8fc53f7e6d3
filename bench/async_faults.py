"""Faults of an asynchronous run: processes are killed, and parts fail, until the run has ended.

    python bench/async_faults.py --out /tmp/faults --kills 60 --faults 400

Kills (SIGKILL): the run itself, its rollout worker, its evaluation worker, a verifier. Faults: a
reward function that raises, hangs or kills its process (judge); messages of the worker that are cut
off or garbled (buffer); writes of the ledger that fail (disk); episodes that raise or never end
(group). After every end of the run, and at the end, the ledger is audited. Prints JSON.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
NAME = HERE.stem
LOG = "SPARROW_FAULT_LOG"  # a file with a line for each fault that was injected
RATE = "SPARROW_FAULT_RATE"  # how often a chance is taken


def strikes(kind: str, chance: float) -> bool:
    """Whether a fault is injected here; if so it is logged first."""
    if random.random() >= chance * float(os.environ[RATE]):
        return False
    with open(os.environ[LOG], "a", encoding="utf-8") as log:
        log.write(f"{kind}\n")
    return True


# Inside the run: a reward, an episode (in the worker), and a ledger whose disk fails.


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    if strikes("judge: raises", 0.02):
        raise ValueError("injected")
    if strikes("judge: hangs", 0.002):
        time.sleep(600)
    if strikes("judge: crashes", 0.005):
        os.kill(os.getpid(), signal.SIGKILL)
    return float(sum(map(len, solution_str.split())) % 2)


async def episode(actor: Any, example: Any) -> Any:
    from sparrow.dataflow.episodes import single_turn

    _garble(sys.modules["__main__"])
    if strikes("group: raises", 0.05):
        raise OSError("injected")
    if strikes("group: never ends", 0.02):
        await asyncio.sleep(3600)
    return await single_turn(actor, example)


def _garble(worker: Any) -> None:
    """Have a message of this worker arrive damaged."""
    if not strikes("buffer: garbled message", 0.02):
        return
    encode = worker.encode

    def damaged(message: Any) -> bytes:
        worker.encode = encode
        frame = encode(message)
        return frame[:40] + bytes(40) + frame[80:]

    worker.encode = damaged


def train_with_faults(file: Path) -> None:
    from sparrow.dataflow.asynchronous.prompt_ledger import PromptLedger
    from sparrow.dataflow.local.loop import train
    from sparrow.dataflow.local.run import open_run
    from sparrow.schema.train import TrainConfig

    write = PromptLedger._transaction

    def failing(self: PromptLedger) -> Any:
        if strikes("disk: write fails", 0.003):
            raise sqlite3.OperationalError("database or disk is full (injected)")
        return write(self)

    PromptLedger._transaction = failing  # type: ignore[method-assign]
    with open_run(TrainConfig.model_validate_json(file.read_text())) as run:
        train(run)


# The campaign.


def config(args: argparse.Namespace, **more: dict[str, Any]) -> Path:
    """The configuration of the run; more: settings by section."""
    rows = args.out / "rows.jsonl"
    lines = [
        {
            "data_source": "faults",
            "prompt": [{"role": "user", "content": f"{n} + {n + 1} = ?"}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": n},
        }
        for n in range(97)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    held = args.out / "held.jsonl"
    held.write_text("".join(json.dumps(line) + "\n" for line in lines[:4]))
    reward_name = f"{HERE}:reward"
    settings: dict[str, dict[str, Any]] = {
        "model": {"name": str(args.model), "device": "cpu"},
        "data": {"rows": str(rows), "reward": reward_name, "workers": 1, "deadline": 3.0},
        "rollout": {
            "prompts": 4,
            "samples": 4,
            "max_tokens": 40,
            "max_prompt": 40,
            "kv_gib": 0.05,
            "episode": f"{HERE}:episode",
            "attention": {"budget": 48},
        },
        "optimiser": {"rate": 1e-4},
        "gate": {"mode": "off"},
        "batch": {"tokens": 1024},
        "validation": {"every": 10, "prompts": 4, "rows": str(held)},
        "dispatch": {"staleness": args.staleness, "deadline": 5.0},
        "run": {
            "loop": "async",
            "out": str(args.out / "run"),
            "steps": args.steps,
            "save_every": 5,
            "tensorboard": False,
            "rollouts": 1,
        },
    }
    for section, changes in more.items():
        settings[section] = {**settings[section], **changes}
    file = args.out / "config.json"
    file.write_text(json.dumps(settings))
    return file


def children(pid: int) -> list[tuple[int, str]]:
    """Processes below a process, with their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [(int(entry.name), words), *children(int(entry.name))]
        except (ValueError, OSError):
            continue
    return found


def processes(run: "subprocess.Popen[bytes]") -> list[tuple[int, str]]:
    """The run with its workers and verifiers."""
    below = children(run.pid)
    workers = [(pid, "worker") for pid, words in below if "asynchronous.worker" in words]
    verifiers = [(pid, "verifier") for pid, words in below if "supervisor" in words]
    return [(run.pid, "run"), *workers, *workers, *verifiers]


def kill_one(targets: list[tuple[int, str]], draw: random.Random) -> str | None:
    """Kill one of these processes; what it was."""
    pid, what = draw.choice(targets)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return what


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a folder; default: a random model of 3 layers")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--faults", type=int, default=400, help="at least; then they stop")
    parser.add_argument("--pause", type=float, default=6.0, help="mean seconds between kills")
    parser.add_argument("--rate", type=float, default=1.0, help="of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train_with_faults(args.train)
        return
    from sparrow import api
    from sparrow.schema.asynchronous import AuditConfig

    args.out.mkdir(parents=True)
    if args.model is None:
        sys.path.insert(0, str(HERE.parents[1] / "tests"))
        from support.training import model_folder

        args.model = model_folder(args.out / "model", chat=True)
    file, draw, begun = config(args), random.Random(args.seed), time.monotonic()
    log, kills, ends = args.out / "faults.txt", Counter[str](), Counter[str]()
    log.touch()
    problems: list[str] = []
    while True:
        faults = Counter(log.read_text().splitlines())
        calm = sum(faults.values()) >= args.faults and sum(kills.values()) >= args.kills
        environment = os.environ | {LOG: str(log), RATE: "0" if calm else str(args.rate)}
        words = [sys.executable, str(HERE), "--out", str(args.out), "--train", str(file)]
        with (args.out / "run.txt").open("ab") as output:
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        while process.poll() is None and sum(kills.values()) < args.kills:
            time.sleep(draw.expovariate(1 / args.pause))
            if process.poll() is None and (what := kill_one(processes(process), draw)) is not None:
                kills[what] += 1
        code = process.wait()
        ends[str(code)] += 1
        if (args.out / "run" / "prompts.sqlite").exists():
            problems += api.audit(AuditConfig(run=args.out / "run")).problems
        if code == 0 or sum(ends.values()) > args.kills + args.faults:
            break
    found = api.audit(AuditConfig(run=args.out / "run"))
    print(
        json.dumps(
            {
                "steps": found.steps,
                "kills": dict(kills),
                "faults": dict(Counter(log.read_text().splitlines())),
                "starts_of_the_run_by_exit_code": dict(ends),
                "prompts": found.prompts,
                "used": found.used,
                "dropped": found.dropped,
                "again": found.again,
                "lost_or_twice": [*problems, *found.problems],
                "seconds": round(time.monotonic() - begun),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
