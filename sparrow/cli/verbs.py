"""The verbs of the command line, and their help texts.

Options and their help come from the configuration classes, the rest from docstrings.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, get_args

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sparrow import api
from sparrow.cli import show
from sparrow.cli.looking import audit, status
from sparrow.cli.train import push, replay, train, worker
from sparrow.schema.base import Record
from sparrow.schema.loading import Layer, parse, resolve
from sparrow.schema.options import Option, list_options, section_fields

ABOUT = (
    "Train thinking models by RL with sparse rollouts, and measure what sparsity changes. "
    "`sparrow VERB --help` explains each verb and its options."
)
HELP = Option("help", (), bool, "Show this message and exit.", letter="h")
VERSION = Option("version", (), bool, "Print the version.")
CONFIG = Option("config", (), str, "TOML file of settings; later ones win.", letter="c")
GROUPS = {
    "flow": "Check, score and time flows: formulas that choose which tokens attention keeps.\n\n"
    "docs/flows.md shows how to write one in a few lines of Python.",
    "bench": "Measure the speed of this machine.\n\nFigures of two machines, or of two runs on a "
    "busy one, are best compared by their ratios.",
}
PANELS = {
    "Start here": ("demo", "doctor"),
    "From a model to a trained model": (
        *("fetch", "calibrate", "plan", "distill", "sft", "train", "eval"),
        *("report", "push"),
    ),
    "Look closer": (
        *("generate", "serve", "worker", "puzzle", "presets", "status", "audit", "replay"),
        *("simulate", "flow", "study", "bench"),
    ),
    "Make the shipped models": ("warmup",),
}
# Verbs of sparrow_recipes: the module that has a function of this name.
RECIPES = {
    "demo": "sparrow_recipes.demo",
    "study": "sparrow_recipes.study.command",
    "warmup": "sparrow_recipes.warmup.command",
}
Show = Callable[..., int | None]  # (configuration, extras) -> exit code


class Verb(NamedTuple):
    """A verb: its configuration class, the function that runs it and shows the result, its help."""

    name: str
    config: type[Record]
    show: Show
    doc: str
    extras: tuple[Option, ...]

    @classmethod
    def of(cls, show: Show) -> "Verb":
        """Make a verb of a function: a configuration, then options of the command line alone."""
        config, *extras = inspect.signature(show).parameters.values()
        doc = show.__doc__ or inspect.unwrap(getattr(api, show.__name__)).__doc__
        options = tuple(map(_extra, extras))
        return cls(_name(show), config.annotation, show, doc, options)

    @property
    def options(self) -> list[Option]:
        return [*list_options(self.config), *self.extras]

    def run(self, words: Sequence[str]) -> int | None:
        parsed = parse(self.config, words, self.extras)
        config = resolve(self.config, parsed.files, parsed.layers)
        try:
            return self.show(config, **parsed.extras)
        except OSError as error:
            raise _with_option(error, parsed.layers) from error


def _with_option(error: OSError, layers: Sequence[Layer]) -> Exception:
    """Add the option that named the file to an error of the operating system."""
    file = str(error.filename or "")
    for source, value in layers:
        while isinstance(value, dict | list) and value:
            value = value[0] if isinstance(value, list) else next(iter(value.values()))
        if file and isinstance(value, str) and (file.startswith(value) or value.startswith(file)):
            return ValueError(f"{source}: {error}")
    return error


def _extra(parameter: inspect.Parameter) -> Option:
    kind, help = get_args(parameter.annotation)[:2]
    return Option(parameter.name, (), kind, help, parameter.default)


def _name(show: Show) -> str:
    return "eval" if show.__name__ == "evaluate" else show.__name__.replace("_", " ")


class Verbs(Mapping[str, Verb]):
    """The verbs by name; modules of recipes are imported on first use."""

    def __init__(self, *shown: Show | str) -> None:
        self._shown = {show if isinstance(show, str) else _name(show): show for show in shown}

    def __getitem__(self, name: str) -> Verb:
        show = self._shown[name]
        if isinstance(show, str):
            show = getattr(import_module(RECIPES[name]), name)
        return Verb.of(show)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown)

    def __len__(self) -> int:
        return len(self._shown)


VERBS = Verbs(
    *("demo", show.doctor, show.fetch, show.calibrate, show.plan, show.distill),
    show.sft,
    *(train, show.evaluate, show.report, push),
    *(show.generate, show.serve, worker, show.puzzle, show.presets, status, audit, replay),
    show.simulate,
    *(show.flow_check, show.flow_score, show.measured("flow_bench"), show.flow_texts),
    *(show.flow_language, show.flow_loop, show.flow_publish, "study"),
    *map(show.measured, ("bench_attention", "bench_decode", "bench_exact")),
    *map(show.measured, ("bench_rollout", "bench_train", "bench_trace")),
    "warmup",
)


# Help.


def overview(group: str = "") -> RenderableType:
    """Render the list of all verbs, or of those of a group."""
    about = GROUPS | {name: verb.doc for name, verb in VERBS.items()}
    inside = [name.removeprefix(f"{group} ") for name in VERBS if name.startswith(f"{group} ")]
    panels = {"Verbs": inside} if group else PANELS
    above = f"{group} " if group else ""
    return Group(
        _usage(f"{above}VERB"),
        *_texts(GROUPS.get(group, ABOUT)),
        *(
            _panel(title, [(name, first_sentence(about[above + name])) for name in names])
            for title, names in panels.items()
        ),
        _options([HELP] if group else [VERSION, HELP], "Options"),
    )


def verb_help(verb: Verb) -> RenderableType:
    """Render the help of a verb: usage, description with examples, options."""
    options = [*verb.options, CONFIG, HELP]
    arguments = [option.metavar for option in options if option.positional]
    sections = [*_section_rows(verb.config, "")]
    names = arguments or (["CONFIG"] if sections else [])
    return Group(
        _usage(" ".join([verb.name, *names, "[OPTIONS]"])),
        *_texts(verb.doc),
        _options(sorted(options, key=lambda option: not option.positional), "Options"),
        *([_panel("Settings: --section.key=value", sections)] if sections else []),
    )


def first_sentence(text: str) -> str:
    return flowing(text).split("\n\n")[0]


def flowing(text: str) -> str:
    """Join the lines of each paragraph, so that it fills a terminal of any width.

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


def _options(options: Iterable[Option], title: str) -> Panel:
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
    sections = {
        name: inner for name, inner in section_fields(kind).items() if section_fields(inner)
    }
    leaves = [name for name in section_fields(kind) if name not in sections]
    if above and leaves:
        yield above, ", ".join(leaves)
    for name, inner in sections.items():
        yield from _section_rows(inner, f"{above}.{name}" if above else name)
