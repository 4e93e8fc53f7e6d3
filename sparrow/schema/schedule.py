"""Budget schedules: how many tokens decoding keeps at each length, as data with provenance.

Budgets count all kept tokens, those of reserved pages and of the unfinished page included. A
schedule names the selection rule and model family that it was measured with; one that is forced
onto another records that.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from sparrow.schema.base import File, Int32Array, Record, Table

NotNegative = Annotated[int, Field(ge=0)]
NotEmpty = Annotated[str, Field(min_length=1)]

DENSE = 2**31 - 1
"""The budget of a layer or request that keeps everything: the largest int32."""

PLACE = ("family", "flow", "flow_digest", "page", "first", "last", "dense_layers")
"""The fields that budgets depend on."""


class Note(Record):
    """A statement on the origin of a schedule."""

    key: str
    text: str


class LayerBudgets(Record):
    """Budgets of one layer in place of the common ones, over the same bins.

    With a head, those of one KV head of the layer.
    """

    layer: NotNegative
    budgets: Int32Array
    head: NotNegative | None = None


class Schedule(Table, File):
    """Kept tokens by total length, and the selection rule that they hold for.

    Bin i starts at lengths[i] tokens (the current one included) and keeps budgets[i]; the last bin
    is open. The rule is the flow's name, its page size, the pages it always keeps and the layers
    that stay dense: another rule keeps other tokens, so budgets do not carry over to it; nor do
    they to another family of models.
    """

    what: ClassVar[str] = "schedule"

    name: NotEmpty
    lengths: Int32Array
    budgets: Int32Array
    layers: tuple[LayerBudgets, ...] = ()
    flow: NotEmpty = "block-mean"
    flow_digest: str | None = None  # of the flow's formula; None: made by hand, checked by name
    page: Annotated[int, Field(ge=1)] = 16
    first: NotNegative = 1
    last: Annotated[int, Field(ge=1)] = 2  # an unfinished page has no landmark and is always kept
    dense_layers: tuple[int, ...] = ()
    model: str | None = None  # the model it was measured on
    family: NotEmpty | None = None  # that model's, as "qwen3"; None: made by hand, for any
    provenance: tuple[Note, ...] = ()
    forced: tuple[Note, ...] = ()  # the original values of fields that were forced

    @classmethod
    def fixed(cls, budget: int, **settings: Any) -> "Schedule":
        """One budget at every length, in every layer; `settings` are any other fields.

        No layer stays dense unless `dense_layers` names it: a budget means the same in every verb,
        and on models of one or two layers too. (The published schedules name layers 0 and 1.)
        """
        settings = {"name": f"fixed-{budget}"} | settings
        return cls(lengths=np.zeros(1, np.int32), budgets=np.array([budget]), **settings)

    def budget(self, length: int, layer: int | None = None, head: int | None = None) -> int:
        """Return the budget at a total length: of a layer (DENSE: dense), or the common one."""
        return int(self.budgets_of(layer, head)[bisect_right(self.lengths, length) - 1])

    def budgets_of(self, layer: int | None = None, head: int | None = None) -> Int32Array:
        """Return the budgets of every bin: of a layer (DENSE if it is dense), or the common ones.

        head: those of a KV head, where it has budgets of its own.
        """
        if layer in self.dense_layers:
            return np.full_like(self.budgets, DENSE)
        by_head = {item.head: item.budgets for item in self.layers if item.layer == layer}
        return by_head.get(head, by_head.get(None, self.budgets))

    def kept(
        self, lengths: npt.NDArray[np.int64], layer: int, head: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the kept tokens of a layer at these total lengths, which are at least 1."""
        budget = self.budgets_of(layer, head).astype(np.int64)
        budget = budget[np.searchsorted(self.lengths, lengths, side="right") - 1]
        return _kept(lengths, budget, self.page, self.first, self.last)

    def kept_of_heads(
        self, lengths: npt.NDArray[np.int64], layer: int, kv_heads: int
    ) -> npt.NDArray[np.float64]:
        """Return the kept tokens of a layer, averaged over its KV heads."""
        if not any(item.layer == layer and item.head is not None for item in self.layers):
            return self.kept(lengths, layer).astype(np.float64)
        return np.mean([self.kept(lengths, layer, head) for head in range(kv_heads)], axis=0)

    def misfits(self, place: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a place (see PLACE) that differ from those of the schedule.

        A family or flow digest of None matches any.
        """
        return {
            field: value
            for field, value in place.items()
            if getattr(self, field) != value
            and not (field in ("family", "flow_digest") and None in (value, getattr(self, field)))
        }

    def forced_onto(self, **place: Any) -> "Schedule":
        """Return the same budgets for another place; `describe` then shows that it was forced.

        place: any fields of PLACE. Acceptance there is unmeasured. Layers that are dense there lose
        their own budgets.
        """
        if "dense_layers" in place:
            place["dense_layers"] = tuple(sorted(place["dense_layers"]))
        changes = self.misfits(place)
        made_for = {field: _said(getattr(self, field)) for field in changes}
        made_for |= {note.key: note.text for note in self.forced}
        now = {field: _said(changes.get(field, getattr(self, field))) for field in PLACE}
        dense = changes.get("dense_layers", self.dense_layers)
        return self.replace(
            **changes,
            layers=tuple(item for item in self.layers if item.layer not in dense),
            forced=tuple(
                Note(key=field, text=made_for[field])
                for field in PLACE
                if made_for.get(field, now[field]) != now[field]
            ),
        )

    def table(self, field: str = "") -> list[dict[str, Any]]:
        """Return the bins: from which total length on how many tokens are kept."""
        if field:
            return super().table(field)
        pairs = zip(self.lengths.tolist(), self.budgets.tolist(), strict=True)
        return [{"length": start, "budget": budget} for start, budget in pairs]

    def _title(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Describe the attention in one line, for headers and completions."""
        least, most = self._range()
        if least == DENSE:
            return "dense"
        name = f"{self.name}: " if least < most else ""
        made_for = ", ".join(f"{n.key.replace('_', ' ')} {n.text}" for n in self.forced)
        return (
            f"{name}{self.flow}, page {self.page}, {self._describe_budgets(least, most)}, "
            f"first {self.first} and last {self.last} pages kept, "
            f"dense layers: {_said(self.dense_layers)}"
            + (f"; FORCED, made for {made_for}" if made_for else "")
        )

    def _range(self) -> tuple[int, int]:
        rows = [self.budgets, *(item.budgets for item in self.layers)]
        return min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)

    def _describe_budgets(self, least: int, most: int) -> str:
        if least == most:
            return f"budget {least} tokens"
        by = [f"length ({len(self.lengths)} bins)"] if len(self.lengths) > 1 else []
        layers = {item.layer for item in self.layers}
        by += [f"layer ({len(layers)} with budgets of their own)"] if layers else []
        heads = sum(item.head is not None for item in self.layers)
        by += [f"KV head ({heads} with budgets of their own)"] if heads else []
        upto = "all" if most == DENSE else most
        return f"budgets {least} to {upto} tokens by {' and '.join(by)}"

    @classmethod
    def upgrade(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"flow_digest": None, "dense_layers": (0, 1)} | data  # the defaults of older files

    def _check(self) -> None:
        starts = self.lengths.tolist()
        rising = starts[:1] == [0] and _ascending(starts)
        self.require(rising, "lengths", "bins that start at 0, each above the one before", starts)
        numbers = "layer numbers, each above the one before"
        self.require(_ascending(self.dense_layers), "dense_layers", numbers)
        self._check_budgets("budgets", self.budgets)
        places = [(item.layer, -1 if item.head is None else item.head) for item in self.layers]
        allowed = "layers in order, each one's own budgets before those of its heads in order"
        self.require(places == sorted(set(places)), "layers", allowed, places)
        for index, item in enumerate(self.layers):
            sparse = item.layer not in self.dense_layers
            allowed = f"a layer that is not dense (dense: {_said(self.dense_layers)})"
            self.require(sparse, f"layers[{index}].layer", allowed, item.layer)
            self._check_budgets(f"layers[{index}].budgets", item.budgets)

    def _check_budgets(self, field: str, budgets: Int32Array) -> None:
        values, least = budgets.tolist(), (self.first + self.last) * self.page
        bins = len(self.lengths)
        fits = len(values) == bins and values[0] >= least
        allowed = (
            f"one for each of {bins} bins, {least} tokens (the first {self.first} and last "
            f"{self.last} pages of {self.page}, always kept) or more, none below the one before"
        )
        self.require(fits and all(a <= b for a, b in pairwise(values)), field, allowed, values)


def kept_tokens(length: int, budget: int, page: int = 16, first: int = 1, last: int = 2) -> int:
    """Return how many tokens of a sequence `ops.select_pages` keeps with a budget.

    As many whole pages as fit in the budget with the last page, which may be unfinished; at least
    the reserved pages, at most all.
    """
    kept = _kept(np.array(length), np.array(budget), page, first, last)
    return int(kept) if length else 0


def _kept(
    lengths: npt.NDArray[np.int64],
    budgets: npt.NDArray[np.int64],
    page: int,
    first: int,
    last: int,
) -> npt.NDArray[np.int64]:
    pages = -(-lengths // page)
    tail = lengths - (pages - 1) * page
    affordable = np.maximum((budgets - tail) // page + 1, first + last)
    return (np.minimum(affordable, pages) - 1) * page + tail


def _said(value: object) -> str:
    """Format a field of a place."""
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def _ascending(values: Sequence[int]) -> bool:
    """Whether values are strictly ascending."""
    return all(a < b for a, b in pairwise([-1, *values]))
