"""The resolved configuration: what a run really used, defaults included, as a file to rerun it."""

from pathlib import Path
from typing import TypeVar

import tomli_w

from sparrow.config.loading import load_config
from sparrow.config.schema import Section
from sparrow.files import add_digest_line, check_digest_line, read_text, write_whole

FILE_NAME = "config.resolved.toml"
Root = TypeVar("Root", bound=Section)


def save_resolved(config: Section, directory: Path) -> Path:
    """Write `config.resolved.toml`; loading it gives an equal configuration.

    Fields that are None are left out: TOML has no word for it, and None is their default. The
    first line, a comment, is the digest of the others. The file appears whole or not at all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    table = config.model_dump(mode="json", exclude_none=True)
    write_whole(path, [add_digest_line(tomli_w.dumps(table))])
    return path


def read_resolved(root: type[Root], directory: Path) -> Root:
    """The configuration that a run directory holds, as it was written; ValueError with the file."""
    path = directory / FILE_NAME
    text = read_text(path, "configuration")
    try:
        check_digest_line(text)
    except ValueError as error:
        raise ValueError(f"configuration {path}: {error}") from error
    return load_config(root, [path])
