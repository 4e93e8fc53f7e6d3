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
import warnings
from typing import Any, NamedTuple

from sparrow.bench.doctor.host import driver

STAGES = ("torch", "gpus", "models", "fits")
CHECKS = ("self_test", "kernels")
LEAST_CAPABILITY = (8, 0)  # that our kernels are written for: it has bf16
TIMEOUT = 300.0  # seconds; the first time, kernels are compiled
# The child sees the modules that this process sees, in the same order.
CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from sparrow.bench.doctor.probe import run; run(json.loads(sys.argv[2]))"
)


class Probed(NamedTuple):
    """What each stage found, which one broke, and its last words."""

    found: dict[str, Any]
    broken: dict[str, str] | None = None


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
        return Probed(found)
    why = last_words(errors, child.returncode) if ended else f"no end within {timeout:g} s"
    return Probed(found, {"stage": missing, "why": why})


def run(stages: list[str]) -> None:
    """The child: every stage in its order, a JSON line each. Imports wait for their stage."""
    _say("torch", build() | {"no_gpu": complaint()})
    seen = gpus()
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


# torch and its GPUs. Imports nothing else that may break.


def build() -> dict[str, Any]:
    """Which torch this is, and how many threads it uses."""
    import torch

    cuda, hip = torch.version.cuda, torch.version.hip
    made = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    return {"version": torch.__version__, "build": made, "threads": torch.get_num_threads()}


def gpus() -> list[dict[str, Any]]:
    """The GPUs that torch can use."""
    import torch

    return [_gpu(index) for index in range(torch.cuda.device_count())] if not complaint() else []


def complaint() -> str | None:
    """Why torch can use no GPU, in its own words where it has some; None: it can."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return str(said[0].message) if said else "torch sees none"


def _gpu(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    return {
        "index": index,
        "name": torch.cuda.get_device_name(index),
        "total": total,
        "free": free,
        "capability": ".".join(map(str, capability)),
        "driver": driver(),
        "kernels": torch.version.hip is None and capability >= LEAST_CAPABILITY,
    }
