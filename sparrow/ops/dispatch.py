"""Dispatch of ops: to the optimised kernel of the device, or to the definition.

`op` makes an op of its definition. All versions compute the same function up to rounding: the
choice changes speed alone. `versions` lists the optimised kernels, `using("reference")` forces the
definitions, and `using("compiled")` runs them with the small kernels of a layer fused by
torch.compile: for training, which needs gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

PACKAGES = {"cpu": "sparrow.ops.cpu", "cuda": "sparrow.ops.kernels"}
# Device type -> op -> the module that has a function of the op's name, `supports(op, *arguments)`
# and `supports_dtype(op, dtype, head size)`.
OPTIMISED = {
    "cpu": {
        "attend_decode": "attention",
        "write_pages": "pages",
        "select_pages": "pages",
        "logits": "logits",
        "sample": "sampling",
    },
    "cuda": {
        **dict.fromkeys(("attend_decode", "attend_verify"), "attend_decode"),
        "attend_causal_paged": "attend_prefill",
        "attend_kept": "attend_kept",
        **dict.fromkeys(("write_pages", "select_pages", "page_bits"), "pages"),
        **dict.fromkeys(("sample", "step_inputs", "step_outputs"), "sampling"),
        **dict.fromkeys(("norm_linear", "linear_add", "norm_gated", "logits"), "layers"),
        "split_heads": "heads",
    },
}

COMPILED = ("norm_linear", "linear_add", "norm_gated", "gate", "split_heads")

_settled: ContextVar[bool] = ContextVar("weights_settled", default=False)
_choice: ContextVar[Choice] = ContextVar("ops_choice", default="fastest")


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def using(choice: Choice) -> AbstractContextManager[None]:
    """Choose the version of ops in a with-block, in this thread."""
    if choice not in get_args(Choice):
        raise ValueError(f"choice must be one of {get_args(Choice)}, got {choice!r}")
    return _set(_choice, choice)


def settled_weights() -> AbstractContextManager[None]:
    """Promise for a with-block that no running kernel writes weights, or slots of updates.

    Products may then read them before the previous kernel has ended. Outside, they wait.
    """
    return _set(_settled, True)


def optimised_kernels_allowed() -> bool:
    """Whether optimised kernels may run here, not only definitions."""
    return _choice.get() == "fastest"


def needs_gradients(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def weights_settled() -> bool:
    return _settled.get()


def versions(device: str, dtype: torch.dtype, head_size: int) -> dict[str, str]:
    """The optimised kernels for such a model, by op; other ops run their definitions."""
    modules = {op: _optimised(op, device) for op in OPTIMISED.get(device, {})}
    return {
        op: module.__name__
        for op, module in modules.items()
        if module is not None and module.supports_dtype(op, dtype, head_size)
    }


class Op(Generic[P, R]):
    """A function of tensors: checks its contract, then runs the fitting version.

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
            module = _optimised(self.name, args[0].device.type)
            if module is not None and module.supports(self.name, *args, **kwargs):
                return getattr(module, self.name)
        if choice == "compiled" and self.name in COMPILED:
            return _compiled(self.definition)
        return self.definition


def op(*, gradients: bool = True, checked: bool = True) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorator: make an op of its definition; `checked=False` where torch refuses wrong shapes."""
    return lambda definition: Op(definition, gradients=gradients, checked=checked)


def compile_decorator() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return torch.compile under `using("compiled")`, otherwise the identity."""
    return _compiled if _choice.get() == "compiled" else lambda function: function


@cache
def _compiled(definition: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(definition)


@cache
def _optimised(op: str, device: str) -> ModuleType | None:
    if op not in OPTIMISED.get(device, {}):
        return None
    try:
        return import_module(f"{PACKAGES[device]}.{OPTIMISED[device][op]}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        warn(f"triton is not installed, so {op} runs its slow definition on {device}", stacklevel=4)
        return None
