"""The context of planning: the model's shape, a machine, a workload, and the cost of budgets.

A workload is how many sequences of which lengths one rollout has to generate, how many at once. The
price of a budget is the time of the rows in a bin of lengths, over the trace of the workload.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparrow.calibration.planning import cost
from sparrow.calibration.planning.hardware import Hardware, StepModel
from sparrow.files import parse_document, parse_json, read_text
from sparrow.schema.calibrate import PlanConfig
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Cell, Surface, Variant

if TYPE_CHECKING:  # that room loads torch
    from sparrow.models.spec import ModelSpec

PUBLISHED = "published"
PROMPT, SAMPLES = 16, 8  # tokens of a prompt, answers to it, where nothing is said
MOST_BYTES = 2**26  # of a file of lengths
MOST_SEQUENCES = 2**14  # of a workload: each takes part in the count of steps
LONGEST = 2**31 - 1
FEW = 8  # prompts below which a cell says nothing
ITEMSIZE = 2  # bytes of a number where rollouts run
EVERYTHING = 2**24  # tokens: more than any context has, in every layer's share of it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Final lengths of the sequences of one rollout, prompts included.

    most  sequences that run at once (None: as many as memory holds)
    """

    name: str
    lengths: cost.IntArray
    prompt: int = PROMPT
    most: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.lengths) <= MOST_SEQUENCES:
            raise ValueError(
                f"workload {self.name}: expected 1 to {MOST_SEQUENCES} sequences (--prompts draws "
                f"some), got {len(self.lengths)}"
            )
        if not 2 <= self.lengths.min() <= self.lengths.max() <= LONGEST:
            actual = f"{self.lengths.min()} to {self.lengths.max()} tokens"
            raise ValueError(f"workload {self.name}: expected 2 to {LONGEST}, got {actual}")

    @property
    def shortest_prompt(self) -> int:
        """Tokens that are there when a sequence starts; a shorter sequence has a shorter one."""
        return min(self.prompt, int(self.lengths.min()) - 1)

    def describe(self) -> str:
        batch = "" if self.most is None else f", at most {self.most} at once"
        lengths = f"mean {self.lengths.mean():.0f}, longest {self.lengths.max()} tokens"
        return f"{self.name}: {len(self.lengths)} sequences, {lengths}{batch}"


def workload(surface: Surface, config: PlanConfig) -> Workload:
    """Return the workload of a configuration: "published", "surface" (measured lengths) or a file.

    Where nothing is said, it is that of the surface's own answers. With `prompts`, so many times
    `samples` sequences are drawn from the lengths, always the same; samples of a prompt do not
    share its memory here. Lengths end where nothing was measured.
    """
    generated = surface.mode == "generated" and surface.lengths
    name = config.lengths or ("surface" if generated else PUBLISHED)
    prompt = config.prompt_tokens or (name == "surface" and surface.prompt_tokens) or PROMPT
    if name == PUBLISHED:
        lengths = cost.published_lengths()
    elif name != "surface":
        lengths = _read_lengths(Path(name))
    elif surface.lengths:
        lengths = np.asarray(surface.lengths, np.int64)
    else:
        raise ValueError("the surface has no lengths of answers: give --lengths another way")
    if config.prompts is not None:
        count = config.prompts * (config.samples or SAMPLES)
        if count > MOST_SEQUENCES:
            raise ValueError(f"expected at most {MOST_SEQUENCES} sequences, got {count}")
        lengths = np.random.default_rng(0).choice(lengths, count)
    cells = reliable(surface.cells)
    cutoff = measured_to(cells) if cells else surface.bins[-1]
    if lengths.max() > cutoff:
        lengths, name = np.minimum(lengths, cutoff), f"{name}, cut at {cutoff} tokens"
    return Workload(name=name, lengths=lengths, prompt=prompt, most=config.batch)


def _read_lengths(place: Path) -> cost.IntArray:
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
        raise ValueError(f"lengths {place}: expected whole numbers from 2 to {LONGEST}")
    return np.array(numbers, np.int64)


def reliable(cells: Sequence[Cell]) -> list[Cell]:
    """Return the sparse cells with enough prompts to be used."""
    return [cell for cell in cells if cell.prompts >= FEW and cell.budget is not None]


