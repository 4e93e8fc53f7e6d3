"""The whole examination as plain data."""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrow import __version__
from sparrow.bench.doctor import host
from sparrow.bench.doctor.packages import Found, look
from sparrow.bench.doctor.probe import CHECKS, STAGES, Probed, probe
from sparrow.bench.doctor.verdict import verdict


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
    packages = look()
    probed = probe(check=check)
    found: dict[str, Any] = {
        "sparrow": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "packages": [_package(each) for each in packages],
        "cpu": host.cpu(),
        "driver": host.driver(),
        "memory": host.memory(),
        "hub": _hub(),
    }
    for stage in (*STAGES, *CHECKS):
        found[stage] = probed.found.get(stage)
    found["disk"] = _disks(found)
    found["broken"] = _broken(probed)
    return found | verdict(found, check=check)


def _package(found: Found) -> dict[str, Any]:
    package = found.package
    return {
        "name": package.name,
        "version": found.version,
        "minimum": package.minimum,
        "state": found.state,
        "extra": package.extra,
        "purpose": package.purpose,
        "used": package.used,
        "install": found.install,
    }


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


def _broken(probed: Probed) -> dict[str, Any] | None:
    return None if probed.broken is None else {"stage": probed.broken, "why": probed.why}
