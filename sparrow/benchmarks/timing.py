"""What benchmarks share: the machine, the clock, where the time of a step goes, the table."""

import gc
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from statistics import median
from typing import Any, TypeVar

import torch
from rich.table import Table
from torch.autograd import DeviceType

from sparrow import ops
from sparrow.benchmarks.doctor import installed
from sparrow.calibration.planning import hardware
from sparrow.calibration.planning.cost import ByteModel
from sparrow.calibration.planning.hardware import Hardware
from sparrow.calibration.tables import figures
from sparrow.engine.pool import PAGE
from sparrow.models import Decoder, ModelSpec
from sparrow.schema.bench import Benchmark, Machine, Split
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.presets import preset
from sparrow.sparse.rule import Rule

# Parts of a step -> the ops that make them up (`logits` is the LM head).
OPS = {
    "attention": ("attend_decode", "attend_causal_paged"),
    "select": ("score_pages", "select_pages"),
    "store": ("write_pages", "summarise_pages"),
    "linear": ("norm_linear", "linear_add", "norm_gated", "logits"),
    "heads": ("split_heads",),
    "sampling": ("sample",),
    "rows": ("step_inputs", "step_outputs"),
}
# The same parts -> the names of kernels on a GPU: ours, those of flows (`score_pages`, `choose`,
# `append`; see sparse/compile) and those of the BLAS.
KERNELS = {
    "attention": r"^_attend|^_join",
    "select": r"^score_pages|^choose|^_select",
    "store": r"^append|^_store",
    "linear": r"^_linear|gemm|gemv|nvjet|cutlass|splitk",
    "heads": r"^_split_heads",
    "sampling": r"^_sum_chunks|^_draw",
    "rows": r"^_read_rows|^_write_rows",
}
T = TypeVar("T")
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Calls to time together: what names them, and the bytes that one of them moves."""

    names: dict[str, Any]
    bytes: int
    calls: Sequence[Callable[[], object]]

    def work(self) -> None:
        for call in self.calls:
            call()


def machine(device: torch.device) -> Machine:
    """Where figures were taken, and with what."""
    names = ("triton", "transformers", "numba")
    return Machine(
        device=gpu_name(device) or platform.machine(),
        cpus=os.cpu_count(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        command=shlex.join(sys.argv),
        **{name: installed(name) for name in names},
    )


def published(device: torch.device) -> Hardware | None:
    """The published figures of a GPU that the planner knows."""
    name = gpu_name(device).lower()
    return next((Hardware.load(known) for known in hardware.known() if known in name), None)


def peak_of(device: torch.device) -> float | None:
    """Bytes per second that the memory can deliver, where that is published."""
    own = published(device)
    return None if own is None else own.bytes_per_s


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def table(result: Benchmark) -> Table:
    """The result for a terminal."""
    return figures(
        f"{result.title.format(result)}, {result.machine.describe()}",
        getattr(result, result.shown),
        result.columns,
        group=result.group,
        caption=result.caption.format(result),
    )


def of_model(model: Decoder, name: str | ModelSpec) -> dict[str, Any]:
    """What every result of a model says first."""
    return {
        "machine": machine(model.device),
        "model": name if isinstance(name, str) else name.family,
        "parameters": model.spec.parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def pages_bytes(model: Decoder, rule: Rule) -> int:
    """Bytes of a page in all layers: keys, values and what a rule keeps with them."""
    spec = model.spec
    fields = ops.kv_fields(PAGE, spec.head_size, model.dtype)
    fields += rule.fields(page=PAGE, head_size=spec.head_size, dtype=model.dtype)
    return ops.page_bytes(fields, layers=spec.layers, kv_heads=spec.kv_heads)


def reads(model: Decoder, schedule: Schedule | None = None) -> ByteModel:
    """What decode steps of an engine read: landmarks also where no budget bites."""
    return ByteModel(
        spec=model.spec,
        schedule=schedule,
        itemsize=model.dtype.itemsize,
        page=PAGE,
        idle_landmarks=True,
    )


def torch_dtype(name: str | None) -> str:
    """The long name of a dtype; "auto" where none was asked for."""
    return "auto" if name is None else DTYPES.get(name, name)


def free_memory(device: torch.device) -> None:
    """Give back what an engine held that nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def schedule_named(name: str | None, flow: Flow = block_mean) -> Schedule | None:
    """None is dense, "fixed-4096" one budget at every length, others are presets.

    "fixed-4096" leaves layers 0 and 1 dense, as the published schedules do, so that times compare
    with theirs; "fixed-4096-all" has no dense layers, "fixed-4096-dense-0,3" these. For
    measurements of time: presets are forced onto the flow and run on any family of models, where
    their budgets say nothing about quality.
    """
    if name is None:
        return None
    fixed = re.fullmatch(r"fixed-(\d+)(-all|-dense-\d+(?:,\d+)*)?", name)
    if fixed is None:
        return preset(name).forced_onto(flow=flow.name).replace(family=None)
    layers = tuple(map(int, re.findall(r"\d+", fixed[2] or "")))
    dense = layers if fixed[2] else (0, 1)  # as in the published schedules
    return Schedule.fixed(int(fixed[1]), name=name, flow=flow.name, dense_layers=dense)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What the work returns, and its wall time, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of the work alone."""
    return timed(work, device)[1]


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work as a CUDA graph to replay, after it has run once; on a CPU the work itself.

    What the work reads lives as long as what comes back; what it makes is overwritten by replays.
    """
    if device.type != "cuda":
        work()
        return work
    side, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        work()  # compiles kernels, which a capture must not
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> object:
        graph.replay()
        return work  # a reference: it holds the tensors that the graph reads

    return replay


