"""`sparrow train` and `sparrow replay`: RL with a sparse rollout, and parts of it again."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from sparrow.cli.output import AsJson, alert, console, notes, plain, report, write
from sparrow.cli.words import config_argument, loaded

if TYPE_CHECKING:
    from sparrow.dataflow.local.run import Run
    from sparrow.dataflow.stopping import Stopping
    from sparrow.schema.train import TrainConfig

STOPPED, GATED, DIVERGED, UNJUDGED = 130, 3, 4, 5  # exit codes of a run that has not ended

GO_ON = "the same command goes on from it"


def train(
    config: Annotated[list[str], config_argument("--run.steps=50")],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only say what the run will take: memory, batch, schedule, time."
        ),
    ] = False,
    dense: Annotated[
        bool,
        typer.Option("--dense", help="Dense rollouts, whatever the files say: to compare with."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by RL with sparse rollouts, under a gate that watches how far they stray.

    The gate measures acceptance at every step; where its tail is surely below the target, or below
    it at several looks in a row, it raises budgets, then goes dense, then stops. tiny, small
    and qwen3-1.7b-math are shipped, docs/train.md says what can be chosen, sparrow/schema/train.py
    lists every setting with its default. Stopped and started again, a run goes on from its last
    checkpoint. Prints the folder of the trained model.

    For example:

      sparrow train tiny --dry-run
      sparrow train tiny --run.steps=50
      sparrow report runs/train/tiny

    Exit codes: 0 the run has ended, 1 it would not fit (--dry-run), 2 a mistake in the settings,
    130 stopped by Ctrl-C, 3 by the gate, 4 by a loss that is not finite, 5 as no answer could be
    judged.
    """
    settings = _load(config, dense)
    if as_json and not dry_run:
        raise ValueError("--json goes with --dry-run; a run writes metrics.jsonl")
    if dry_run:
        _preview(settings, as_json)
        return
    from sparrow.dataflow.local.opening import own_rank
    from sparrow.dataflow.stopping import Stopping

    with Stopping() as stopping, _named_rank():
        folder = run_training(settings, stopping)
        if not own_rank():
            write(str(folder))


def _load(words: list[str], dense: bool) -> "TrainConfig":
    from sparrow.schema.train import TrainConfig

    return loaded(TrainConfig, words, *(["--rollout.attention.dense=true"] if dense else []))


def _preview(config: "TrainConfig", as_json: bool) -> None:
    from sparrow.cli.preview import show
    from sparrow.dataflow.preview import preview
    from sparrow.schema.base import to_dict

    found = preview(config)
    if as_json:
        print(json.dumps(to_dict(found), indent=2))
    else:
        show(found, console)
    if not found.fits:
        raise typer.Exit(1)


def run_training(config: "TrainConfig", stopping: "Stopping", *, brief: bool = False) -> Path:
    """Open the run and show it on the terminal; one that stops early ends the program.

    brief: without the lines that say how everything is set.
    """
    from sparrow.cli.training_display import Display
    from sparrow.dataflow.local.loop import train as train_run
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
            header=() if brief else run.header(),
            target=config.gate.target,
        )
        with display:
            run.watch = display
            return train_run(run)
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


def _end(run: "Run", why: str, code: int, how: str = GO_ON) -> NoReturn:
    _say_end(run, why, how)
    raise typer.Exit(code)


def _say_end(run: "Run", why: str, how: str = GO_ON) -> None:
    if run.world.first:
        told = f"after {run.step} steps; the checkpoint is there, and {how}"
        notes.print(f"[bold yellow]{plain(why)}[/]\n{plain(told)}", markup=True)


@contextmanager
def _named_rank() -> Iterator[None]:
    """An error of one of several ranks says whose it is.

    At once, while signals are still taken: torchrun ends the others as soon as one has.
    """
    from sparrow.dataflow.local.opening import own_rank

    try:
        yield
    except (ValueError, OSError) as error:
        rank = own_rank()
        if rank is None:
            raise
        alert("error:", f"rank {rank}: {error}")
        raise typer.Exit(2) from error


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of `sparrow train`.")],
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            min=0,
            max=10**9,
            metavar="N",
            help="Which step; its checkpoint must be there. Default: the latest possible.",
        ),
    ] = None,
    part: Annotated[
        str,
        typer.Option(
            "--part",
            metavar="PART",
            help="rollout: answer the step's prompts again. train: learn again from the answers "
            "that were kept.",
        ),
    ] = "rollout",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where to write the new rollout."),
    ] = None,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Import the code that the run's configuration names (reward, episode, flow, "
            "functions of the algorithm): only for runs that you trust.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Repeat the rollout or the update of a saved step, to see whether the same comes out.

    The rollout tells how many tokens are the same (on a CPU all of them), the update which numbers
    it gives. It starts from a checkpoint and leaves the run as it is.

    For example:

      sparrow replay runs/train/tiny --part rollout
    """
    from sparrow.dataflow.local.replaying import replay as replay_step

    if part not in ("rollout", "train"):
        raise ValueError(f"--part {part}: give rollout or train")
    with notes.status(plain(f"{part} of {run}")):
        found = replay_step(run, step, part, out=out, report=report, allow_code=allow_code)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        console.print(f"{name:32} {shown}", highlight=False)
