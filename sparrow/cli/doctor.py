"""`sparrow doctor`: what is here, what works, what is missing and how to get it."""

from collections.abc import Iterator, Mapping
from typing import Any

from sparrow import api
from sparrow.cli.output import AsJson, console, measuring, write_json
from sparrow.schema.common import DoctorConfig

Examined = Mapping[str, Any]
GIB = 2**30
SECTIONS = {
    "devices": ("cpu", "gpus", "driver"),
    "memory": ("memory", "disk", "fits"),
    "models": ("models", "hub"),
    "checks": ("self_test", "kernels", "broken"),
}


def doctor(config: DoctorConfig, *, json: AsJson = False) -> int:
    with measuring("looking; the first time, kernels are compiled"):
        examined = api.doctor(config)
    if json:
        write_json(examined)
    else:
        show(examined)
    return int(not examined["ready"])


def show(found: Examined) -> None:
    """One screen: sections of lines, the verdict last."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    sections = {"packages": [*_packages(found)]} | {
        title: [line for key in keys for line in _lines(key.replace("_", "-"), found[key])]
        for title, keys in SECTIONS.items()
    }
    for title, lines in sections.items():
        for number, line in enumerate(lines):
            grid.add_row("" if number else Text(title, style="bold"), line)
    console.print(grid, highlight=False)
    _verdict(found)


def _packages(found: Examined) -> Iterator[str]:
    yield f"sparrow {found['sparrow']}, Python {found['python']}, {found['platform']}"
    for title, optional in (("", False), ("optional: ", True)):
        here = [each for each in found["packages"] if (each["extra"] is not None) == optional]
        told = {"ok": "", "old": " (too old)", "missing": "missing"}
        shown = [f"{p['name']} {p['version'] or ''}{told[p['state']]}" for p in here]
        yield title + ", ".join(shown)


def _lines(name: str, value: Any) -> Iterator[str]:
    """A line for a value, one for each where there are several; none for what nobody knows."""
    if isinstance(value, list):
        for each in value:
            yield from _lines(name, each)
    elif isinstance(value, Mapping) and any(isinstance(each, list) for each in value.values()):
        for inner, each in value.items():
            yield from _lines(f"{name} {inner}", each)
    elif value not in (None, {}, ""):
        yield f"{name}: {_words(value)}"


def _words(value: Any) -> str:
    """Plain data in words: names with what they stand for, sizes in GiB."""
    if isinstance(value, Mapping):
        told = {name.replace("_", " "): _words(inner) for name, inner in value.items()}
        return ", ".join(f"{name} {text}" for name, text in told.items() if text)
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "NO"}[value]
    if isinstance(value, int) and value >= GIB // 8:
        return f"{value / GIB:.3g} GiB"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _verdict(found: Examined) -> None:
    if found["ready"]:
        verbs, where = ", ".join(found["ready_for"]), " and ".join(found["devices"])
        ready = f"\n[bold green]ready for:[/] {verbs}, on {where}"
        console.print(ready, highlight=False, markup=True)
    else:
        console.print("\n[bold red]not ready.[/] To mend:", highlight=False, markup=True)
        _advise(found["problems"])
    if found["missing"]:
        console.print("missing, should you need it:", style="bold", highlight=False)
        _advise(found["missing"])


def _advise(advice: list[dict[str, str]]) -> None:
    for each in advice:
        console.print(f"  {each['what']}\n      {each['how']}", highlight=False)
