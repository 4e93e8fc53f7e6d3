"""This machine without importing what may be broken: packages, cores, memory and disk.

The table of packages repeats pyproject.toml (a test compares them), because a checkout that is used
without being installed has no metadata. Cores and memory are as far as a container lets this have
them.
"""

import os
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# Names that Linux gives to instructions for bf16, on x86 and on ARM.
BF16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
DISTRIBUTION = "sparrow-rl"
BROWSER = "browser"  # its package needs a browser beside it
NOT_YET = "nothing uses it yet"

# Packages.


class Package(NamedTuple):
    """A package that something needs: everything (`extra` None), or what `purpose` says."""

    name: str
    minimum: str
    purpose: str
    extra: str | None = None
    used: bool = True  # False: an extra of pyproject.toml that no verb uses yet


CORE = (
    Package("torch", "2.11", "tensors, training, GPUs"),
    Package("numpy", "1.26", "records"),
    Package("scipy", "1.12", "intervals and fits"),
    Package("numba", "0.61", "kernels for a CPU"),
    Package("safetensors", "0.5", "weights"),
    Package("transformers", "5.0", "tokenizers"),
    Package("gguf", "0.17", "sparrow fetch"),
    Package("pydantic", "2.7", "configurations"),
    Package("tomli-w", "1.0", "configurations"),
    Package("rich", "13", "the command line"),
    Package("jinja2", "3.1", "pages of sparrow report"),
    Package("tensorboard", "2.16", "curves of training"),
)
OPTIONAL = (
    Package("triton", "3.6", "kernels for a GPU; torch for CUDA brings it along", "kernels"),
    Package("math-verify", "0.8", "judging answers in mathematics", "math"),
    Package("pyarrow", "18", "rows from .parquet files", "parquet"),
    Package("reasoning-gym", "0.1.25", "tasks gym/NAME", "gym"),
    Package("fastapi", "0.115", NOT_YET, "serve", used=False),
    Package("uvicorn", "0.34", NOT_YET, "serve", used=False),
    Package("ray", "2.44", NOT_YET, "ray", used=False),
    Package("playwright", "1.50", "testing reports in a browser", BROWSER),
)


def package_state(package: Package, version: str | None) -> dict[str, Any]:
    """A package of which this version is here: ok, old or missing, and what installs it."""
    state = "missing" if version is None else "ok"
    if version is not None and _numbers(version) < _numbers(package.minimum):
        state = "old"
    install = f"{beside('pip')} install '{package.name}>={package.minimum}'"
    if package.extra is not None and installed(DISTRIBUTION) is not None and version is None:
        install = f"{beside('pip')} install '{DISTRIBUTION}[{package.extra}]'"
    if package.extra == BROWSER:
        install += f" && {beside('playwright')} install chromium"
    return package._asdict() | {"version": version, "state": state, "install": install}


def installed(name: str) -> str | None:
    """The version that the metadata says; None: not installed. Unreadable metadata is "0"."""
    try:
        return version(name) or "0"
    except PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """The numbers that a version starts with, without zeros at the end: 2.13.0+cpu is 2.13."""
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in re.sub(r"(\.0)+$", "", found[0]).split(".")] if found else []


def beside(program: str) -> str:
    """How to call a program of this Python's environment, also one that is still to come.

    By its name where the shell finds this environment's pip.
    """
    pip = shutil.which("pip")
    active = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return program if active else f"{sys.executable} -m {program}"


# Cores, memory, disk.


def cpu() -> dict[str, Any]:
    """Cores of the machine, those that this process may use, and what limits its threads."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": os.cpu_count(),
        "usable": usable,
        "quota": cpu_quota(),
        "environment": set_of(THREADS),
        "bf16": bf16_instructions(),
    }


def cpu_quota(root: Path = CGROUP) -> float | None:
    """Cores' worth of time that a container may use; None: no limit is known."""
    found = re.fullmatch(r"(\d+) (\d+)", _text(root / "cpu.max"))
    return int(found[1]) / int(found[2]) if found else None


def bf16_instructions(proc: Path = PROC) -> list[str] | None:
    """The CPU's instructions for bf16 by name; None where the system does not tell."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", _text(proc / "cpuinfo"), re.MULTILINE)
    return sorted(BF16 & set(lines[0].split())) if lines else None


def memory(proc: Path = PROC, root: Path = CGROUP) -> dict[str, int | None]:
    """Bytes in all and available, or fewer where a container is given fewer; None: unknown.

    Of what a container has taken, files that can be dropped do not count.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    told = re.search(r"^MemAvailable:\s+(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    available = int(told[1]) * 1024 if told else None
    limit = _text(root / "memory.max")
    if not limit.isdigit() or int(limit) >= total:
        return {"total": total, "available": available}
    dropped = re.search(r"^inactive_file (\d+)$", _text(root / "memory.stat"), re.MULTILINE)
    used = int(_text(root / "memory.current") or 0) - (int(dropped[1]) if dropped else 0)
    left = max(0, int(limit) - used)
    return {"total": int(limit), "available": left if available is None else min(available, left)}


def disk(what: str, folder: Path) -> dict[str, Any]:
    """Bytes free where a folder is, or will be."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    usage, writable = shutil.disk_usage(there), os.access(there, os.W_OK)
    size = {"free": usage.free, "total": usage.total}
    return {"what": what, "folder": str(folder.absolute()), **size, "writable": writable}


def driver(proc: Path = PROC) -> str | None:
    """The version of NVIDIA's driver; None: there is none, or it does not tell."""
    first = _text(proc / "driver/nvidia/version").partition("\n")[0]
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", f"{first} ")
    return found[1] if found else None


def hub() -> dict[str, Any]:
    """The hub's cache as it lies there, by the rules of huggingface_hub; nothing is asked."""
    given = os.environ
    caches = given.get("XDG_CACHE_HOME") or "~/.cache"
    home = given.get("HF_HOME") or f"{caches}/huggingface"
    folder = Path(given.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    names = sorted(found.name for found in folder.glob("models--*--*"))
    return {
        "folder": str(folder),
        "models": [name.removeprefix("models--").replace("--", "/", 1) for name in names],
        "offline": set_of(OFFLINE),
    }


def set_of(names: tuple[str, ...]) -> dict[str, str]:
    """Those of these environment variables that are set."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _text(file: Path) -> str:
    """What a small file of the system says; nothing where it is not there or not for us."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
