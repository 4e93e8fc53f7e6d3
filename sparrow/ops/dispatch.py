"""Which version of an op runs: the faster one of the device where there is one, or the definition.

Every version of an op computes the same function up to rounding; choosing one changes speed, not
meaning. `versions` tells what runs, `using("reference")` forces the definitions, and so does
`using("compiled")`, which has torch.compile join the small kernels of a layer: for training, which
wants gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, get_args
from warnings import warn

import torch
from torch import Tensor

Choice = Literal["fastest", "reference", "compiled"]

# (op, device type) -> module with a function of the op's name, `supports(op, *arguments)` and
# `fits(dtype, head size)`. The second item is the package that it needs beyond torch.
FASTER = {
    ("attend_decode", "cpu"): ("sparrow.ops.cpu.attention", "numba"),
    ("write_pages", "cpu"): ("sparrow.ops.cpu.pages", "numba"),
    ("summarise_pages", "cpu"): ("sparrow.ops.cpu.pages", "numba"),
    ("append_pages", "cpu"): ("sparrow.ops.cpu.pages", "numba"),
    ("score_pages", "cpu"): ("sparrow.ops.cpu.pages", "numba"),
    ("select_pages", "cpu"): ("sparrow.ops.cpu.pages", "numba"),
    ("logits", "cpu"): ("sparrow.ops.cpu.logits", "torch"),
    ("sample", "cpu"): ("sparrow.ops.cpu.sampling", "numba"),
    ("attend_decode", "cuda"): ("sparrow.ops.kernels.attend_decode", "triton"),
    ("attend_causal_paged", "cuda"): ("sparrow.ops.kernels.attend_prefill", "triton"),
    ("write_pages", "cuda"): ("sparrow.ops.kernels.store", "triton"),
    ("select_pages", "cuda"): ("sparrow.ops.kernels.select", "triton"),
    ("sample", "cuda"): ("sparrow.ops.kernels.sample", "triton"),
    ("norm_linear", "cuda"): ("sparrow.ops.kernels.linear", "triton"),
    ("linear_add", "cuda"): ("sparrow.ops.kernels.linear", "triton"),
    ("norm_gated", "cuda"): ("sparrow.ops.kernels.linear", "triton"),
    ("logits", "cuda"): ("sparrow.ops.kernels.linear", "triton"),
    ("step_inputs", "cuda"): ("sparrow.ops.kernels.rows", "triton"),
    ("step_outputs", "cuda"): ("sparrow.ops.kernels.rows", "triton"),
    ("split_heads", "cuda"): ("sparrow.ops.kernels.heads", "triton"),
}

COMPILED = ("norm_linear", "linear_add", "norm_gated", "split_heads")

_settled: ContextVar[bool] = ContextVar("weights_settled", default=False)
_choice: ContextVar[Choice] = ContextVar("ops_choice", default="fastest")


@contextmanager
def using(choice: Choice) -> Iterator[None]:
    """Run ops by their definitions in a with-block, in this thread: as they are, or compiled."""
    if choice not in get_args(Choice):
        raise ValueError(f"choice must be one of {get_args(Choice)}, got {choice!r}")
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


@contextmanager
def settled_weights() -> Iterator[None]:
    """A promise for a with-block: no work that is still running writes weights.

    Products may then read weights before the kernel ahead of them has ended. Outside, they wait.
    """
    token = _settled.set(True)
    try:
        yield
    finally:
        _settled.reset(token)


def fastest() -> bool:
    """Whether faster versions may run here, and not only definitions."""
    return _choice.get() == "fastest"


def weights_settled() -> bool:
    return _settled.get()


def versions(device: str, dtype: torch.dtype, head_size: int) -> dict[str, str]:
    """The faster versions that such a model gets, by op; other ops run their definitions."""
    found = {op: _faster(op, kind) for op, kind in FASTER if kind == device}
    return {
        op: module.__name__
        for op, module in found.items()
        if module is not None and module.fits(dtype, head_size)
    }


def run(op: str, definition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the version of `op` that fits the first argument's device."""
    first: Tensor = args[0]
    if _choice.get() == "fastest":
        module = _faster(op, first.device.type)
        if module is not None and module.supports(op, *args, **kwargs):
            return getattr(module, op)(*args, **kwargs)
    if _choice.get() == "compiled" and op in COMPILED:
        return _compiled(definition)(*args, **kwargs)
    return definition(*args, **kwargs)


def joiner() -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """What makes one kernel of a function of small ones here; None: nothing does."""
    return _compiled if _choice.get() == "compiled" else None


@cache
def _compiled(definition: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(definition)


@cache
def _faster(op: str, device: str) -> ModuleType | None:
    if (op, device) not in FASTER:
        return None
    name, needs = FASTER[op, device]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != needs:
            raise
        warn(f"{needs} is not installed: {op} runs its slow definition on {device}", stacklevel=4)
        return None
