"""Sparrow: RL training of language models with sparse-attention rollouts.

    import sparrow

    model = sparrow.load("tiny")
    surface = sparrow.calibrate(model, task="assignments")
    run = sparrow.train("tiny", schedule=sparrow.plan(surface), task="assignments", steps=12)

Every verb is a function here (sparrow/api.py); `sparrow.schema` has their configurations and
results. Importing the package is cheap: torch is loaded when a verb is called.
"""

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Of MKL on x86, which reads it at its first product: a row of a product has the same bits however
# many rows there are, so that a sample does not depend on what is decoded beside it.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

_VERBS = (
    *("fetch", "calibrate", "plan", "distill", "sft", "train", "preview", "evaluate", "report"),
    *("generate", "chat", "puzzle", "presets", "replay", "doctor", "flow_check", "flow_score"),
    *("flow_bench", "flow_texts", "flow_language", "flow_loop", "flow_publish", "bench", "push"),
    *("simulate", "status", "audit"),
)
_HOMES = dict.fromkeys(("api", *_VERBS), "sparrow.api")
_HOMES |= dict.fromkeys(("load", "random", "save"), "sparrow.models")
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sparrow' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return home if name == "api" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
