"""Sparrow: sparse rollout, dense policy, a measured difference between them.

Importing the package is cheap: no torch is loaded until a name below is used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "load": "sparrow.models",
    "random": "sparrow.models",
    "save": "sparrow.models",
    "fetch": "sparrow.models.fetch",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sparrow' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
