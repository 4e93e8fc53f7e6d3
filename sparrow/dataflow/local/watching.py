"""Who looks on while a run goes: a console, or nobody. And a clock for the parts of a step."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Told what happens; may show it, and changes nothing."""

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        return None

    def step(self, metrics: Mapping[str, float]) -> None:
        return None

    def event(self, text: str, style: str = "") -> None:
        return None


class Nobody(Watcher):
    """A watcher that does not look."""


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - begun

    def seconds(self) -> dict[str, float]:
        """Each part, and "step": all since the clock was made."""
        return {**self._parts, "step": time.monotonic() - self._begun}
