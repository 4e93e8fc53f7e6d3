"""Ops, and which version of one runs: the faster one of the device, or the definition.

`op` makes an op of its definition. Every version of it computes the same function up to rounding;
choosing one changes speed, not meaning. `versions` tells what runs, `using("reference")` forces the
definitions, and so does `using("compiled")`, which has torch.compile join the small kernels of a
layer: for training, which wants gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, update_wrapper
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, Literal, ParamSpec, TypeVar, get_args
from warnings import warn

import torch

from sparrow.ops.contracts import Contract

P = ParamSpec("P")
R = TypeVar("R")
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


class Op(Generic[P, R]):
    """A function of tensors: checks its contract, then runs the version that fits.

    The device is that of the first argument. `definition` is the plain function, whose signature
    and docstring are the contract; it checks nothing and runs anywhere.
    """

    def __init__(self, definition: Callable[P, R], *, gradients: bool, checked: bool) -> None:
        self.definition = definition
        self.name = definition.__name__
        self._gradients = gradients
        self._contract = Contract(definition) if checked else None
        update_wrapper(self, definition)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._contract is not None:
            self._contract.check(args, kwargs)
        if self._gradients:
            return self._version(*args, **kwargs)(*args, **kwargs)
        with torch.no_grad():
            return self._version(*args, **kwargs)(*args, **kwargs)

    def _version(self, *args: Any, **kwargs: Any) -> Callable[P, R]:
        choice = _choice.get()
        if choice == "fastest":
            module = _faster(self.name, args[0].device.type)
            if module is not None and module.supports(self.name, *args, **kwargs):
                return getattr(module, self.name)
        if choice == "compiled" and self.name in COMPILED:
            return _compiled(self.definition)
        return self.definition


def op(*, gradients: bool = True, checked: bool = True) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make an op of a definition; `checked=False` where torch itself refuses wrong shapes."""
    return lambda definition: Op(definition, gradients=gradients, checked=checked)


def joiner() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes one kernel of a function of small ones (torch.compile), or leaves it as it is."""
    return _compiled if _choice.get() == "compiled" else lambda function: function


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
