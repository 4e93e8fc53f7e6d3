"""`sparrow warmup`: the command line of the warm-up."""

from typing import Any

from sparrow.cli.output import progress_bar, report, write
from sparrow_recipes.warmup.config import WarmupConfig


def warmup(config: WarmupConfig) -> None:
    """Train a small thinking model on puzzles with gold chains: how tiny and small were made.

    Takes minutes on a GPU. Stopped and started again, it goes on. base, tiny and
    small are shipped; tiny and small go on from the model that base makes. Prints the model's
    folder.

    For example:

      sparrow warmup base
      sparrow warmup tiny --run.workers=8
    """
    from sparrow_recipes.warmup.training import MODEL, run_directory, warm_up

    place = run_directory(config)
    ended = (place / MODEL).exists()
    report(f"{place}: {'has ended before' if ended else f'{config.steps} steps'}")
    with progress_bar() as bar:
        task = bar.add_task("loss      ", total=config.steps)

        def show(line: dict[str, Any]) -> None:
            bar.update(task, completed=line["step"] + 1, description=f"loss {line['loss']:.3f}")

        folder = warm_up(config, on_step=show)
    write(str(folder))
