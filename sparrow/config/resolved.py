"""The resolved configuration: what a run really used, defaults included, as a file to rerun it."""

import os
from pathlib import Path

import tomli_w

from sparrow.config.schema import Section

FILE_NAME = "config.resolved.toml"


def save_resolved(config: Section, directory: Path) -> Path:
    """Write `config.resolved.toml`; loading it gives an equal configuration.

    Fields that are None are left out: TOML has no word for it, and None is their default. The
    file appears whole or not at all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    unfinished = directory / f".{FILE_NAME}.{os.getpid()}"
    table = config.model_dump(mode="json", exclude_none=True)
    try:
        unfinished.write_bytes(tomli_w.dumps(table).encode())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
