"""Help in eighty columns, from the configuration classes and the docstrings of the verbs."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sparrow.cli.verbs import ABOUT, GROUPS, PANELS, Verb
from sparrow.schema.base import Record
from sparrow.schema.errors import fields_of
from sparrow.schema.options import OPTIONS, Option

WIDEST = 100
HELP = Option("help", (), bool, "Show this message and exit.", letter="h")
VERSION = Option("version", (), bool, "Print the version.")
CONFIG = Option(
    "config", (), str, "TOML file of settings; of several, later ones win.", "FILE", "c"
)
FILES = "TOML files, of which later ones win, and settings such as --section.key=value."


def overview(verbs: Mapping[str, Verb], group: str = "") -> RenderableType:
    """All verbs, or those of a group."""
    if group:
        own = {name: verb for name, verb in verbs.items() if name.startswith(f"{group} ")}
        rows = [(name.removeprefix(f"{group} "), first_sentence(own[name].doc)) for name in own]
        parts = [_usage(f"{group} VERB"), *_texts(GROUPS[group]), _panel("Verbs", rows)]
        return Group(*parts, _options([HELP]))
    about = {name: first_sentence(verb.doc) for name, verb in verbs.items()} | {
        name: first_sentence(text) for name, text in GROUPS.items()
    }
    panels = [
        _panel(title, [(name, about[name]) for name in names]) for title, names in PANELS.items()
    ]
    return Group(_usage("VERB"), *_texts(ABOUT), *panels, _options([VERSION, HELP]))


def verb_help(verb: Verb) -> RenderableType:
    """Usage, what the verb does with examples, and its options by panels."""
    arguments = [option for option in verb.options if option.positional]
    shown = [(option.metavar, _explained(option)) for option in arguments] or _file_row(verb)
    panels: dict[str, list[Option]] = {}
    for option in (*verb.options, CONFIG, HELP):
        if not option.positional:
            panels.setdefault(option.panel, []).append(option)
    ordered = {title: panels[title] for title in sorted(panels, key=lambda title: title == OPTIONS)}
    return Group(
        _usage(" ".join([verb.name, *(name for name, _ in shown), "[OPTIONS]"])),
        *_texts(verb.doc),
        *([_panel("Arguments", shown)] if shown else []),
        *(_options(options, title) for title, options in ordered.items()),
        *_sections(verb.config),
    )


def first_sentence(text: str) -> str:
    return flowing(text).split("\n\n")[0]


def flowing(text: str) -> str:
    """The text with each paragraph on one line, so that it fills a terminal of any width.

    Lines that begin with a blank stay as they are: examples.
    """
    lines = [line.removeprefix("    ") for line in text.strip().split("\n")]
    paragraphs = "\n".join(lines).split("\n\n")
    return "\n\n".join(
        part if part.startswith(" ") else " ".join(part.split("\n")) for part in paragraphs
    )


def _usage(words: str) -> RenderableType:
    return Padding(Text.assemble(("Usage: ", "yellow"), f"sparrow {words}"), (1, 1), expand=False)


def _texts(text: str) -> Iterable[RenderableType]:
    return [Padding(Text(part), (0, 1, 1, 1), expand=False) for part in flowing(text).split("\n\n")]


def _panel(title: str, rows: Iterable[tuple[str, str]]) -> Panel:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, style="bold cyan")
    table.add_column(ratio=1)
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return Panel(table, title=title, title_align="left", border_style="dim")


def _options(options: Iterable[Option], title: str = OPTIONS) -> Panel:
    return _panel(title, [(_written(option), _explained(option)) for option in options])


def _written(option: Option) -> str:
    names = [option.long, *([f"-{option.letter}"] if option.letter else [])]
    if option.flag and option.default:
        names = [f"{option.long}/--no-{option.long[2:]}"]
    return " ".join([*names, option.shown_metavar]).strip()


def _explained(option: Option) -> str:
    default = option.default
    said = re.search(r"[Dd]efault", option.help)
    if said or default is None or default == () or isinstance(default, bool):
        return option.help
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{option.help} Default: {shown}."


def _file_row(verb: Verb) -> list[tuple[str, str]]:
    return [("CONFIG", FILES)] if any(map(fields_of, _kinds(verb.config))) else []


def _sections(cls: type[Record]) -> Iterable[RenderableType]:
    rows = [*_section_rows(cls, "")]
    return [_panel("Settings: --section.key=value", rows)] if rows else []


def _section_rows(kind: Any, above: str) -> Iterable[tuple[str, str]]:
    sections = {name: inner for name, inner in fields_of(kind).items() if fields_of(inner)}
    leaves = [name for name in fields_of(kind) if name not in sections]
    if above and leaves:
        yield above, ", ".join(leaves)
    for name, inner in sections.items():
        yield from _section_rows(inner, f"{above}.{name}" if above else name)


def _kinds(cls: type[Record]) -> Iterable[Any]:
    return fields_of(cls).values()
