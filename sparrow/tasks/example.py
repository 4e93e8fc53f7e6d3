"""One row to learn from, wherever it comes from: a puzzle, a gym, a file in verl's schema."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparrow.tasks.base import Verdict

Message = Mapping[str, str]  # role and content


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and what its answers are judged by: plain data, so it can go to another process.

    max_tokens: how long an answer to it may be; None: as long as the run allows.
    """

    id: str
    source: str  # data_source: which task it belongs to, and so who judges it
    prompt: str | tuple[Message, ...]  # a text, or chat messages
    ground_truth: Any
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


class Examples(Protocol):
    """Rows in an order that a position decides: the same for every process, run and resume."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    @property
    def digest(self) -> str:
        """A name for the content: another one where rows differ."""

    def at(self, position: int) -> Example:
        """The row at a position, from 0 on without end: epochs follow each other, each shuffled."""


class Judge(Protocol):
    """Verdicts on texts. A verdict comes back whatever happens: late or broken verifiers give 0."""

    async def __call__(self, example: Example, text: str) -> Verdict: ...
