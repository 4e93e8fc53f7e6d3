"""The machine without torch: cores, memory and disk, as far as a container lets this have them."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# Names that Linux gives to instructions for bf16, on x86 and on ARM.
BF16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


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