def measured_to(cells: Sequence[Cell]) -> int:
    """Return the length up to which the largest budget was measured."""
    largest = max(cell.budget or 0 for cell in cells)
    return max(cell.stop for cell in cells if cell.budget == largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningContext:
    """What plans of one surface share: the model, the machine and the workload."""

    surface: Surface
    spec: "ModelSpec"
    hardware: Hardware
    workload: Workload

    @classmethod
    def of(cls, surface: Surface, hardware: Hardware, config: PlanConfig) -> "PlanningContext":
        from sparrow.models.spec import spec_from_hf  # loads torch

        try:
            shape = parse_document(surface.shape)
        except ValueError as error:
            raise ValueError(f"the surface's shape: {error}") from error
        spec, work = spec_from_hf(shape, "the surface's model"), workload(surface, config)
        return cls(surface=surface, spec=spec, hardware=hardware, workload=work)

    def reads(self, variant: Variant, schedule: Schedule | None) -> cost.ByteModel:
        return cost.ByteModel(
            spec=self.spec,
            schedule=schedule,
            itemsize=ITEMSIZE,
            page=variant.page,
            field_bytes=variant.field_bytes,
        )

    def steps(self, variant: Variant, schedule: Schedule | None) -> StepModel:
        return StepModel(self.hardware, self.reads(variant, schedule))

    def capacity(self, variant: Variant) -> int:
        """Tokens that fit into memory; it holds the variant's landmarks too."""
        memory, reserve = self.hardware.memory, self.hardware.reserve
        return self.reads(variant, None).capacity(memory=memory, reserve=reserve)

    def trace(self, variant: Variant) -> cost.Trace:
        """Return which requests run in which step."""
        return cost.trace(
            self.workload.lengths,
            prompt=self.workload.shortest_prompt,
            capacity=self.capacity(variant),
            page=variant.page,
            most=self.workload.most,
        )

    def rollout(self, variant: Variant, schedule: Schedule) -> float:
        """Seconds that the workload takes under any schedule."""
        return cost.rollout_seconds(self.trace(variant), self.steps(variant, schedule))

    def limit(self, variant: Variant, schedule: Schedule) -> cost.Limit:
        """What bytes alone allow, at the machine's published rate."""
        return cost.limit(
            self.reads(variant, schedule),
            self.trace(variant),
            capacity=self.capacity(variant),
            bytes_per_s=self.hardware.bytes_per_s,
        )


class Prices(NamedTuple):
    """What each bin of lengths costs; [bins, budgets], the last three [bins].

    kv is bytes of keys and values alone: page summaries cost seconds, but a row that keeps
    everything reads exactly as much of K and V as a dense one.
    """

    seconds: cost.FloatArray  # of the rows
    kv: cost.FloatArray
    fixed: cost.FloatArray  # the rows' part of what a step costs whatever is in it
    dense_seconds: cost.FloatArray
    dense_kv: cost.FloatArray


def prices(
    context: PlanningContext, variant: Variant, edges: Sequence[int], budgets: Sequence[int]
) -> Prices:
    """Price a variant under each budget and dense, over the trace of the workload.

    Rows that keep everything are priced as lists of all their pages.
    """
    over = context.trace(variant)
    longest = int(over.lengths.max())
    bins, lengths = len(edges) - 1, np.arange(longest + 1)
    # Lengths beyond the edges are in the last bin.
    place = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, bins - 1)
    schedules = [variant.schedule([0], [min(budget, EVERYTHING)]) for budget in budgets]
    models = [context.steps(variant, schedule) for schedule in schedules]
    dense = context.steps(variant, None)
    visits, fixed = _visits(over, models[0])
    _, dense_fixed = _visits(over, dense)

    def by_bin(figures: cost.FloatArray) -> cost.FloatArray:
        return np.bincount(place, figures, bins).astype(np.float64)

    def kv_bytes(reads: cost.ByteModel) -> cost.FloatArray:
        return by_bin(np.concatenate([[0], reads.rows(lengths[1:])[:2].sum(axis=0)]) * visits)

    return Prices(
        seconds=np.array([by_bin(m.per_row(longest) * visits) for m in models]).T,
        kv=np.array([kv_bytes(m.reads) for m in models]).T,
        fixed=by_bin(fixed),
        dense_seconds=by_bin(dense.per_row(longest) * visits + dense_fixed),
        dense_kv=kv_bytes(context.reads(variant, None)),
    )


def _visits(over: cost.Trace, model: StepModel) -> tuple[cost.FloatArray, cost.FloatArray]:
    """By total length: steps that rows make there, and their parts of the steps' fixed seconds."""
    longest = int(over.lengths.max())
    visits, fixed = np.zeros(longest + 1), np.zeros(longest + 1)
    for lengths in over.chunks():
        rows = lengths.shape[1]
        alone = model(lengths) - model.per_row(longest)[lengths].sum(axis=1)
        np.add.at(visits, lengths, 1.0)
        np.add.at(fixed, lengths, (alone / rows)[:, None])
    return visits, fixed