def device_seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Seconds of one call, of many back to back, by the device's own clock where it has one."""
    if device.type != "cuda":
        return seconds(partial(repeat, work, times), device) / times
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    start.record()
    repeat(work, times)
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / 1e3 / times


def measure(
    cases: Sequence[Case], device: torch.device, *, replays: int, rounds: int
) -> list[dict[str, Any]]:
    """Microseconds and speed of one call of every case.

    Cases take turns in every round, each `replays` times back to back, on a GPU as one graph. The
    first round does not count.
    """
    works = [captured(case.work, device) for case in cases]
    taken: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds + 1):
        for case, work, times in zip(cases, works, taken, strict=True):
            took = device_seconds(work, replays, device) / len(case.calls)
            times.append(took * 1e6)
    peak = peak_of(device)
    return [
        case.names | {"calls": len(case.calls)} | _speed(case.bytes, times[1:], peak)
        for case, times in zip(cases, taken, strict=True)
    ]


def _speed(size: int, us: list[float], peak: float | None) -> dict[str, Any]:
    per_s = size / median(us) * 1e6
    return {
        "us": median(us),
        "us_min": min(us),
        "us_max": max(us),
        "us_rounds": us,
        "bytes": size,
        "tb_per_s": per_s / 1e12,
        "of_peak": per_s / peak if peak else None,
    }


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
    from sparrow.ops.cpu import pages as block_mean_kernels  # numba takes a second to import

    every = [name for names in OPS.values() for name in names]
    homes = {name: ops if hasattr(ops, name) else block_mean_kernels for name in every}
    plain = {name: getattr(home, name) for name, home in homes.items()}
    taken.update(dict.fromkeys(OPS, 0.0))

    def clocked(op: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return op(*args, **kwargs)
            finally:
                taken[part] += time.perf_counter() - start

        return call

    try:
        for part, names in OPS.items():
            for name in names:
                setattr(homes[name], name, clocked(plain[name], part))
        yield
    finally:
        for name, op in plain.items():
            setattr(homes[name], name, op)


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
