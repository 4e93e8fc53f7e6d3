"""What is here, what works, and what that comes to: is the core ready, what has to be mended.

Plain data, also for JSON: pydantic itself may be what is broken.
"""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrow import __version__
from sparrow.bench.doctor import host
from sparrow.bench.doctor.host import pip
from sparrow.bench.doctor.probe import CHECKS, LEAST_CAPABILITY, STAGES, probe

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
Advice = dict[str, str]  # what is wrong or missing, and how to mend it


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
    probed = probe(check=check)
    found: dict[str, Any] = {
        "sparrow": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "packages": host.look(),
        "cpu": host.cpu(),
        "driver": host.driver(),
        "memory": host.memory(),
        "hub": _hub(),
    }
    for stage in (*STAGES, *CHECKS):
        found[stage] = probed.found.get(stage)
    found["disk"] = _disks(found)
    found["broken"] = probed.broken
    return found | verdict(found, check=check)


def _hub() -> dict[str, Any]:
    """The hub's cache as it lies there, by the rules of huggingface_hub; nothing is asked."""
    given = os.environ
    caches = given.get("XDG_CACHE_HOME") or "~/.cache"
    home = given.get("HF_HOME") or f"{caches}/huggingface"
    folder = Path(given.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    names = sorted(each.name for each in folder.glob("models--*--*")) if folder.is_dir() else []
    return {
        "folder": str(folder),
        "models": [name.removeprefix("models--").replace("--", "/", 1) for name in names],
        "offline": host.set_of(host.OFFLINE),
    }


def _disks(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where runs and models go."""
    places = {"runs": Path("runs"), "hub": Path(found["hub"]["folder"])}
    if found["models"] is not None:
        places["models"] = Path(found["models"]["cache"])
    return [host.disk(what, folder) for what, folder in places.items()]


# The verdict.


def verdict(found: Examined, *, check: bool) -> dict[str, Any]:
    """Whether the core works, on which devices and for what; what to mend, what to add.

    `problems` keep the core from working. `missing` things would add something.
    """
    problems = [*_core_packages(found), *_breaks(found), *_wrong(found)]
    return {
        "ready": not problems,
        "ready_for": [] if problems else list(VERBS),
        "devices": [] if problems else ["cpu", *_good_gpus(found, check)],
        "problems": problems,
        "missing": [*_optional(found), *_places(found), *_gpu_advice(found)],
    }


def _advice(what: str, how: str) -> Advice:
    return {"what": what, "how": how}


def _core_packages(found: Examined) -> list[Advice]:
    return [
        _advice(f"{each['purpose']}: {_state(each)}", each["install"])
        for each in found["packages"]
        if each["extra"] is None and each["state"] != "ok"
    ]


def _state(package: Mapping[str, Any]) -> str:
    if package["state"] == "missing":
        return f"{package['name']} is not installed"
    return f"{package['name']} {package['version']} is older than {package['minimum']}"


def _breaks(found: Examined) -> list[Advice]:
    """The stage that broke, unless it took a GPU alone along."""
    broken = found["broken"]
    if broken is None or _only_gpus_broke(found):
        return []
    how = f"{pip()} install --force-reinstall torch" if broken["stage"] == "torch" else REPORT
    return [_advice(f"{BREAKS[broken['stage']]}: {broken['why']}", how)]


def _only_gpus_broke(found: Examined) -> bool:
    """Kernels of the CPU run in the self-test too, and that went through."""
    broken = found["broken"]
    return broken is not None and broken["stage"] == "kernels" and bool(found["gpus"])


def _wrong(found: Examined) -> list[Advice]:
    """What runs and gives something else than it should."""
    lacking = [each for each in (found["models"] or {}).get("shipped", ()) if not each["whole"]]
    said = [f"the shipped model {each['name']} lacks files: {each['folder']}" for each in lacking]
    if found["self_test"] is not None and not found["self_test"]["passed"]:
        said.append("the self-test failed: keeping every token, tiny answers otherwise than dense")
    said += [
        f"attention on the CPU is wrong by {each['error']:.3g}"
        for each in found["kernels"] or ()
        if each["device"] == "cpu" and not each["passed"]
    ]
    return [_advice(each, REPORT) for each in said]


def _good_gpus(found: Examined, check: bool) -> list[str]:
    """GPUs whose kernels were right or, where nothing was checked, are written for them."""
    able = [f"cuda:{gpu['index']}" for gpu in found["gpus"] or () if gpu["kernels"]]
    if not check:
        return able
    right = [
        each["device"]
        for each in found["kernels"] or ()
        if each["passed"] and each["version"] != "definition"
    ]
    return [device for device in able if device in right]


def _optional(found: Examined) -> list[Advice]:
    """Packages and models that are not here; triton counts where there is a GPU."""
    packages = [
        _advice(f"{each['purpose']}: {_state(each)}", each["install"])
        for each in found["packages"]
        if each["extra"] is not None and each["state"] != "ok" and each["used"]
        if each["name"] != "triton" or found["gpus"]
    ]
    models = []
    for each in (found["models"] or {}).get("fetched", ()):
        force = " --force" if each["folder"] else ""
        if not each["whole"]:
            what = f"{each['name']}, a real model: {'damaged' if force else 'not fetched'}"
            models.append(_advice(what, f"sparrow fetch {each['name']}{force}"))
    return packages + models


def _places(found: Examined) -> list[Advice]:
    return [
        _advice(f"{each['what']} cannot be written to {each['folder']}", "work in another folder")
        for each in found["disk"]
        if each["what"] == "runs" and not each["writable"]
    ]


def _gpu_advice(found: Examined) -> list[Advice]:
    """GPUs that are there and of no use, and why."""
    gpus, torch = found["gpus"] or (), found["torch"]
    advice = []
    if torch is not None and not gpus and found["driver"] is not None:
        if torch["build"] == "CPU":
            what = "a GPU: NVIDIA's driver is here, but this torch is built for a CPU"
            advice.append(_advice(what, "torch for CUDA, by the command of https://pytorch.org"))
        else:
            advice.append(_advice(f"a GPU: {torch['no_gpu']}", "look at nvidia-smi"))
    if _only_gpus_broke(found):
        advice.append(_advice(f"{BREAKS['kernels']} on a GPU: {found['broken']['why']}", REPORT))
    advice += [
        _advice(
            f"cuda:{gpu['index']}: compute capability {gpu['capability']}, our kernels want "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} by NVIDIA",
            "--device cpu, or another GPU",
        )
        for gpu in gpus
        if not gpu["kernels"]
    ]
    return advice + [
        _advice(f"attention on {each['device']} is wrong by {each['error']:.3g}", REPORT)
        for each in found["kernels"] or ()
        if each["device"] != "cpu" and not each["passed"]
    ]
