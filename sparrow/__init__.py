"""Sparrow: sparse rollout, dense policy, a measured difference between them.

`sparrow.api` has every verb as a function from its configuration to its result. Importing the
package is cheap: no torch is loaded until a model is, or a verb is called.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "load": "sparrow.models",
    "random": "sparrow.models",
    "save": "sparrow.models",
    "fetch": "sparrow.models.fetch",
    "push": "sparrow.api",
}
__all__ = ["__version__", "api", *_LAZY]


def __getattr__(name: str) -> Any:
    if name == "api":
        return import_module("sparrow.api")
    if name not in _LAZY:
        raise AttributeError(f"module 'sparrow' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
