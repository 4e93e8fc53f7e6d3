"""What an evaluation comes to: accuracy by source and length, with intervals over rows."""

from sparrow.schema.base import Record


class Estimate(Record):
    """A figure and its 95 % interval over rows; None: one row says nothing about others."""

    value: float
    low: float | None
    high: float | None


class PassAt(Record):
    """The chance that one of k answers to a row is right."""

    k: int
    estimate: Estimate


class Reason(Record):
    """What the verdicts said, and how often."""

    text: str
    count: int


class EvaluationCell(Record):
    """What the answers to rows of one source, and of one length where it has a dial, come to.

    mean: mean@k of all samples. passes: answers count as right where they are so entirely.
    """

    source: str
    length: int | None
    rows: int
    samples: int  # answers to a row
    mean: Estimate
    passes: tuple[PassAt, ...]
    tokens: float  # mean length of an answer
    median: float  # of the lengths
    entropy: float | None  # nats per sampled token; None: nothing was sampled
    cut_off: float  # share that ran into the limit
    reasons: tuple[Reason, ...]  # most frequent first
    skipped: tuple[str, ...]  # rows whose prompts do not fit, and why


class Evaluation(Record):
    """Accuracy of a model by source, and what it was measured with."""

    model: str
    attention: str
    temperature: float
    samples: int
    seed: int | None
    left_out: tuple[str, ...]  # rows of a file that cannot be used, and why
    cells: tuple[EvaluationCell, ...]
