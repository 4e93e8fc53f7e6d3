"""Progress bars of verbs called from Python: in a notebook or on a terminal, otherwise none."""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sparrow.files import printable

SCORES = {"reward": "critic/score/mean", "p05": "sparse/accept_p05_min"}


def is_interactive() -> bool:
    """Return whether a person looks on: IPython, or a terminal."""
    ipython = sys.modules.get("IPython")
    return (ipython is not None and ipython.get_ipython() is not None) or sys.stderr.isatty()


class ProgressBar:
    """A bar that serves as every callback of a verb: progress, report, and those of training."""

    def __init__(self, verb: str, total: int | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that widgets are missing: the bar is text then
            from tqdm.auto import tqdm
        self.bar = tqdm(desc=verb, total=total, leave=False)

    def progress(self, done: int, total: int, what: str) -> None:
        self.bar.total, self.bar.n = total, done
        self.bar.set_description_str(what)

    def report(self, text: str) -> None:
        self.bar.set_description_str(text.split("\n")[0][:80])

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        self.report(name if done is None else f"{name} {done}/{total}")

    def step(self, metrics: Mapping[str, float]) -> None:
        values = {name: metrics[key] for name, key in SCORES.items() if key in metrics}
        self.bar.set_postfix(values, refresh=False)
        self.bar.update()

    def event(self, text: str, style: str = "") -> None:
        self.bar.write(printable(text), file=sys.stderr)


@contextmanager
def progress_callbacks(verb: str, names: set[str], steps: int | None) -> Iterator[dict[str, Any]]:
    """Yield callbacks of these names (progress, report, callbacks) that move one bar."""
    bar = ProgressBar(verb, steps)
    try:
        yield {name: bar if name == "callbacks" else getattr(bar, name) for name in names}
    finally:
        bar.bar.close()
