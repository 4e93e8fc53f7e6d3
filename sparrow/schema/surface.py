"""The surface: acceptance of a model by flow, budget and length, as a file.

docs/calibrate.md describes every field.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from sparrow.schema.base import File, Int32Array, Record, Table
from sparrow.schema.evaluation import Estimate
from sparrow.schema.schedule import DENSE, PLACE, LayerBudgets, Schedule

FORMAT = 1
LONGEST = 2**31 - 1  # tokens
Length = Annotated[int, Field(ge=0, le=LONGEST)]
Layer = Annotated[int, Field(ge=0, le=2**16)]
LEAST_PROMPTS = 48
"""With fewer prompts, intervals over prompts are too narrow."""


class Variant(Record):
    """A page selection apart from its budget: a flow, its parameters, shares by layer.

    shares: by layer, the multiple of the budget that the layer gets; none: every layer gets it.
    """

    name: str  # in the surface
    flow: str  # the name that schedules give
    source: str  # how the user named the flow: a built-in name, file.py:name, module:name
    digest: str  # of its program for this model
    field_bytes: Length  # that it stores with a page and KV head, of keys in 16 bits
    page: Annotated[int, Field(ge=1, le=2**16)] = 16
    first: Length = 1
    last: Length = 2
    dense_layers: tuple[Layer, ...] = ()
    shares: tuple[Annotated[float, Field(ge=0, le=1e6)], ...] = ()
    flow_digest: str | None = None  # of the flow's formula, which schedules hold

    def schedule(self, lengths: Sequence[int], budgets: Sequence[int], **fields: Any) -> Schedule:
        """Make the schedule of these bins; budgets of layers follow from the shares."""
        common = np.asarray(budgets, dtype=np.int32)
        fields = {"name": f"{self.name}-{budgets[0]}"} | fields
        return Schedule(
            lengths=np.asarray(lengths),
            budgets=common,
            layers=tuple(
                LayerBudgets(layer=layer, budgets=self._share_of(common, share))
                for layer, share in enumerate(self.shares)
                if layer not in self.dense_layers and share != 1
            ),
            **{name: getattr(self, name) for name in PLACE if name != "family"},
            **fields,
        )

    def _share_of(self, budgets: Int32Array, share: float) -> Int32Array:
        """Multiply budgets, in whole pages, at least the pages that are always kept."""
        least = (self.first + self.last) * self.page
        pages = np.rint(budgets.astype(np.float64) * share / self.page).astype(np.int64) * self.page
        return np.where(budgets == DENSE, DENSE, np.clip(pages, least, DENSE)).astype(np.int32)


class Estimators(Record):
    """Cheap estimates of acceptance, compared with the exact one, over the tokens of a cell.

    The sampled ratio min(1, p(x)/q(x)) is unbiased for the mean; its quantiles are not those of
    acceptance, which the comparison shows. None for teacher-forced tokens.
    """

    top_k: int
    lower_p05: float  # p05 of the top-K lower bound
    upper_p05: float
    lower_mean: float
    upper_mean: float
    widest: float  # the largest gap between the two bounds
    ratio_mean: float | None
    ratio_error: float | None  # standard error of its difference to the exact mean, over prompts
    ratio_p05: float | None


class Cell(Record):
    """Acceptance of the tokens of one variant, budget and bin of lengths.

    start <= total length < stop; the interval of p05 is over prompts. budget None is dense.
    """

    variant: str
    budget: Length | None
    start: Length
    stop: Length
    tokens: int
    sequences: int
    prompts: int
    mean: float
    p01: float
    p05: float
    low: float
    high: float
    p50: float
    above: float  # share of tokens with acceptance over 0.999
    beta: tuple[float, ...]  # a, b and KS distance of the rest, scaled to [0, 0.999]; () if few
    uncertain_p05: float | None  # p05 of tokens with dense entropy over 0.1 nats
    uncertain: int  # how many those are
    estimators: Estimators | None = None
    p0_1: Estimate | None = None  # the 0.1 % quantile of acceptance; older files have none
    hard_misses: Estimate | None = None  # per 1000 tokens; see sparrow/stats.py


class LayerLoss(Record):
    """p05 where only these layers were sparse, of tokens at lengths over the budget."""

    variant: str
    budget: int
    layers: tuple[int, ...]
    p05: float
    low: float
    high: float
    mean: float
    tokens: int
    prompts: int


class DraftCell(Record):
    """Acceptance of drafts of exact decoding, in rounds at lengths over the budget.

    Keys and values are dense but for those of the round's own drafts. Means and intervals are over
    prompts; accepted is the expected number of accepted drafts of a round.
    """

    variant: str
    budget: Length | None  # None: that of a schedule
    draft_tokens: int
    reselect: int  # drafts that read the pages selected for the first of them
    prompts: int
    rounds: int
    acceptance: tuple[Estimate, ...]  # by position in the round
    accepted: Estimate


class Surface(Table, File):
    """The result of a calibration: acceptance by flow, budget and length."""

    title: ClassVar[str] = "{0.model}, {0.prompts}, budgets {0.budgets}"
    shown: ClassVar[str] = "cells"

    what: ClassVar[str] = "surface"
    version: ClassVar[int] = FORMAT
    made_by: ClassVar[str] = "sparrow calibrate"

    format: int = FORMAT
    model: str
    family: str
    fingerprint: str  # of the weights, dtype included
    shape: str  # the model's config.json, for the cost of plans
    dtype: str
    device: str
    mode: str  # "generated" or "forced"
    prompts: str  # where they came from
    prompts_digest: str
    seed: int
    temperature: float
    max_tokens: int
    targets: tuple[float, ...]
    bins: tuple[Length, ...]  # edges of total length
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    budgets: tuple[Length, ...]
    cells: tuple[Cell, ...]  # by total length, which schedules look up
    floor: tuple[Cell, ...]  # dense against dense in the working dtype, by total length
    positions: tuple[Cell, ...]  # the same tokens as `cells`, by position in the response
    layers: tuple[LayerLoss, ...]
    drafts: tuple[DraftCell, ...] = ()
    lengths: tuple[Length, ...]  # final lengths of the sequences that the dense policy wrote
    prompt_tokens: Length  # of a prompt, the median; 0: not known
    undecided: tuple[str, ...]  # cells that may still change the plan
    warnings: tuple[str, ...]
    versions: tuple[str, ...]
    command: str
    created: str

    def _check(self) -> None:
        rising = list(self.bins) == sorted(set(self.bins))
        self.require(rising and len(self.bins) > 1, "bins", "edges that rise")
        for cell in (*self.cells, *self.floor):
            fits = cell.start in self.bins and cell.start <= cell.stop
            ordered = 0 <= cell.low <= cell.p05 <= cell.high <= 1
            allowed = "0 <= low <= p05 <= high <= 1 in one of the bins"
            self.require(fits and ordered, "cells", allowed, cell)

    @classmethod
    def upgrade(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_tokens": 0, "drafts": []} | data

    def variant(self, name: str) -> Variant:
        for variant in self.variants:
            if variant.name == name:
                return variant
        names = ", ".join(variant.name for variant in self.variants)
        raise ValueError(f"unknown variant {name!r} of the surface; expected one of {names}")

    def kept(self, variant: str) -> list[int]:
        """Return the measured budgets of a variant, ascending."""
        return sorted({c.budget for c in self.cells if c.variant == variant and c.budget})

    def of(self, variant: str, budget: int) -> list[Cell]:
        """Return the cells of a variant and budget, by length."""
        return [cell for cell in self.cells if (cell.variant, cell.budget) == (variant, budget)]


def reach(cells: Sequence[Cell]) -> dict[int, float]:
    """Return, by start of a bin, the share of prompts with a token in it or later."""
    most = max((cell.prompts for cell in cells), default=0)
    return {
        cell.start: max(later.prompts for later in cells if later.start >= cell.start) / most
        for cell in cells
    }
