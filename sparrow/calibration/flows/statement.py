"""The language of flows as data, for programs that write flows: read off the code itself."""

import inspect
from collections.abc import Callable
from typing import Any

import sparrow.sparse.flows as language
from sparrow.sparse.compile.emit import MOST_NUMBERS
from sparrow.sparse.flows import Flow, Position, Tensor, formats, library, loading, tensor
from sparrow.sparse.flows.flow import MOST_STORED, PROBE

FORMATS = ("as_keys", "fp32", "fp16", "bf16", "fp8", "int4")
BYTES = {"as_keys": 2.0, "fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int4": 0.5}
COMPILES = {
    "refused": (
        "reshape between sizes that are not powers of two: so not of a query whose group is 3",
        "int4 vectors and pages of such sizes",
        "take of uneven steps",
        "state that depends on all pages",
        "a convolution of what depends on all pages: convolve before softmax_over_pages",
        "among_best, union and two_stage in a flow with mass (refused everywhere)",
        "weights in summarise",
        "values of more than 65536 numbers a page",
        "formulas hundreds of operations deep",
    ),
    "otherwise": "a flow that is refused runs by its definition, on CPUs only",
}
COST = {
    "bytes": "a step reads the fields of every finished page: what grows with the context",
    "over_pages": "formulas over all pages need a second kernel, some 5 us a layer",
    "two_stage": "reads the fields of both stages of every page: another choice, not less time",
    "layers": "Flow(layers=n): one choice for n layers, 1/n of the bytes and of the time to select",
    "16-bit landmarks": "several a page are far slower than 4-bit ones (232 and 85 us, 32 x 32K)",
}
NOT_THERE = (
    "sort, argmax, top-k: where(x >= x.max(0, keepdims=True), 1.0, 0.0) marks the greatest",
    "stack: constant([[1], [0]]) * a + constant([[0], [1]]) * b, or two fields",
    "indices of other axes than the first: transpose, or multiply by a constant",
    "a correction for pages that are not read: it would read a mean value of every page",
    "tokens instead of pages: kernels read whole pages of 16",
    "== and !=, & and |, ** (use <, where, x * x)",
)


def statement() -> dict[str, Any]:
    """Formats, operations, what scores see, what compiles, what it costs, what ships."""
    functions = {
        name: _about(value)
        for name, value in vars(language).items()
        if inspect.isfunction(value) and value.__module__ == tensor.__name__
    }
    methods = {
        name: _about(value) if callable(value) else (value.__doc__ or "").strip()
        for name, value in vars(Tensor).items()
        if not name.startswith("_") and name not in ("node", "paged")
    }
    return {
        "flow": {
            "parameters": [*inspect.signature(Flow).parameters],
            "meaning": inspect.getdoc(Flow),
            "summarise": "(keys [P, D], values [P, D]) -> {field: tensor}, once a finished page",
            "score": "(query [R, D], fields, position) -> one number a page; more is kept sooner",
            "probe": dict(zip(("page", "head_size", "group"), PROBE, strict=True)),
            "python": "plain Python around it: loops, helpers, math; numpy to make constants",
        },
        "formats": {
            name: {"meaning": inspect.getdoc(getattr(formats, name)), "bytes": BYTES[name]}
            for name in FORMATS
        },
        "sizes": {"D": "numbers of a head", "P": "tokens of a page, 16 by default"},
        "operators": ["+", "-", "*", "/", "@", "<", "<=", ">", ">=", "x[0]", "x[1:3]"],
        "methods": methods,
        "functions": functions,
        "position": inspect.getdoc(Position),
        "limits": {"fields_over_keys_and_values": MOST_STORED, "numbers_of_a_page": MOST_NUMBERS},
        "compiles": COMPILES,
        "cost": COST,
        "not_there": list(NOT_THERE),
        "built_in": {name: _flow_source(name) for name in loading.built_in()},
        "library": inspect.getsource(library),
        "guide": "docs/flow-loop.md",
    }


def _about(function: Callable[..., Any]) -> str:
    """The signature and what it says about itself."""
    signature = str(inspect.signature(function)).replace('"', "").replace("'", "")
    return f"{signature}  {inspect.getdoc(function) or ''}".strip()


def _flow_source(name: str) -> str:
    """What a flow of the library says about itself."""
    value = getattr(library, name)
    return (inspect.getdoc(value) or "") if inspect.isfunction(value) else f"Flow {value.name!r}"
