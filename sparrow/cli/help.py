"""How help texts are shown: verbs in the order in which people need them, texts that flow."""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperGroup

PANELS = {
    "Start here": ("demo", "doctor"),
    "From a model to a trained model": ("fetch", "calibrate", "plan", "train", "eval", "report"),
    "Look closer": ("generate", "puzzle", "presets", "replay", "flow", "bench"),
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
        _let_flow(self.commands.values())


def _let_flow(commands: Iterable[Any]) -> None:
    for command in commands:
        command.help = flowing(command.help or "")
        if isinstance(command, TyperGroup):
            _let_flow(command.commands.values())


def flowing(text: str) -> str:
    """The text with each paragraph on one line, so that it fills a terminal of any width.

    Typer keeps the line breaks of a docstring. Lines that begin with a blank stay as they are:
    examples.
    """
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(
        each if each.startswith(" ") else " ".join(each.split("\n")) for each in paragraphs
    )
