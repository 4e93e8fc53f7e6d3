"""Help in eighty columns, from the configuration classes and the docstrings of the verbs."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sparrow.cli.verbs import ABOUT, GROUPS, PANELS, Verb
from sparrow.schema.errors import fields_of
from sparrow.schema.options import PANELS as OPTION_PANELS
from sparrow.schema.options import Option

WIDEST = 100
HELP = Option("help", (), bool, "Show this message and exit.", letter="h")
VERSION = Option("version", (), bool, "Print the version.")
CONFIG = Option(
    "config", (), str, "TOML file of settings; later ones win.", metavar="FILE", letter="c"
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
    options = [*verb.options, CONFIG, HELP]
    arguments = [option.metavar for option in options if option.positional]
    sections = [*_section_rows(verb.config, "")]
    files = [("CONFIG", FILES)] if sections and not arguments else []
    names = arguments or [name for name, _ in files]
    panels = {
        title: [option for option in options if option.panel == title] for title in OPTION_PANELS
    }
    return Group(
        _usage(" ".join([verb.name, *names, "[OPTIONS]"])),
        *_texts(verb.doc),
        *([_panel("Arguments", files)] if files else []),
        *(_options(own, title) for title, own in panels.items() if own),
        *([_panel("Settings: --section.key=value", sections)] if sections else []),
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


def _options(options: Iterable[Option], title: str = "Options") -> Panel:
    return _panel(title, [(_written(option), _explained(option)) for option in options])


def _written(option: Option) -> str:
    if option.positional:
        return option.metavar
    names = [option.long, *([f"-{option.letter}"] if option.letter else [])]
    if option.flag and option.default:
        names = [f"{option.long}/--no-{option.long[2:]}"]
    return " ".join([*names, option.metavar]).strip()


def _explained(option: Option) -> str:
    default, text = option.default, option.help
    if option.several and not option.positional:
        text += " Can be repeated."
    if "efault" in text or default is None or default == () or isinstance(default, bool):
        return text
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text} Default: {shown}."


def _section_rows(kind: Any, above: str) -> Iterable[tuple[str, str]]:
    sections = {name: inner for name, inner in fields_of(kind).items() if fields_of(inner)}
    leaves = [name for name in fields_of(kind) if name not in sections]
    if above and leaves:
        yield above, ", ".join(leaves)
    for name, inner in sections.items():
        yield from _section_rows(inner, f"{above}.{name}" if above else name)
