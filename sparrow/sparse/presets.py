"""Budget schedules by name: the published ones of `presets.json`, in our units, and plans."""

import json
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from sparrow.schema.loading import shipped_configs
from sparrow.schema.schedule import Note, Schedule


def preset_names() -> tuple[str, ...]:
    """Names of the presets: model and target, such as "qwen3-1.7b-0.86"."""
    return (*_data()["schedules"], *shipped_configs("schedules"))


def preset(name: str) -> Schedule:
    """A schedule whose budgets held the 5th percentile of acceptance at its target."""
    data = _data()
    if name not in preset_names():
        close = get_close_matches(name.lower(), preset_names(), n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        names = ", ".join(preset_names())
        raise ValueError(f"unknown preset {name!r}{hint}; known: {names}")
    if name not in data["schedules"]:
        return Schedule.load(shipped_configs("schedules")[name])
    published = data["schedules"][name]
    notes = data["provenance"] | published["provenance"]
    return Schedule(
        name=name,
        lengths=data["lengths"],
        budgets=published["budgets"],
        **data["rule"],
        model=published["model"],
        family=data["family"],
        provenance=tuple(Note(key=key, text=text) for key, text in notes.items()),
    )


def named_schedule(name: str) -> Schedule:
    """Load a schedule by the name of a preset, or from a file."""
    is_file = Path(name).is_file() or name.endswith(".json") or "/" in name
    return Schedule.load(name) if is_file and name not in preset_names() else preset(name)


@cache
def _data() -> dict[str, Any]:
    return json.loads(files("sparrow.sparse").joinpath("presets.json").read_text(encoding="utf-8"))
