"""How help texts are shown: verbs in the order in which people need them, texts that flow, and
switches without the name of a type."""

from collections.abc import Iterable, Iterator
from typing import Any

from typer.core import TyperGroup

PANELS = {
    "Start here": ("demo", "doctor"),
    "From a model to a trained model": ("fetch", "calibrate", "plan", "train", "eval", "report"),
    "Look closer": ("generate", "puzzle", "presets", "replay", "flow", "study", "bench"),
    "Make the shipped models": ("warmup",),
}


class Verbs(TyperGroup):
    """The verbs under the panels of PANELS, in that order; others come last, under "Commands"."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        ordered = [verb for verbs in PANELS.values() for verb in verbs if verb in self.commands]
        self.commands = {name: self.commands[name] for name in (*ordered, *self.commands)}
        for panel, verbs in PANELS.items():
            for verb in verbs:
                if verb in self.commands:
                    self.commands[verb].rich_help_panel = panel  # type: ignore[attr-defined]
        _show_no_type(*self.params)
        for command in _all(self.commands.values()):
            command.help = flowing(command.help or "")
            _show_no_type(*command.params)

    def get_help_option(self, ctx: Any) -> Any:
        """--help, which typer makes when it is asked for; those of the verbs along with it."""
        for command in _all(self.commands.values()):
            _show_no_type(command.get_help_option(ctx))
        option = super().get_help_option(ctx)
        _show_no_type(option)
        return option


def _all(commands: Iterable[Any]) -> Iterator[Any]:
    for command in commands:
        yield command
        if isinstance(command, TyperGroup):
            yield from _all(command.commands.values())


def _show_no_type(*parameters: Any) -> None:
    """Typer would write <bool> beside a switch, which takes no value."""
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""


def flowing(text: str) -> str:
    """The text with each paragraph on one line, so that it fills a terminal of any width.

    Typer keeps the line breaks of a docstring. Lines that begin with a blank stay as they are:
    examples.
    """
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(
        each if each.startswith(" ") else " ".join(each.split("\n")) for each in paragraphs
    )
