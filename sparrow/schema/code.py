"""Which settings of a configuration name code that a run imports.

A configuration that a user gives may name code; one that comes with somebody's files may not make
us import it unasked. Every text that has the form of an import path counts (module:function, or a
file of Python), but for the settings in DATA: a setting that is added later is refused until it is
known here.
"""

import re
from collections.abc import Iterator
from typing import Any

from sparrow.schema.train import TrainConfig

# Settings of `sparrow train` that name no code, whatever they say; keys in lists without a number.
DATA = {
    "algorithm.name",
    "data.file",
    "data.task",
    "gate.mode",
    "model.device",
    "model.dtype",
    "model.name",
    "rollout.attention.schedule",
    "run.dir",
    "run.name",
    "validation.file",
}
ARGUMENTS = ".settings."  # of functions: values, which they are called with


def code_settings(config: TrainConfig) -> dict[str, str]:
    """What a configuration would have us import, by dotted key, such as {"rollout.episode": "m:f"}.

    Names of what is part of the package (math, token-tis, quest) are no code in this sense.
    """
    return {
        key: text
        for key, text in _texts(config.model_dump(mode="json"))
        if _setting(key) not in DATA and ARGUMENTS not in key and names_code(text)
    }


def names_code(text: str) -> bool:
    """Whether a text has the form of an import path: module:name, or a file of Python."""
    return ":" in text or text.endswith(".py")


def _setting(key: str) -> str:
    return re.sub(r"\[\d+\]", "", key)


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in plain data, with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{key}[{number}]")
