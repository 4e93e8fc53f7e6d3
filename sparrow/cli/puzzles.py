"""`sparrow puzzle` and `warmup`: thinking models small enough to ship."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import progress_bar, report

if TYPE_CHECKING:
    from sparrow.config import WarmupConfig

FAMILIES = "assignments, countdown or graph"


def puzzle(
    family: Annotated[str, typer.Argument(help=f"{FAMILIES}.")],
    length: Annotated[
        int, typer.Option("--length", "-l", help="About how many tokens a chain has: 100 to 8000.")
    ] = 300,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Which row.")] = 0,
    gold: Annotated[
        int | None, typer.Option("--gold", help="Also print the gold chain of this seed.")
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(
            "--judge", help="Judge the completion in this file instead; exits 1 if wrong."
        ),
    ] = None,
) -> None:
    """Print a puzzle's prompt, one of its gold chains, or the verdict on an answer.

    A model answers it with: sparrow puzzle countdown | sparrow generate -m tiny
    --sampling.temperature=1 --sampling.top_p=1 --sampling.max_tokens=2000
    """
    if gold is not None and judge is not None:
        raise ValueError("give --gold or --judge, not both")
    chosen = _family(family)
    row = chosen.row(seed, length)
    if judge is not None:
        verdict = chosen.reward(row, _text(judge))
        print(f"score {verdict.score:g}, accuracy {verdict.acc:g}: {verdict.reason}")
        raise typer.Exit(int(verdict.acc < 1))
    print(row.prompt)
    if gold is not None:
        print(chosen.chain(row, gold))


def warmup(
    config: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG... [--a.b=c]...",
            help="TOML files, merged left to right, and settings such as --run.workers=8.",
        ),
    ],
) -> None:
    """Train a small thinking model from nothing on puzzles; started again, it goes on.

    configs/warmup/ has the recipes of the shipped models.
    """
    from sparrow.config import WarmupConfig, load_config
    from sparrow.dataflow.warmup import MODEL, run_directory, warm_up

    files = [Path(word) for word in config if not word.startswith("--")]
    loaded = load_config(WarmupConfig, files, [word for word in config if word.startswith("--")])
    place = run_directory(loaded)
    ended = (place / MODEL).exists()
    report(f"{place}: {'has ended before' if ended else f'{loaded.steps} steps'}")
    with _progress(loaded) as on_step:
        folder = warm_up(loaded, on_step=on_step)
    print(folder)


def _family(name: str) -> Any:
    from sparrow.tasks import PUZZLES

    if name not in PUZZLES:
        raise ValueError(f"no puzzle {name!r}; there are {', '.join(PUZZLES)}")
    return PUZZLES[name]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text: {error}") from error


@contextmanager
def _progress(config: "WarmupConfig") -> Iterator[Callable[[dict[str, Any]], None]]:
    with progress_bar() as bar:
        task = bar.add_task("loss      ", total=config.steps)

        def on_step(line: dict[str, Any]) -> None:
            done = line["step"] + 1
            bar.update(task, completed=done, description=f"loss {line['loss']:.3f}")

        yield on_step
