"""`sparrow demo`: a shipped model thinks, and budgets show what they do to its answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sparrow.calibrate.replay import replay
from sparrow.config import GenerateConfig, GenerateSampling, ModelConfig
from sparrow.dataflow.evaluate import accuracies, answer_puzzles, attending, puzzles
from sparrow.dataflow.evaluation import Answered
from sparrow.engine.answer import Session
from sparrow.models import Decoder
from sparrow.sparse import Schedule
from sparrow.tasks import PUZZLES

MODEL = "tiny"
SHORT, LONG = 200, 400  # lengths of the puzzles that are shown and measured
ROWS = 8
KEPT = 160  # tokens, of about 600
BUDGETS = (96, 128, 160, 224, 320)


def run(console: Console) -> None:
    """A puzzle solved before your eyes; accuracy dense, sparse and blind; acceptance by budget."""
    console.rule("[bold]1. a thinking model, part of the package")
    sampling = GenerateSampling(temperature=1.0, top_p=1.0, max_tokens=4 * SHORT, seed=3)
    config = GenerateConfig(model=ModelConfig(name=MODEL, device="cpu"), sampling=sampling)
    session = Session.open(config)
    console.print(session.header(), highlight=False)

    console.rule("[bold]2. it searches, goes back, and finds")
    _solve(console, session)

    console.rule(f"[bold]3. what {KEPT} tokens of memory are worth")
    console.print(_worth(console, session.model))

    console.rule("[bold]4. how far is the sparse actor from the dense policy?")
    written = _written(console, session.model)
    console.print(_strays(console, session.model, written))
    console.print(
        "alpha is the sum over the vocabulary of min(dense, sparse): 1 means one distribution. "
        "The mean hides the tail; the tail, p05, is what Sparrow is about. "
        "Next: [bold]sparrow calibrate --help[/], [bold]sparrow plan --help[/], "
        "[bold]sparrow train --help[/]"
    )


def _solve(console: Console, session: Session) -> None:
    puzzle = PUZZLES["countdown"]
    row = puzzle.row(0, SHORT)
    console.print(f"[bold]> {row.prompt}", highlight=False)
    (said,) = session.answer(
        [row.prompt], on_text=lambda _, piece: console.out(piece, end="", highlight=False)
    )
    console.print()
    verdict = puzzle.reward(row, said.text or "")
    console.print(f"[dim]the verifier says: {verdict.reason}[/]", highlight=False)


def _worth(console: Console, model: Decoder) -> Table:
    """Accuracy on equal puzzles: all tokens, those that a rule chooses, the last ones."""
    table = Table(f"assignments, {ROWS} puzzles of about {LONG} tokens", "accuracy", "tokens")
    ways: dict[str, dict[str, int]] = {
        "dense: every token": {},
        f"sparse: {KEPT} tokens, chosen at every step": {"budget": KEPT},
        f"window: the last {KEPT} tokens": {"window": KEPT},
    }
    with _steps(console, "thinking", len(ways)) as done:
        for name, way in ways.items():
            found = accuracies(
                model,
                ["assignments"],
                [LONG],
                rows=ROWS,
                budget=way.get("budget"),
                window=way.get("window"),
            )
            cell = found["assignments"][LONG]
            table.add_row(name, f"{cell.accuracy:.2f} ± {cell.error:.2f}", f"{cell.tokens:.0f}")
            done()
    return table


def _written(console: Console, model: Decoder) -> list[Answered]:
    """A few chains that the sparse actor writes."""
    engine, schedule = attending(model, budget=KEPT)
    with console.status(f"writing under a budget of {KEPT} tokens"):
        return answer_puzzles(engine, puzzles("assignments", LONG, 2), schedule=schedule)


def _strays(console: Console, model: Decoder, written: list[Answered]) -> Table:
    """Exact acceptance at every token that was written, under each budget, on the same tokens."""
    table = Table("budget (tokens)", "mean alpha", "p05 alpha", "tokens below 0.86")
    with _steps(console, "measuring", len(BUDGETS)) as done:
        for budget in BUDGETS:
            schedule = Schedule.fixed(budget, dense_layers=())
            seen = (
                replay(model, one.prompt_ids, one.completion.token_ids.tolist(), schedule)
                for one in written
            )
            alpha = np.concatenate([one.alpha for one in seen])
            table.add_row(
                str(budget),
                f"{alpha.mean():.3f}",
                f"{np.quantile(alpha, 0.05):.3f}",
                f"{(alpha < 0.86).mean():.1%}",
            )
            done()
    return table


@contextmanager
def _steps(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; a call of what it gives moves it on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
