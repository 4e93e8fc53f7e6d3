"""What is here, what works, and what that comes to: is the core ready, what has to be mended.

A broken installation fails in ways that no `except` can list, crashes included. So what may break
runs in a child, which prints a line as each stage ends. Where lines are missing, the first stage
without one is what broke, and the child's last words say how.
"""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparrow import __version__
from sparrow.bench.doctor import host
from sparrow.bench.doctor.stages import LEAST_CAPABILITY, WORK

CHECKS = ("self_test", "kernels")
TIMEOUT = 300.0  # seconds; the first time, kernels are compiled
# The child sees the modules that this process sees, in the same order.
CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from sparrow.bench.doctor.stages import run; run(json.loads(sys.argv[2]))"
)
VERBS = ("generate", "calibrate", "plan", "train", "eval", "report")
REPORT = "install into a fresh environment; if it stays, report it with sparrow doctor --json"
BREAKS = {
    "torch": "torch does not load",
    "gpus": "torch cannot talk to the GPUs",
    "models": "the package does not load",
    "fits": "memory cannot be counted",
    "self_test": "the self-test broke",
    "kernels": "the kernels broke",
}

Examined = Mapping[str, Any]  # what `examine` has found, by its keys
Advice = tuple[str, str]  # what is wrong or missing, and how to mend it


def examine(*, check: bool = True) -> dict[str, Any]:
    """What is here, what works, what is missing and how to get it. Uses no network.

    Keys: sparrow, python, platform, executable (this Python); packages (name, version, minimum,
    state: ok, old or missing, extra: None is core, purpose, used, install); driver (NVIDIA's);
    torch (version, build, threads, no_gpu: why, or None); gpus (index, name, total, free,
    capability, driver, kernels); cpu (cores, usable, quota, environment, bf16: instructions or
    None); memory (total, available); disk (what, folder, free, total, writable); models (shipped,
    fetched, cache); hub (folder, models, offline); fits (device, bytes, tokens, rollout, train:
    names of shapes); self_test (passed, tokens, seconds); kernels (device, version, error,
    passed); broken (stage, why); and the verdict: ready, ready_for, devices, problems and missing
    (what, how). Sizes are bytes. What a stage that broke or was not wanted would have told is
    None.
    """
    packages = (*host.CORE, *host.OPTIONAL)
    found: dict[str, Any] = {
        "sparrow": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "packages": [host.package_state(own, host.installed(own.name)) for own in packages],
        "cpu": host.cpu(),
        "driver": host.driver(),
        "memory": host.memory(),
        "hub": host.hub(),
        **dict.fromkeys(WORK),
        **probe([stage for stage in WORK if check or stage not in CHECKS]),
    }
    places = {"runs": "runs", "hub": found["hub"]["folder"]}  # where runs and models go
    places |= {"models": found["models"]["cache"]} if found["models"] else {}
    found["disk"] = [host.disk(what, Path(folder)) for what, folder in places.items()]
    return found | verdict(found, check=check)


def probe(stages: list[str], timeout: float = TIMEOUT) -> dict[str, Any]:
    """What each stage found, run in a child, and which one is `broken`, if any."""
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
            why = last_words(errors, child.returncode)
        except subprocess.TimeoutExpired:
            child.kill()
            said, _ = child.communicate()
            why = f"no end within {timeout:g} s"
    found: dict[str, Any] = {}
    for line in said.splitlines(keepends=True):  # whole ones; libraries may print others between
        if line.startswith('{"stage": ') and line.endswith("\n"):
            told = json.loads(line)
            found[told["stage"]] = told["found"]
    missing = next((stage for stage in stages if stage not in found), None)
    return found | {"broken": None if missing is None else {"stage": missing, "why": why}}


def last_words(errors: str, code: int) -> str:
    """How the child ended, in one line: its error, or the signal that killed it."""
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with exit code {code}"


# The verdict.


def verdict(found: Examined, *, check: bool) -> dict[str, Any]:
    """Whether the core works, on which devices and for what; what to mend, what to add.

    `problems` keep the core from working. `missing` things would add something.
    """
    problems, missing = (
        [{"what": what, "how": how} for what, how in advice]
        for advice in (_problems(found), _missing(found))
    )
    return {
        "ready": not problems,
        "ready_for": [] if problems else list(VERBS),
        "devices": [] if problems else ["cpu", *_good_gpus(found, check)],
        "problems": problems,
        "missing": missing,
    }


