"""Configurations as TOML."""

import json
from typing import Any


def toml(**tables: Any) -> str:
    """Tables, and lists of tables, with a key per line."""
    lines: list[str] = []
    for name, value in tables.items():
        several = isinstance(value, list)
        for table in value if several else [value]:
            lines.append(f"[[{name}]]" if several else f"[{name}]")
            lines += [f"{key} = {json.dumps(inner)}" for key, inner in table.items()]
    return "\n".join([*lines, ""])
