"""`sparrow demo`: calibrate, plan, train, time and report, on a laptop and before one's eyes."""

import shutil
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from sparrow.cli.output import console, counting, going_on, plain, write
from sparrow.schema.common import DemoConfig

if TYPE_CHECKING:
    from sparrow_recipes.demo import Place

STAGES = 5
NUMBERS = 3


def demo(
    config: DemoConfig, *, open: Annotated[bool, "Open the page in a browser at the end."] = False
) -> None:
    """See the whole idea work in minutes, on a CPU: calibrate, plan, train, evaluate, one page.

    A model of the package learns puzzles while it reads only part of its own memory. Nothing is
    fetched. Stopped by Ctrl-C and started again, it goes on.

    For example:

      sparrow demo --open
    """
    from sparrow_recipes import demo as recipe
    from sparrow_recipes.demo import Place

    place, begun = Place(folder=config.out), time.monotonic()
    lock = recipe.open_folder(place, fresh=config.fresh)
    try:
        with going_on(config.out):
            _think()
            _calibrate(place)
            _plan(place)
            _train(place)
            _time(place)
    finally:
        lock.close()
    page = recipe.page(place)
    _finish(place, time.monotonic() - begun)
    if open:
        webbrowser.open(page.resolve().as_uri())


def _stage(number: int, title: str, say: str) -> None:
    console.rule(Text(f"{number} of {STAGES} · {title}", style="bold"), align="left")
    console.print(say, highlight=False)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    seconds = time.monotonic() - begun
    console.print(f"{what}, {seconds:.0f} s\n", style="dim", highlight=False)


def _think() -> None:
    from sparrow_recipes import demo as recipe

    console.rule(Text(f"Meet {recipe.MODEL}", style="bold"), align="left")
    console.print(
        "So small that it is part of the package. It thinks in a language of puzzles:",
        highlight=False,
    )
    verdict = recipe.think(
        on_prompt=lambda text: console.print(text, style="bold", highlight=False),
        on_text=lambda piece: write(piece, end=""),
    )
    console.print(f"\nthe verifier says: {verdict}\n", style="dim", highlight=False)


def _calibrate(place: "Place") -> None:
    from sparrow_recipes import demo as recipe

    _stage(
        1,
        "calibrate",
        f"It answers {recipe.PROMPTS} puzzles while it may look back at {recipe.BUDGETS[0]} to "
        f"{recipe.BUDGETS[-1]} tokens only, and once at all of them. At each token: how far is "
        "what it would say from what it would say with everything in view?",
    )
    with _timed("measured"), counting("measuring") as progress:
        surface = recipe.calibrate(place, progress)
    last = max(cell.start for cell in surface.cells)
    for cell in sorted(surface.cells, key=lambda one: one.budget or 0):
        if cell.start == last:
            shown = f"{cell.mean:.3f}, but only {cell.p05:.3f} is reached by 95 % of the tokens"
            console.print(f"  {cell.budget:4} tokens kept: mean {shown}", highlight=False)
    console.print(
        f"  acceptance (1: the same) at lengths {last} and more: the mean hides the tail",
        style="dim",
    )


def _plan(place: "Place") -> None:
    from sparrow.report.calibration import plan_table
    from sparrow.report.markdown import rich_table
    from sparrow.schema.plan import PlanFile
    from sparrow_recipes import demo as recipe

    _stage(
        2,
        "plan",
        f"The cheapest budgets that keep this tail, p05, at {recipe.TARGET} or more, by length:",
    )
    with _timed("planned"):
        recipe.plan(place)
        console.print(rich_table(plan_table(PlanFile.load(place.plan))))


def _train(place: "Place") -> None:
    from sparrow.cli.train import GATED, run_training
    from sparrow.dataflow.stopping import Stopping
    from sparrow_recipes import demo as recipe

    _stage(
        3,
        "train and evaluate",
        f"{recipe.STEPS} steps of reinforcement learning: sparse answers, a dense policy that "
        "learns from them, and a gate that watches the tail. Before and after, new puzzles are "
        "answered with everything in view.",
    )
    if place.model.exists() or recipe.gate_stopped(place):
        console.print("done before\n", style="dim")
        return
    with _timed("trained"), Stopping() as stopping:
        try:
            run_training(recipe.training(place), stopping, brief=True)
        except SystemExit as end:
            if end.code != GATED:
                raise
            console.print("That is what the gate is for; the page shows it.", style="yellow")


def _time(place: "Place") -> None:
    from sparrow.report.training import told, verdict
    from sparrow_recipes import demo as recipe

    _stage(
        4,
        "time",
        "Is it faster? At the demo's few tokens there is little to save; at "
        f"{recipe.LONG} tokens of context there is.",
    )
    with _timed("timed"), counting("measuring") as progress:
        found = recipe.time(place, progress)
    for case in found.cases:
        text = f"  [bold]{verdict(case.speed_up)}[/]. {plain(told(case))}"
        console.print(text, highlight=False, markup=True)


def _finish(place: "Place", seconds: float) -> None:
    from sparrow.report.run_page import numbers
    from sparrow.schema.run_folder import read_run

    _stage(STAGES, "report", "Everything on one page, which opens without a network:")
    console.print(f"  {place.page}\n", style="bold green", highlight=False, soft_wrap=True)
    for number in numbers(read_run(place.folder))[:NUMBERS]:
        text = (
            f"  [bold]{plain(f'{number.value:>10}')}[/]  {plain(f'{number.name} ({number.say})')}"
        )
        console.print(text, highlight=False, markup=True)
    minutes, left = divmod(round(seconds), 60)
    console.print(f"\n[dim]{minutes} min {left} s this time[/]\n\nWhat to try next:", markup=True)
    for words, why in (
        (f"eval {place.train} -t assignments -l 150 --samples 4", "ask the trained model"),
        ("doctor", "what this machine can do"),
        ("calibrate MODEL --rows PROMPTS.jsonl", "your own model: a folder or a hub name"),
    ):
        text = f"  {plain(f'{_own_name()} {words}')}\n      [dim]{plain(why)}[/]"
        console.print(text, highlight=False, soft_wrap=True, markup=True)


def _own_name() -> str:
    """What to type for this program: `make demo` runs it where no path leads to it."""
    called = Path(sys.argv[0])
    known = shutil.which("sparrow")
    return str(called) if called.name == "sparrow" and known is None else "sparrow"