def _problems(found: Examined) -> Iterator[Advice]:
    yield from _packages(found, core=True)
    broken = found["broken"]
    if broken is not None and not _only_gpus_broke(found):
        again = f"{host.beside('pip')} install --force-reinstall torch"
        how = again if broken["stage"] == "torch" else REPORT
        yield f"{BREAKS[broken['stage']]}: {broken['why']}", how
    for model in (found["models"] or {}).get("shipped", ()):
        if not model["whole"]:
            yield f"the shipped model {model['name']} lacks files: {model['folder']}", REPORT
    if found["self_test"] is not None and not found["self_test"]["passed"]:
        failed = "the self-test failed: keeping every token, tiny answers otherwise than dense"
        yield failed, REPORT
    yield from _wrong_kernels(found, on_cpu=True)


def _missing(found: Examined) -> Iterator[Advice]:
    yield from _packages(found, core=False)
    for model in (found["models"] or {}).get("fetched", ()):
        if not model["whole"]:
            state, force = ("damaged", " --force") if model["folder"] else ("not fetched", "")
            what = f"{model['name']}, a real model: {state}"
            yield what, f"sparrow fetch {model['name']}{force}"
    for disk in found["disk"]:
        if disk["what"] == "runs" and not disk["writable"]:
            yield f"runs cannot be written to {disk['folder']}", "work in another folder"
    torch, gpus = found["torch"], found["gpus"] or ()
    if torch is not None and not gpus and found["driver"] is not None:
        if torch["build"] == "CPU":
            what = "a GPU: NVIDIA's driver is here, but this torch is built for a CPU"
            yield what, "torch for CUDA, by the command of https://pytorch.org"
        else:
            yield f"a GPU: {torch['no_gpu']}", "look at nvidia-smi"
    if _only_gpus_broke(found):
        yield f"{BREAKS['kernels']} on a GPU: {found['broken']['why']}", REPORT
    for gpu in gpus:
        if not gpu["kernels"]:
            has, least = gpu["capability"], ".".join(map(str, LEAST_CAPABILITY))
            what = f"compute capability {has}, our kernels want {least} by NVIDIA"
            yield f"cuda:{gpu['index']}: {what}", "--device cpu, or another GPU"
    yield from _wrong_kernels(found, on_cpu=False)


def _packages(found: Examined, *, core: bool) -> Iterator[Advice]:
    """Packages that are not as they should be; triton counts where there is a GPU."""
    for package in found["packages"]:
        counts = package["used"] and (package["name"] != "triton" or found["gpus"])
        if (package["extra"] is None) != core or package["state"] == "ok" or not counts:
            continue
        state = f"{package['name']} {package['version']} is older than {package['minimum']}"
        if package["state"] == "missing":
            state = f"{package['name']} is not installed"
        yield f"{package['purpose']}: {state}", package["install"]


def _wrong_kernels(found: Examined, *, on_cpu: bool) -> Iterator[Advice]:
    for kernel in found["kernels"] or ():
        if (kernel["device"] == "cpu") == on_cpu and not kernel["passed"]:
            where = "the CPU" if on_cpu else kernel["device"]
            yield f"attention on {where} is wrong by {kernel['error']:.3g}", REPORT


def _only_gpus_broke(found: Examined) -> bool:
    """Kernels of the CPU run in the self-test too, and that went through."""
    broken = found["broken"]
    return broken is not None and broken["stage"] == "kernels" and bool(found["gpus"])


def _good_gpus(found: Examined, check: bool) -> list[str]:
    """GPUs whose kernels were right or, where nothing was checked, are written for them."""
    able = [f"cuda:{gpu['index']}" for gpu in found["gpus"] or () if gpu["kernels"]]
    right = [
        kernel["device"]
        for kernel in found["kernels"] or ()
        if kernel["passed"] and kernel["version"] != "definition"
    ]
    return [device for device in able if device in right or not check]
