"""Bins of lengths, and pure functions that change the budget of a schedule in one of them.

Budgets by layer and KV head move as the common ones do. Every result is a schedule that is valid:
budgets do not fall with the length, and none is below the pages that are always kept.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparrow.schema.schedule import DENSE, Note, Schedule

Rows = npt.NDArray[np.int64]  # [common, then each of schedule.layers; bins]

PARTS = 8  # bins where neither configuration nor schedule has any
MOST_BINS = 64  # of a schedule, in the engine's table (sparse.budgets.BudgetTable)
NOTE = "gate"  # the key under which a schedule says what the gate did to it
ROUNDING = 1e-9  # pages: 1.1 * 160 tokens are 11 pages, not 11.000000000000002


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """The gate's bins of lengths: bin i is bin i of its schedule, if there is one.

    longest: tokens of the longest sequence, so that tokens are drawn at lengths below it. mass:
    whether the flow keeps by mass, where a budget is only a cap and DENSE alone keeps everything.
    """

    starts: tuple[int, ...]
    stops: tuple[int | None, ...]  # None: open
    longest: int
    mass: bool = False

    def places(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """The bin of each length."""
        longest = lengths.max(initial=0)
        if longest >= self.longest:
            raise ValueError(f"gate: token of length {longest}, expected below {self.longest}")
        return np.searchsorted(self.starts, lengths, side="right") - 1

    def end(self, place: int) -> int:
        """One more than the greatest length at which a token is drawn in a bin."""
        stop = self.stops[place]
        return self.longest if stop is None else min(stop, self.longest)

    def enough(self, place: int) -> int:
        """The least budget under which the bin is dense."""
        return DENSE if self.mass else self.end(place) - 1

    def full(self, place: int) -> int:
        """The budget that a bin gets when it is made dense."""
        stop = self.stops[place]
        return DENSE if self.mass or stop is None else stop


def make_bins(
    schedule: Schedule | None, *, width: int | None, longest: int, mass: bool = False
) -> tuple[Schedule | None, Bins]:
    """The schedule in the bins of the gate, with the same budget at every length, and the bins."""
    starts_given = [0] if schedule is None else [int(start) for start in schedule.lengths]
    if width is not None:
        edges = sorted({*starts_given, *range(0, longest, width)})
    elif sum(start < longest for start in starts_given) > 1:
        edges = starts_given
    else:
        edges = sorted({*starts_given, *range(0, longest, -(-longest // PARTS))})
    if len(edges) > MOST_BINS and edges != starts_given:
        raise ValueError(f"gate.bin={width} makes {len(edges)} bins, expected at most {MOST_BINS}")
    starts = tuple(edge for edge in edges if edge < longest)
    stops = tuple([*edges[1:], None][: len(starts)])
    bins = Bins(starts=starts, stops=stops, longest=longest, mass=mass)
    if schedule is not None:
        places = np.searchsorted(schedule.lengths, edges, side="right") - 1
        schedule = _with_rows(schedule, _rows(schedule)[:, places], lengths=edges)
    return schedule, bins


def is_dense(schedule: Schedule, place: int, bins: Bins) -> bool:
    """Whether every layer keeps everything at every length of a bin."""
    return bool((_rows(schedule)[:, place] >= bins.enough(place)).all())


def raised(schedule: Schedule, place: int, factor: float, bins: Bins) -> Schedule:
    """Budgets of a bin times factor, in whole pages; later ones are lifted to at least that.

    What has enough for the bin stays; what gets enough gets the bin's full budget. However small
    the factor, a raise is one.
    """
    rows = _rows(schedule)
    current, enough, full = rows[:, place], bins.enough(place), bins.full(place)
    next_page = (current // schedule.page + 1) * schedule.page
    more = np.maximum(_whole_pages(current * factor, schedule.page), next_page).clip(max=DENSE)
    rows[:, place] = np.where(current >= enough, current, np.where(more >= enough, full, more))
    return _lifted(schedule, rows, place)


def made_dense(schedule: Schedule, place: int, bins: Bins) -> Schedule:
    """A bin that keeps everything; budgets of later ones are lifted to at least its own."""
    rows = _rows(schedule)
    rows[:, place] = np.maximum(rows[:, place], bins.full(place))
    return _lifted(schedule, rows, place)


def lowered(
    schedule: Schedule, place: int, factor: float, bins: Bins, seen: list[bool]
) -> Schedule:
    """Budgets of a bin through factor, in whole pages, none below those of bins before it.

    Nor below the pages that are always kept. Bins before it in which no token was ever drawn (not
    `seen`: prompts are longer) hold nothing back: they go down with it.
    """
    rows = _rows(schedule)
    current = np.minimum(rows[:, place], bins.end(place))
    less = _whole_pages(current / factor, schedule.page)
    before = [rows[:, i] for i in range(place) if seen[i]]
    floor = before[-1] if before else (schedule.first + schedule.last) * schedule.page
    rows[:, place] = np.minimum(rows[:, place], np.maximum(less, floor))
    rows[:, :place] = np.minimum(rows[:, :place], rows[:, place : place + 1])
    return _with_rows(schedule, rows)


def changed(before: Schedule, after: Schedule) -> list[int]:
    """The bins in which some budget differs."""
    differs = (_rows(before) != _rows(after)).any(0)
    return [int(place) for place in np.flatnonzero(differs)]


def renamed(schedule: Schedule, what: str) -> Schedule:
    """NAME+gateN, one more than before, and `what` was done added to its note on the gate."""
    match = re.fullmatch(r"(.+)\+gate(\d+)", schedule.name, flags=re.DOTALL)
    name, count = (match[1], int(match[2])) if match else (schedule.name, 0)
    history = [note.text for note in schedule.provenance if note.key == NOTE]
    others = tuple(note for note in schedule.provenance if note.key != NOTE)
    note = Note(key=NOTE, text="; ".join([*history, what]))
    return schedule.replace(name=f"{name}+gate{count + 1}", provenance=(*others, note))


def _rows(schedule: Schedule) -> Rows:
    rows = [schedule.budgets, *(item.budgets for item in schedule.layers)]
    return np.array(rows, dtype=np.int64)


def _with_rows(schedule: Schedule, rows: Rows, **others: Any) -> Schedule:
    pairs = zip(schedule.layers, rows[1:], strict=True)
    layers = tuple(item.replace(budgets=row) for item, row in pairs)
    return schedule.replace(budgets=rows[0], layers=layers, **others)


def _whole_pages(tokens: npt.NDArray[np.floating], page: int) -> Rows:
    return np.ceil(tokens / page - ROUNDING).astype(np.int64) * page


def _lifted(schedule: Schedule, rows: Rows, place: int) -> Schedule:
    """With these rows, and budgets of later bins at least those of a bin."""
    rows[:, place:] = np.maximum(rows[:, place:], rows[:, place : place + 1])
    return _with_rows(schedule, rows)
