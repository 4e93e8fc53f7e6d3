"""Shared parts of benchmarks: the machine, timers, time by part of a step, the table."""

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

# Parts of a step: their ops (`logits` is the LM head), and names of their GPU kernels: ours, those
# of flows (`score_pages`, `choose`, `append`; see sparse/compile) and those of the BLAS.
PARTS = {
    "attention": ("attend_decode attend_causal_paged", r"^_attend|^_join"),
    "select": ("score_pages select_pages", r"^score_pages|^choose|^_select"),
    "store": ("write_pages summarise_pages", r"^append|^_store"),
    "linear": (
        "norm_linear linear_add norm_gated logits",
        r"^_linear|gemm|gemv|nvjet|cutlass|splitk",
    ),
    "heads": ("split_heads", r"^_split_heads"),
    "sampling": ("sample", r"^_sum_chunks|^_draw"),
    "rows": ("step_inputs step_outputs", r"^_read_rows|^_write_rows"),
}
T = TypeVar("T")
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """Calls to be timed together: their names, and the bytes that one call moves."""

    names: dict[str, Any]
    bytes: int
    calls: Sequence[Callable[[], object]]

    def work(self) -> None:
        for call in self.calls:
            call()


def machine(device: torch.device) -> Machine:
    """The machine and the versions of a measurement."""
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
    """The published figures of a GPU, if the planner has them."""
    full_name = gpu_name(device).lower()
    return next((Hardware.load(name) for name in hardware.known() if name in full_name), None)


def peak_bandwidth(device: torch.device) -> float | None:
    """Published memory bandwidth in bytes per second; None: unknown."""
    gpu = published(device)
    return None if gpu is None else gpu.bytes_per_s


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def table(result: Benchmark) -> Table:
    """The table of a result for a terminal."""
    return figures(
        f"{result.title.format(result)}, {result.machine.describe()}",
        getattr(result, result.shown),
        result.columns,
        group=result.group,
        caption=result.caption.format(result),
    )


def model_fields(model: Decoder, name: str | ModelSpec) -> dict[str, Any]:
    """The common fields of results: machine, model, parameters, dtype."""
    return {
        "machine": machine(model.device),
        "model": name if isinstance(name, str) else name.family,
        "parameters": model.spec.parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def cache_page_bytes(model: Decoder, rule: Rule) -> int:
    """Bytes of a page in all layers: keys, values and summaries of a rule."""
    spec = model.spec
    fields = ops.kv_fields(PAGE, spec.head_size, model.dtype)
    fields += rule.fields(page=PAGE, head_size=spec.head_size, dtype=model.dtype)
    return ops.page_bytes(fields, layers=spec.layers, kv_heads=spec.kv_heads)


def reads(model: Decoder, schedule: Schedule | None = None) -> ByteModel:
    """Bytes that decode steps read, landmarks included even where no budget applies."""
    return ByteModel(
        spec=model.spec,
        schedule=schedule,
        itemsize=model.dtype.itemsize,
        page=PAGE,
        idle_landmarks=True,
    )


def torch_dtype(name: str | None) -> str:
    """The full name of a dtype; "auto" for None."""
    return "auto" if name is None else DTYPES.get(name, name)


def free_memory(device: torch.device) -> None:
    """Release memory that is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def schedule_named(name: str | None, flow: Flow = block_mean) -> Schedule | None:
    """A schedule by name: None is dense, "fixed-4096" a fixed budget, others are presets.

    "fixed-4096" leaves layers 0 and 1 dense, as the published schedules do, so that times compare
    with theirs; "fixed-4096-all" has no dense layers, "fixed-4096-dense-0,3" has these. For timing
    alone: presets are forced onto the flow and onto any model family, where their budgets say
    nothing about quality.
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
    """The result of a call and its wall time; the device is synchronised before and after."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The wall time of a call."""
    return timed(work, device)[1]


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Run a call once and capture it as a CUDA graph; on a CPU the call itself is returned.

    Its inputs live as long as the returned function; its outputs are overwritten by replays.
    """
    if device.type != "cuda":
        work()
        return work
    side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        work()  # compiles kernels, which is not allowed in a capture
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> object:
        graph.replay()
        return work  # keeps the tensors alive that the graph reads

    return replay


def device_seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Mean seconds of a call repeated back to back; on a GPU by CUDA events."""
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
    cases: Sequence[TimedCase], device: torch.device, *, replays: int, rounds: int
) -> list[dict[str, Any]]:
    """Microseconds and bandwidth of one call of every case.

    Cases alternate in every round, each `replays` times back to back, on a GPU as one graph. The
    first round does not count.
    """
    works = [captured(case.work, device) for case in cases]
    by_case: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds + 1):
        for case, work, times in zip(cases, works, by_case, strict=True):
            times.append(device_seconds(work, replays, device) / len(case.calls) * 1e6)
    peak = peak_bandwidth(device)
    return [
        case.names | {"calls": len(case.calls)} | _speed(case.bytes, times[1:], peak)
        for case, times in zip(cases, by_case, strict=True)
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


def time_by_part(work: Callable[[], object], device: torch.device) -> Split:
    """Seconds of engine work by part.

    On a CPU the calls of ops are timed, and "python" is the rest of the wall time: the engine
    itself, and the few tensor calls that are no op. On a GPU the kernels are summed by name;
    kernels that overlap count in full.
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
    """Add up the time of calls through `ops` in this with-block, by part."""
    from sparrow.ops.cpu import pages as block_mean_kernels  # numba takes a second to import

    part_of = {name: part for part, (names, _) in PARTS.items() for name in names.split()}
    homes = {name: ops if hasattr(ops, name) else block_mean_kernels for name in part_of}
    plain = {name: getattr(home, name) for name, home in homes.items()}
    taken.update(dict.fromkeys(PARTS, 0.0))

    def timed_op(op: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return op(*args, **kwargs)
            finally:
                taken[part] += time.perf_counter() - start

        return call

    try:
        for name, part in part_of.items():
            setattr(homes[name], name, timed_op(plain[name], part))
        yield
    finally:
        for name, op in plain.items():
            setattr(homes[name], name, op)


def _kernel_split(work: Callable[[], object]) -> Split:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    taken = dict.fromkeys((*PARTS, "other"), 0.0)
    for event in recorded.key_averages():
        if event.device_type == DeviceType.CUDA:
            taken[kernel_part(event.key)] += event.self_device_time_total / 1e6
    return taken


def kernel_part(kernel: str) -> str:
    """The part of a step to which a kernel belongs, by its name."""
    parts = (part for part, (_, names) in PARTS.items() if re.search(names, kernel, re.IGNORECASE))
    return next(parts, "other")
