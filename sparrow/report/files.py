"""Surfaces and plans as their files hold them."""

import json
from pathlib import Path

from sparrow.report.panels import Plain

FORMAT = 1


def read(path: str | Path, key: str, what: str) -> Plain:
    """A file of format 1 that holds `key`; an error says what the file should be."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or key not in data:
        raise ValueError(f"{path} is no file of format {FORMAT} of a {what}")
    return data
