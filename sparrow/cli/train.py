"""`sparrow train` and `sparrow replay`: RL with a sparse rollout, and parts of it again."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sparrow.cli.output import AsJson, console, notes, plain, report

if TYPE_CHECKING:
    from sparrow.config import TrainConfig
    from sparrow.dataflow.local.run import Run

STOPPED, GATED, DIVERGED, UNJUDGED = 130, 3, 4, 5  # exit codes of a run that has not ended

GO_ON = "the same command goes on from it"

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG... [--a.b=c]...",
        help="TOML files, merged left to right, and settings such as --run.steps=50.",
    ),
]


def train(
    config: Words,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan (memory, batch, time) and end.")
    ] = False,
    dense: Annotated[
        bool, typer.Option("--dense", help="Roll out densely, whatever the configuration says.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by RL: sparse rollout, dense policy, a guarded tail. Started again, it goes on.

    configs/train/ has recipes, docs/train.md says what there is to choose, sparrow/config/train.py
    has every setting with its default. A run that ends early leaves a checkpoint: Ctrl-C (exit code
    130), the gate (3), no finite loss (4), verdicts that all fail (5).
    """
    loaded = _load(config, dense)
    if as_json and not dry_run:
        raise ValueError("--json goes with --dry-run; a run writes metrics.jsonl")
    if dry_run:
        _preview(loaded, as_json)
        return
    from sparrow.dataflow.local.loop import train as train_run
    from sparrow.dataflow.stopping import Stopping

    with Stopping() as stopping, _named_rank():
        _run(loaded, stopping, train_run)


def _load(words: list[str], dense: bool) -> "TrainConfig":
    from sparrow.config import TrainConfig, load_config

    files = [Path(word) for word in words if not word.startswith("--")]
    settings = [word for word in words if word.startswith("--")]
    if dense:
        settings.append("--rollout.attention.dense=true")
    return load_config(TrainConfig, files, settings)


def _preview(config: "TrainConfig", as_json: bool) -> None:
    from sparrow.cli.preview import show
    from sparrow.dataflow.preview import preview
    from sparrow.records import to_dict

    found = preview(config)
    if as_json:
        print(json.dumps(to_dict(found), indent=2))
    else:
        show(found, console)
    if not found.fits:
        raise typer.Exit(1)


def _run(config: "TrainConfig", stopping: Any, train_run: Any) -> None:
    from sparrow.cli.training_display import Display
    from sparrow.dataflow.local.opening import close_run, open_run, own_rank
    from sparrow.dataflow.local.run import Diverged, EpisodeFailed, GateStop, Unjudged
    from sparrow.dataflow.stopping import Stopped

    quiet = bool(own_rank())  # of several ranks the first one speaks
    with nullcontext() if quiet else notes.status("opening the run"):
        run = open_run(config, stopping=stopping, report=None if quiet else report)
    try:
        display = Display(
            Console(quiet=True) if quiet else console,
            steps=config.run.steps,
            first=run.step,
            header=run.header(),
            target=config.gate.target,
        )
        with display:
            run.watch = display
            folder = train_run(run)
    except Stopped:
        _end(run, "stopped", STOPPED)
    except GateStop as error:
        how = (
            "with other settings of the gate (gate.mode=warn, gate.target) the same command goes on"
        )
        _end(run, f"the gate stopped the run: {error}", GATED, how)
    except Diverged as error:
        _end(run, str(error), DIVERGED)
    except Unjudged as error:
        _end(run, str(error), UNJUDGED)
    except EpisodeFailed as error:
        if error.__cause__ is None:
            _end(run, str(error), 1)
        _say_end(run, str(error))
        raise  # whose code it is wants to see where
    finally:
        close_run(run)
    if not quiet:
        print(folder)


def _end(run: "Run", why: str, code: int, how: str = GO_ON) -> None:
    _say_end(run, why, how)
    raise typer.Exit(code)


def _say_end(run: "Run", why: str, how: str = GO_ON) -> None:
    if run.world.first:
        told = f"after {run.step} steps; the checkpoint is there, and {how}"
        notes.print(f"[bold yellow]{plain(why)}[/]\n{plain(told)}")


@contextmanager
def _named_rank() -> Iterator[None]:
    """An error of one of several ranks says whose it is."""
    from sparrow.dataflow.local.opening import own_rank

    try:
        yield
    except (ValueError, OSError) as error:
        rank = own_rank()
        if rank is None:
            raise
        raise ValueError(f"rank {rank}: {error}") from error


def replay(
    run: Annotated[Path, typer.Argument(help="A run directory of `sparrow train`.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Which step; default: the latest possible.")
    ] = None,
    part: Annotated[
        str, typer.Option("--part", help="rollout: play it again. train: learn from what is kept.")
    ] = "rollout",
    out: Annotated[
        Path | None, typer.Option("--out", help="A folder for the trajectories played again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Do the rollout or the update of a saved step again, from its checkpoint; the run stays as is.

    The rollout tells whether the same tokens come again, the update which numbers it gives.
    """
    from sparrow.dataflow.local.replaying import replay as replay_step

    if part not in ("rollout", "train"):
        raise ValueError(f"--part {part}: give rollout or train")
    with notes.status(f"{part} of {run}"):
        found = replay_step(run, step, part, out=out, report=report)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        console.print(f"{name:32} {shown}", highlight=False)
