"""A flow: what to keep with a finished page, and how to score pages for a query.

    def summarise(keys, values):                 # one page: [P, D] each
        return {"mean": keys.mean(0)}

    def score(query, fields, position):          # query heads of a group [R, D]; one page's fields
        return query.mean(0) @ fields.mean

    block_mean = Flow(name="block-mean", fields={"mean": bf16(D)}, summarise=summarise, score=score)

A flow is checked when it is made: it is traced once, and every mistake names its line.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparrow.sparse.flows.formats import Format
from sparrow.sparse.flows.nodes import Place, fail, here
from sparrow.sparse.flows.tracing import Function, trace

PROBE = (16, 128, 2)  # page, head size, query heads a group: what a new flow is traced for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A selection formula as plain functions; `Rule` joins it with budgets and reserved pages.

    fields     what is kept with every finished page, by name: bf16(D), int4(P // 4, D), ...
    summarise  (keys, values) -> {name: tensor}; both are [P, D], rotated, one KV head
    score      (query, fields, position) -> one number per page; with state also {name: tensor}.
               None: every page is kept. position has .length (tokens, the current one included),
               .page (number of the page) and .pages (finished pages of the sequence)
    state      one number per page and request that lives across steps: its value at first. `fields`
               has it as well, and `score` returns (score, {name: new value})
    mass       keep the best pages until they hold this share of all scores (which are then masses);
               the budget is what they may take at most
    probe      page, head size and query heads a group that it is traced for when it is made; to be
               given where a flow fits one kind of model only, as by constants of its sizes
    """

    name: str
    score: Function | None
    summarise: Function | None = None
    fields: Mapping[str, Format] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)
    mass: float | None = None
    probe: tuple[int, int, int] = PROBE
    place: Place = field(init=False, repr=False)  # where it was made

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", here())
        for name in ("fields", "state"):
            if not isinstance(getattr(self, name), Mapping):
                raise fail(f"Flow.{name}: got {getattr(self, name)!r}, allowed: a mapping by name")
            object.__setattr__(self, name, dict(getattr(self, name)))
        if not self.name or not isinstance(self.name, str):
            raise fail(f"Flow.name: got {self.name!r}, allowed: a text")
        if self.mass is not None and (
            isinstance(self.mass, bool)
            or not isinstance(self.mass, int | float)
            or not 0 < self.mass <= 1
        ):
            raise fail(f"flow {self.name!r}: mass {self.mass!r}, allowed: above 0, at most 1")
        for name, start in self.state.items():
            if not isinstance(start, int | float) or not math.isfinite(start):
                raise fail(f"flow {self.name!r}: state {name!r} starts at {start!r}: a number")
        if not (
            isinstance(self.probe, tuple)
            and len(self.probe) == 3
            and all(isinstance(size, int) and size > 0 for size in self.probe)
        ):
            raise fail(f"Flow.probe: got {self.probe!r}, allowed: page, head size, query heads")
        trace(self, *self.probe)

    @property
    def digest(self) -> str:
        """A name for the formula, by which schedules tell whether they were made for it."""
        return trace(self, *self.probe).digest
