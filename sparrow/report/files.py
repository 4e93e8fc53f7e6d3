"""Surfaces and plans as their files hold them."""

from pathlib import Path

from sparrow.files import read_document
from sparrow.report.panels import Plain

FORMAT = 1


def read(path: str | Path, key: str, what: str) -> Plain:
    """A file of format 1 that holds `key`; an error says what the file should be."""
    data = read_document(path)
    if data.get("format") != FORMAT or key not in data:
        raise ValueError(f"{path} is no file of format {FORMAT} of a {what}")
    return data
