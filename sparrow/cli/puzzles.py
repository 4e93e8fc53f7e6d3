"""`sparrow puzzle` and `warmup`: thinking models small enough to ship."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli import words
from sparrow.cli.output import MOST_TOKENS, progress_bar, report, write
from sparrow.cli.words import config_argument
from sparrow.files import printable, read_text

if TYPE_CHECKING:
    from sparrow.schema.warmup import WarmupConfig

MOST_BYTES = 2**24  # of an answer
FAMILIES = "assignments, countdown or graph"


def puzzle(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help=f"{FAMILIES}.")],
    length: Annotated[
        int,
        typer.Option(
            "--length",
            "-l",
            min=1,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="About how long a chain of thought that solves it is, 100 to 8000.",
        ),
    ] = 300,
    seed: Annotated[
        int, typer.Option("--seed", "-s", metavar="N", help="Which puzzle: each seed is another.")
    ] = 0,
    gold: Annotated[
        int | None,
        typer.Option(
            "--gold",
            metavar="N",
            help="Also print a right chain of thought; each number is another.",
        ),
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(
            "--judge", metavar="FILE", help="Judge the answer in this file; prints no puzzle."
        ),
    ] = None,
) -> None:
    """Print a puzzle, with a chain of thought that solves it, or judge an answer to it.

    Puzzles have no end: family, seed and length give the same one on every machine. The shipped
    models tiny and small think in their language.

    For example:

      sparrow puzzle countdown --length 200 --gold 1
      sparrow puzzle countdown | sparrow generate -m tiny --sampling.temperature=1

    Exit codes: with --judge 0 for a right answer, 1 for a wrong one.
    """
    if gold is not None and judge is not None:
        raise ValueError("give --gold or --judge, not both")
    chosen = _family(family)
    row = chosen.row(seed, length)
    if judge is not None:
        verdict = chosen.reward(row, read_text(judge, "answer", most=MOST_BYTES))
        print(printable(f"score {verdict.score:g}, accuracy {verdict.acc:g}: {verdict.reason}"))
        raise typer.Exit(int(verdict.acc < 1))
    print(row.prompt)
    if gold is not None:
        print(chosen.chain(row, gold))


def warmup(
    config: Annotated[list[str], config_argument("--run.workers=8")],
) -> None:
    """Train a small thinking model on puzzles with gold chains: how tiny and small were made.

    Takes minutes on a GPU. Stopped and started again, it goes on. base, tiny and
    small are shipped; tiny and small go on from the model that base makes. Prints the model's
    folder.

    For example:

      sparrow warmup base
      sparrow warmup tiny --run.workers=8
    """
    from sparrow.schema.warmup import WarmupConfig
    from sparrow_recipes.warmup import MODEL, run_directory, warm_up

    loaded = words.loaded(WarmupConfig, config)
    place = run_directory(loaded)
    ended = (place / MODEL).exists()
    report(f"{place}: {'has ended before' if ended else f'{loaded.steps} steps'}")
    with _progress(loaded) as on_step:
        folder = warm_up(loaded, on_step=on_step)
    write(str(folder))


def _family(name: str) -> Any:
    from sparrow.tasks import PUZZLES

    if name not in PUZZLES:
        raise ValueError(f"no puzzle {name!r}; there are {', '.join(PUZZLES)}")
    return PUZZLES[name]


@contextmanager
def _progress(config: "WarmupConfig") -> Iterator[Callable[[dict[str, Any]], None]]:
    with progress_bar() as bar:
        task = bar.add_task("loss      ", total=config.steps)

        def on_step(line: dict[str, Any]) -> None:
            done = line["step"] + 1
            bar.update(task, completed=done, description=f"loss {line['loss']:.3f}")

        yield on_step
