"""The verbs by name, in the order in which people need them, and how their words are read."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, get_args

from sparrow import api
from sparrow.cli import show
from sparrow.cli.doctor import doctor
from sparrow.cli.puzzles import puzzle
from sparrow.cli.train import replay, train
from sparrow.schema.base import Record
from sparrow.schema.loading import load_config
from sparrow.schema.options import Option, options_of, parse

ABOUT = (
    "Train thinking models by RL with sparse rollouts, and measure what sparsity changes. "
    "`sparrow VERB --help` explains each verb and its options."
)
GROUPS = {
    "flow": "Check, score and time flows: formulas that choose which tokens attention keeps.\n\n"
    "docs/flows.md shows how to write one in a few lines of Python.",
    "bench": "Measure the speed of this machine.\n\nFigures of two machines, or of two runs on a "
    "busy one, are best compared by their ratios.",
}
PANELS = {
    "Start here": ("demo", "doctor"),
    "From a model to a trained model": ("fetch", "calibrate", "plan", "train", "eval", "report"),
    "Look closer": ("generate", "puzzle", "presets", "replay", "flow", "study", "bench"),
    "Make the shipped models": ("warmup",),
}
# Programs over the verbs, which are in sparrow_recipes: the module whose function has their name.
RECIPES = {
    "demo": "sparrow_recipes.demo",
    "study": "sparrow_recipes.study.command",
    "warmup": "sparrow_recipes.warmup.command",
}
Show = Callable[..., int | None]  # (configuration, extras) -> exit code


class Verb(NamedTuple):
    """A verb of the command line: its configuration, what shows its result, its help."""

    name: str
    config: type[Record]
    show: Show
    doc: str
    extras: tuple[Option, ...]

    @classmethod
    def of(cls, show: Show) -> "Verb":
        """By the signature: a configuration, then options of the command line alone."""
        config, *extras = inspect.signature(show).parameters.values()
        doc = show.__doc__ or getattr(api, show.__name__).__doc__
        options = tuple(map(_extra, extras))
        return cls(_name(show), config.annotation, show, doc, options)

    @property
    def options(self) -> list[Option]:
        return [*options_of(self.config), *self.extras]

    def run(self, words: Sequence[str]) -> int | None:
        parsed = parse(self.config, words, self.extras)
        config = load_config(self.config, parsed.files, parsed.overrides)
        return self.show(config, **parsed.extras)


def _extra(parameter: inspect.Parameter) -> Option:
    kind, help = get_args(parameter.annotation)[:2]
    metavar = "" if kind is bool else parameter.name.upper()
    return Option(parameter.name, (), kind, help, parameter.default, metavar)


def _name(show: Show) -> str:
    return "eval" if show.__name__ == "evaluate" else show.__name__.replace("_", " ")


class Verbs(Mapping[str, Verb]):
    """The verbs by name. The module of a recipe is imported when its verb is asked for."""

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
    *("demo", doctor, show.fetch, show.calibrate, show.plan, train, show.evaluate, show.report),
    *(show.generate, puzzle, show.presets, replay),
    *(show.flow_check, show.flow_score, show.flow_bench, show.flow_texts, "study"),
    *(show.bench_attention, show.bench_decode, show.bench_rollout),
    *(show.bench_train, show.bench_trace, "warmup"),
)
