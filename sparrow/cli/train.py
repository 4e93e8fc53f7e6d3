"""`sparrow train` and `sparrow replay`: RL with a sparse rollout, and parts of it again."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from rich.console import Console

from sparrow import api
from sparrow.cli.output import (
    STOPPED,
    AsJson,
    alert,
    console,
    notes,
    plain,
    report,
    write,
    write_json,
)
from sparrow.schema.common import ReplayConfig
from sparrow.schema.train import TrainConfig

if TYPE_CHECKING:
    from sparrow.dataflow.local.run import Run
    from sparrow.dataflow.stopping import Stopping

GATED, DIVERGED, UNJUDGED = 3, 4, 5  # exit codes of a run that has not ended

GO_ON = "the same command goes on from it"


def train(
    config: TrainConfig,
    *,
    dry_run: Annotated[
        bool, "Only say what the run will take: memory, batch, schedule, time."
    ] = False,
    json: AsJson = False,
) -> int | None:
    if json and not dry_run:
        raise ValueError("--json goes with --dry-run; a run writes metrics.jsonl")
    if dry_run:
        return _preview(config, json)
    from sparrow.dataflow.local.opening import own_rank
    from sparrow.dataflow.stopping import Stopping

    with Stopping() as stopping, _named_rank():
        folder = run_training(config, stopping)
        if not own_rank():
            write(str(folder))
    return None


def _preview(config: TrainConfig, json: bool) -> int:
    from sparrow.cli.preview import show

    preview = api.preview(config)
    if json:
        write_json(preview)
    else:
        show(preview, console)
    return int(not preview.fits)


def run_training(config: TrainConfig, stopping: "Stopping", *, brief: bool = False) -> Path:
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
        how = "with other settings of the gate (gate.mode=warn, gate.target) it goes on"
        _end(run, f"the gate stopped the run: {error}", GATED, how)
    except (Diverged, Unjudged) as error:
        _end(run, str(error), DIVERGED if isinstance(error, Diverged) else UNJUDGED)
    except EpisodeFailed as error:
        if error.__cause__ is None:
            _end(run, str(error), 1)
        _say_end(run, str(error))
        raise  # whose code it is wants to see where
    finally:
        close_run(run)


def _end(run: "Run", why: str, code: int, how: str = GO_ON) -> NoReturn:
    _say_end(run, why, how)
    sys.exit(code)


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
        sys.exit(2)


def replay(config: ReplayConfig, *, json: AsJson = False) -> None:
    with notes.status(plain(f"{config.part} of {config.run}")):
        result = api.replay(config, report=report)
    if json:
        write_json(result)
        return
    for name, value in result.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        console.print(f"{name:32} {shown}", highlight=False)
