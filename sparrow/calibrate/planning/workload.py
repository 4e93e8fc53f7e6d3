"""What a rollout has to generate: how many sequences of which lengths, how many at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparrow.calibrate.planning.cost import IntArray, published_lengths
from sparrow.files import parse_json, read_text

PUBLISHED = "published"
PROMPT = 16
MOST_BYTES = 2**26  # of a file of lengths
MOST_SEQUENCES = 2**14  # of a workload: each takes part in the count of steps
LONGEST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Final lengths of the sequences of one rollout, prompts included.

    most  sequences that run at once (None: as many as memory holds)
    """

    name: str
    lengths: IntArray
    prompt: int = PROMPT
    most: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.lengths) <= MOST_SEQUENCES:
            given = f"got {len(self.lengths)} sequences"
            allowed = f"1 to {MOST_SEQUENCES}; --prompts draws so many of them"
            raise ValueError(f"workload {self.name}: {given}, allowed: {allowed}")
        if not 2 <= self.lengths.min() <= self.lengths.max() <= LONGEST:
            given = f"{self.lengths.min()} to {self.lengths.max()} tokens"
            raise ValueError(f"workload {self.name}: got {given}, allowed: 2 to {LONGEST}")
        if self.most is not None and self.most < 1:
            raise ValueError(f"a batch of {self.most}: allowed is 1 at least")

    @property
    def shortest_prompt(self) -> int:
        """Tokens that are there when a sequence starts; a shorter sequence has a shorter one."""
        return min(self.prompt, int(self.lengths.min()) - 1)

    def describe(self) -> str:
        mean, longest = self.lengths.mean(), self.lengths.max()
        batch = "" if self.most is None else f", at most {self.most} at once"
        return (
            f"{self.name}: {len(self.lengths)} sequences, mean {mean:.0f}, longest {longest} "
            f"tokens{batch}"
        )


def workload(
    name: str,
    *,
    measured: Sequence[int] = (),
    prompts: int | None = None,
    samples: int = 8,
    most: int | None = None,
    cutoff: int | None = None,
    prompt: int = PROMPT,
) -> Workload:
    """A workload by name: "published", "surface" (lengths that were measured), or a file.

    With `prompts`, so many times `samples` sequences are drawn from the lengths, always the same;
    samples of a prompt do not share its memory here. Lengths end at the cut-off.
    """
    if name == PUBLISHED:
        lengths = published_lengths()
    elif name == "surface":
        if not len(measured):
            raise ValueError("the surface has no lengths of answers: give --lengths another way")
        lengths = np.asarray(measured, np.int64)
    else:
        lengths = _of_file(Path(name))
    if prompts is not None:
        if min(prompts, samples) < 1 or prompts * samples > MOST_SEQUENCES:
            given = f"{prompts} prompts of {samples} samples"
            raise ValueError(f"{given}: allowed: 1 or more each, {MOST_SEQUENCES} in all")
        lengths = np.random.default_rng(0).choice(lengths, prompts * samples)
    if cutoff is not None and lengths.max() > cutoff:
        lengths = np.minimum(lengths, cutoff)
        name = f"{name}, cut at {cutoff} tokens"
    return Workload(name=name, lengths=lengths, prompt=prompt, most=most)


def _of_file(place: Path) -> IntArray:
    """Numbers, as a JSON list or one a line."""
    if not place.exists():
        raise ValueError(
            f"lengths {place}: no such file; give published, surface or a file of lengths"
        )
    text = read_text(place, "lengths", most=MOST_BYTES)
    try:
        listed = text.lstrip().startswith("[")
        numbers = parse_json(text) if listed else [int(word) for word in text.split()]
    except ValueError as error:
        raise ValueError(f"lengths {place}: not a list of whole numbers ({error})") from error
    if not numbers or not all(type(n) is int and 2 <= n <= LONGEST for n in numbers):
        raise ValueError(f"lengths {place}: allowed: whole numbers from 2 to {LONGEST}")
    return np.array(numbers, np.int64)
