"""What torch can tell: its build, its threads and its GPUs. Imports nothing else that may break."""

import warnings
from typing import Any

import torch

from sparrow.bench.doctor.host import driver
from sparrow.bench.doctor.verdict import LEAST_CAPABILITY


def build() -> dict[str, Any]:
    """Which torch this is, and how many threads it uses."""
    cuda, hip = torch.version.cuda, torch.version.hip
    made = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    return {"version": torch.__version__, "build": made, "threads": torch.get_num_threads()}


def gpus() -> list[dict[str, Any]]:
    """The GPUs that torch can use."""
    return [_gpu(index) for index in range(torch.cuda.device_count())] if not complaint() else []


def complaint() -> str | None:
    """Why torch can use no GPU, in its own words where it has some; None: it can."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return str(said[0].message) if said else "torch sees none"


def _gpu(index: int) -> dict[str, Any]:
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
