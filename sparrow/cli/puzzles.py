"""`sparrow puzzle`, `evaluate` and `warmup`: thinking models small enough to ship."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.cli.output import AsJson, console, notes, progress_bar, report

if TYPE_CHECKING:
    from rich.table import Table

    from sparrow.config import WarmupConfig
    from sparrow.dataflow.evaluate import Accuracy

    Accuracies = dict[str, dict[int, Accuracy]]

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


def evaluate(
    model: Annotated[str, typer.Argument(help="tiny, small, or a run of `sparrow warmup`.")],
    family: Annotated[
        list[str] | None, typer.Option("--family", "-f", help=f"{FAMILIES}; several. Default: all.")
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option("--length", "-l", help="Chain lengths; several. Default: 200 500 1000."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=2, help="Puzzles of each kind.")] = 32,
    temperature: Annotated[float, typer.Option(help="1 samples from the model itself.")] = 1.0,
    budget: Annotated[
        int | None, typer.Option(help="Sparse: tokens kept, 48 at least; no layer is dense.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Only the last so many tokens are seen: a multiple of 16.")
    ] = None,
    gym: Annotated[
        str | None,
        typer.Option(help="A dataset of reasoning-gym instead, for models with a real tokenizer."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Accuracy of a model on puzzles, by family and length: dense, sparse or through a window."""
    if gym is not None:
        if family or budget is not None or window is not None:
            raise ValueError("--gym goes with --length, --rows and --temperature alone")
        found = _evaluate_gym(model, gym, length, rows, temperature, device)
    else:
        found = _evaluate_puzzles(model, family, length, rows, temperature, budget, window, device)
    if as_json:
        from sparrow.dataflow.evaluate import as_plain

        print(json.dumps(as_plain(found), indent=2))
    else:
        console.print(_table(found))


def _evaluate_gym(
    model: str, dataset: str, length: list[int] | None, rows: int, temperature: float, device: str
) -> "Accuracies":
    from sparrow.dataflow.evaluate import gym_accuracy

    if length is not None and len(length) > 1:
        raise ValueError("--gym takes one --length: how many tokens an answer may have")
    tokens = length[0] if length else 512
    with notes.status(f"{rows} tasks of {dataset}, answers of at most {tokens} tokens"):
        cell = gym_accuracy(
            model, dataset, rows=rows, tokens=tokens, temperature=temperature, device=device
        )
    return {dataset: {tokens: cell}}


def _evaluate_puzzles(
    model: str,
    family: list[str] | None,
    length: list[int] | None,
    rows: int,
    temperature: float,
    budget: int | None,
    window: int | None,
    device: str,
) -> "Accuracies":
    from sparrow.dataflow.evaluate import accuracies, read_puzzles
    from sparrow.models import load
    from sparrow.tasks import PUZZLES

    names = [_family(name).name for name in family or PUZZLES]
    made = Path(model) / "model"  # of a run directory
    loaded = load(made if made.is_dir() else model, device=device)
    read_puzzles(loaded)
    lengths = length or [200, 500, 1000]
    with progress_bar() as bar:
        task = bar.add_task(f"puzzles on {loaded.device}", total=len(names) * len(lengths) * rows)
        return accuracies(
            loaded,
            names,
            lengths,
            rows=rows,
            temperature=temperature,
            budget=budget,
            window=window,
            on_answer=lambda: bar.advance(task),
        )


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


def _table(found: "Accuracies") -> "Table":
    from rich.table import Table

    table = Table("puzzle", "length", "accuracy", "tokens", "entropy", "cut off", "most frequent")
    for family, by_length in found.items():
        for length, cell in by_length.items():
            table.add_row(
                family,
                str(length),
                f"{cell.accuracy:.2f} ± {cell.error:.2f}",
                f"{cell.tokens:.0f}",
                f"{cell.entropy:.3f}",
                f"{cell.unfinished:.0%}",
                next(iter(cell.reasons)),
            )
    return table


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
