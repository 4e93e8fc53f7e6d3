"""This machine without importing what may be broken: packages, cores, memory and disk.

The table of packages repeats pyproject.toml (a test compares them), because a checkout that is used
without being installed has no metadata. Cores and memory are as far as a container lets this have
them.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
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


def look() -> list[dict[str, Any]]:
    """Every package of the table, core ones first: what is here of it, and how to get it."""
    return [package_state(each, installed(each.name)) for each in (*CORE, *OPTIONAL)]


def package_state(package: Package, version: str | None) -> dict[str, Any]:
    """A package of which this version is here: ok, old or missing, and what installs it."""
    state = "missing" if version is None else "ok"
    if version is not None and older(version, package.minimum):
        state = "old"
    install = f"{pip()} install '{package.name}>={package.minimum}'"
    if package.extra is not None and installed(DISTRIBUTION) is not None and version is None:
        install = f"{pip()} install '{DISTRIBUTION}[{package.extra}]'"
    if package.extra == BROWSER:
        install += f" && {_beside('playwright')} install chromium"
    return package._asdict() | {"version": version, "state": state, "install": install}


def installed(name: str) -> str | None:
    """The version that the metadata says; None: not installed. Unreadable metadata is "0"."""
    try:
        return version(name) or "0"
    except PackageNotFoundError:
        return None


def older(version: str, minimum: str) -> bool:
    """Whether a version is below a minimum, by the numbers at its start: 2.13.0+cpu is 2.13."""
    pairs = zip_longest(_numbers(version), _numbers(minimum), fillvalue=0)
    return next((has < asked for has, asked in pairs if has != asked), False)


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in found[0].split(".")] if found else []


def pip() -> str:
    """pip of this Python: by its name where the shell would find that one."""
    return _beside("pip")


def _beside(program: str) -> str:
    """How to call a program of this Python's environment, also one that is still to come."""
    pip = shutil.which("pip")
    active = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return program if active else f"{sys.executable} -m {program}"


# Cores, memory, disk.


def cpu() -> dict[str, Any]:
    """Cores of the machine, those that this process may use, and what limits its threads."""
    return {
        "cores": os.cpu_count(),
        "usable": usable_cores(),
        "quota": cpu_quota(),
        "environment": set_of(THREADS),
        "bf16": bf16_instructions(),
    }


def usable_cores() -> int | None:
    """Cores that the scheduler lets this process run on; not every system says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_quota(root: Path = CGROUP) -> float | None:
    """Cores' worth of time that a container may use; None: no limit is known."""
    both = (_text(root / "cpu.max") or "").split()
    if len(both) != 2:
        parts = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
        both = [_text(root / part) or "" for part in parts]
    quota, period = (int(each) if each.isdigit() else 0 for each in both)
    return quota / period if quota > 0 and period > 0 else None


def bf16_instructions(proc: Path = PROC) -> list[str] | None:
    """The CPU's instructions for bf16 by name; None where the system does not tell."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", _text(proc / "cpuinfo") or "", re.MULTILINE)
    return sorted(BF16 & set(lines[0].split())) if lines else None


def memory(proc: Path = PROC, root: Path = CGROUP) -> dict[str, int | None]:
    """Bytes in all and available, or fewer where a container is given fewer; None: unknown."""
    told = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(proc / "meminfo") or "", re.MULTILINE))
    total = int(told["MemTotal"]) * 1024 if "MemTotal" in told else _pages()
    available = int(told["MemAvailable"]) * 1024 if "MemAvailable" in told else None
    limit, used = _container(root)
    if limit is None or (total is not None and limit >= total):
        return {"total": total, "available": available}
    left = max(0, limit - used)
    return {"total": limit, "available": left if available is None else min(available, left)}


def _container(root: Path) -> tuple[int | None, int]:
    """What a control group may take, and has taken; files that can be dropped do not count."""
    for limit, usage, stat, files in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        given, used = _text(root / limit) or "", _text(root / usage) or ""
        if given.isdigit():
            dropped = re.search(rf"^{files} (\d+)$", _text(root / stat) or "", re.MULTILINE)
            held = int(used) if used.isdigit() else 0
            return int(given), held - (int(dropped[1]) if dropped else 0)
    return None, 0


def _pages() -> int | None:
    """Memory of systems that have no /proc/meminfo."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def disk(what: str, folder: Path) -> dict[str, Any]:
    """Bytes free where a folder is, or will be."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    usage = shutil.disk_usage(there)
    writable = os.access(there, os.W_OK)
    return {
        "what": what,
        "folder": str(folder.absolute()),
        "free": usage.free,
        "total": usage.total,
        "writable": writable,
    }


def driver(proc: Path = PROC) -> str | None:
    """The version of NVIDIA's driver; None: there is none, or it does not tell."""
    first = (_text(proc / "driver/nvidia/version") or "").partition("\n")[0]
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", f"{first} ")
    return found[1] if found else None


def set_of(names: tuple[str, ...], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of these environment variables that are set."""
    return {name: environment[name] for name in names if environment.get(name)}


def _text(file: Path) -> str | None:
    """What a small file of the system says; None where it is not there or not for us."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
