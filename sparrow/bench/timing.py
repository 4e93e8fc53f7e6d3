"""What the engine benchmarks share: the machine, the clock, and where the time of a step goes."""

import gc
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.autograd import DeviceType

from sparrow import ops
from sparrow.sparse.presets import preset
from sparrow.sparse.schedule import Schedule

# Parts of a step -> the ops that make them up (`logits` is the LM head).
OPS = {
    "attention": ("attend_decode", "attend_causal_paged"),
    "select": ("score_pages", "select_pages"),
    "store": ("write_pages", "append_pages", "summarise_pages"),
    "linear": ("norm_linear", "linear_add", "norm_gated", "logits"),
    "heads": ("split_heads",),
    "sampling": ("sample",),
    "rows": ("step_inputs", "step_outputs"),
}
# The same parts -> the names of kernels on a GPU, ours and those of the BLAS.
KERNELS = {
    "attention": r"^_attend|^_join",
    "select": r"^_score|^_select",
    "store": r"^_store",
    "linear": r"^_norm_linear|^_norm_gated|^_linear_add|gemm|gemv|nvjet|cutlass|splitk",
    "heads": r"^_split_heads",
    "sampling": r"^_sum_chunks|^_draw",
    "rows": r"^_read_rows|^_write_rows",
}
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
PEAKS = {"H200": 4.8e12}  # published bytes per second of memory

Split = dict[str, float]


def machine(device: torch.device) -> dict[str, Any]:
    """Where figures were taken, and with what."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **{name: _version(name) for name in ("torch", "triton", "transformers", "numba")},
        "command": shlex.join(sys.argv),
    }


def describe(machine: dict[str, Any]) -> str:
    """The machine in a table's title."""
    return f"{machine['device']}, {machine['cpus']} CPUs, torch {machine['torch']}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_dtype(name: str | None) -> str:
    """The long name of a dtype; "auto" where none was asked for."""
    return "auto" if name is None else DTYPES.get(name, name)


def free_memory(device: torch.device) -> None:
    """Give back what an engine held that nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_of(device: torch.device) -> float | None:
    """Bytes per second that the memory can deliver, where that is published."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def schedule_named(name: str | None) -> Schedule | None:
    """None is dense, "fixed-4096" one budget at every length, others are presets."""
    if name is None:
        return None
    fixed = re.fullmatch(r"fixed-(\d+)", name)
    return preset(name) if fixed is None else Schedule.fixed(int(fixed[1]))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def split_of(work: Callable[[], object], device: torch.device) -> Split:
    """Seconds by part of whatever engine work runs inside.

    On a CPU the ops are timed where they are called, and "python" is the rest of the wall time:
    the engine itself, and the few tensor calls that are no op. On a GPU the kernels are summed by
    name; those that overlap count in full.
    """
    if device.type == "cuda":
        return _kernel_split(work)
    taken: Split = {}
    with timed_ops(taken):
        wall = seconds(work, device)
    taken["python"] = wall - sum(taken.values())
    return taken


@contextmanager
def timed_ops(taken: Split) -> Iterator[None]:
    """Add up the time of the ops, by part, for calls through `ops` in this with-block."""
    plain = {name: getattr(ops, name) for names in OPS.values() for name in names}
    taken.update(dict.fromkeys(OPS, 0.0))
    try:
        for part, names in OPS.items():
            for name in names:
                setattr(ops, name, _timed(plain[name], part, taken))
        yield
    finally:
        for name, op in plain.items():
            setattr(ops, name, op)


def _timed(op: Callable[..., Any], part: str, taken: Split) -> Callable[..., Any]:
    @wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return op(*args, **kwargs)
        finally:
            taken[part] += time.perf_counter() - start

    return call


def _kernel_split(work: Callable[[], object]) -> Split:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    taken = dict.fromkeys((*KERNELS, "other"), 0.0)
    for event in recorded.key_averages():
        if event.device_type == DeviceType.CUDA:
            taken[part_of(event.key)] += event.self_device_time_total / 1e6
    return taken


def part_of(kernel: str) -> str:
    """The part of a step that a kernel of this name belongs to."""
    found = (part for part, names in KERNELS.items() if re.search(names, kernel, re.IGNORECASE))
    return next(found, "other")
