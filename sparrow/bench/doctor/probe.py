"""A process of its own for what may break: importing torch, starting a GPU, running kernels.

A broken installation fails in ways that no `except` can list, crashes included. So the stages run
in a child, which prints a line as each one ends. Where lines are missing, the first stage without
one is what broke, and the child's last words say how.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

STAGES = ("torch", "gpus", "models", "fits")
CHECKS = ("self_test", "kernels")
TIMEOUT = 300.0  # seconds; the first time, kernels are compiled
# The child sees the modules that this process sees, in the same order.
CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from sparrow.bench.doctor.probe import run; run(json.loads(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What each stage found, which one broke, and its last words."""

    found: dict[str, Any] = field(default_factory=dict)
    broken: str | None = None
    why: str | None = None


def probe(*, check: bool, timeout: float = TIMEOUT) -> Probed:
    """Run the stages, with the checks where they are wanted, in a child."""
    stages = [*STAGES, *(CHECKS if check else ())]
    command = [sys.executable, "-P", "-c", CHILD, json.dumps(sys.path), json.dumps(stages)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=environment,
    ) as child:
        try:
            said, errors = child.communicate(timeout=timeout)
            ended = True
        except subprocess.TimeoutExpired:
            child.kill()
            said, errors = child.communicate()
            ended = False
    found = _read(said)
    missing = next((stage for stage in stages if stage not in found), None)
    if missing is None:
        return Probed(found=found)
    why = last_words(errors, child.returncode) if ended else f"no end within {timeout:g} s"
    return Probed(found=found, broken=missing, why=why)


def run(stages: list[str]) -> None:
    """The child: every stage in its order, a JSON line each. Imports wait for their stage."""
    from sparrow.bench.doctor import gpus

    _say("torch", gpus.build() | {"no_gpu": gpus.complaint()})
    seen = gpus.gpus()
    _say("gpus", seen)
    from sparrow.bench.doctor import stages as look

    work = {
        "models": look.models,
        "fits": lambda: look.fits(seen),
        "self_test": look.self_test,
        "kernels": lambda: look.kernels(seen),
    }
    for stage in stages:
        if stage in work:
            _say(stage, work[stage]())


def _say(stage: str, found: Any) -> None:
    print(json.dumps({"stage": stage, "found": found}), flush=True)


def _read(said: str) -> dict[str, Any]:
    """The lines of the stages, whole ones; libraries may print others between them."""
    found = {}
    for line in said.splitlines(keepends=True):
        if line.startswith('{"stage": ') and line.endswith("\n"):
            told = json.loads(line)
            found[told["stage"]] = told["found"]
    return found


def last_words(errors: str, code: int) -> str:
    """How the child ended, in one line: its error, or the signal that killed it."""
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with exit code {code}"
