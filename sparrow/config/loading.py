"""From files and overrides to a checked configuration."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from sparrow.config.errors import ConfigError
from sparrow.config.explain import explain
from sparrow.config.layers import Layer, clashes, merge, read_file, read_override, repeated
from sparrow.config.schema import Section

Root = TypeVar("Root", bound=Section)


def load_config(cls: type[Root], files: Sequence[Path], overrides: Sequence[str] = ()) -> Root:
    """The configuration of class `cls`: its defaults, then files left to right, then overrides.

    An override is `--section.key=value`; the value is read as TOML, or as text if it is none or
    the field wants text. Raises ConfigError with every problem that it finds.
    """
    layers = _read_layers(cls, files, overrides)
    # From JSON, pydantic takes a list for a tuple and a text for a path while it stays strict
    # about everything else. No field takes a TOML date: as [[...]] it is refused in its place.
    data = json.dumps(merge(layers), default=lambda date: [[str(date)]])
    try:
        return cls.model_validate_json(data)
    except ValidationError as error:
        raise explain(cls, error, layers) from None


def _read_layers(
    cls: type[Section], files: Sequence[Path], overrides: Sequence[str]
) -> list[Layer]:
    readers: list[Callable[[], Layer]] = [
        *(partial(read_file, Path(path)) for path in files),
        *(partial(read_override, cls, text) for text in overrides),
    ]
    layers: list[Layer] = []
    problems = [*repeated(overrides)]
    for read in readers:
        try:
            layers.append(read())
        except ConfigError as error:
            problems += error.args
    problems += clashes(layers)
    if problems:
        raise ConfigError(*problems)
    return layers
