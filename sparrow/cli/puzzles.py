"""`sparrow puzzle` and `warmup`: thinking models small enough to ship."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sparrow import api
from sparrow.cli.output import progress_bar, report, write
from sparrow.files import printable
from sparrow.schema.common import PuzzleConfig
from sparrow.schema.warmup import WarmupConfig


def puzzle(config: PuzzleConfig) -> int | None:
    made = api.puzzle(config)
    if made.verdict is not None:
        score, right, reason = made.verdict.score, made.verdict.acc, made.verdict.reason
        print(printable(f"score {score:g}, accuracy {right:g}: {reason}"))
        return int(right < 1)
    print(made.prompt)
    if made.chain is not None:
        print(made.chain)
    return None


def warmup(config: WarmupConfig) -> None:
    """Train a small thinking model on puzzles with gold chains: how tiny and small were made.

    Takes minutes on a GPU. Stopped and started again, it goes on. base, tiny and
    small are shipped; tiny and small go on from the model that base makes. Prints the model's
    folder.

    For example:

      sparrow warmup base
      sparrow warmup tiny --run.workers=8
    """
    from sparrow_recipes.warmup import MODEL, run_directory, warm_up

    place = run_directory(config)
    ended = (place / MODEL).exists()
    report(f"{place}: {'has ended before' if ended else f'{config.steps} steps'}")
    with _progress(config) as on_step:
        folder = warm_up(config, on_step=on_step)
    write(str(folder))


@contextmanager
def _progress(config: WarmupConfig) -> Iterator[Callable[[dict[str, Any]], None]]:
    with progress_bar() as bar:
        task = bar.add_task("loss      ", total=config.steps)

        def on_step(line: dict[str, Any]) -> None:
            done = line["step"] + 1
            bar.update(task, completed=done, description=f"loss {line['loss']:.3f}")

        yield on_step
