"""Schedules that the gate makes are valid, whatever it does, and bins change no budget."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.gate import budgets
from sparrow.gate.budgets import Bins, make_bins
from sparrow.schema.schedule import DENSE, LayerBudgets, Schedule

LONGEST = st.integers(1, 3000)
WIDTHS = st.none() | st.integers(60, 2000)
FACTORS = st.floats(1, 8, exclude_min=True)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    starts = [0, *sorted(draw(st.sets(st.integers(1, 4000), max_size=5)))]
    page = draw(st.sampled_from([1, 16, 30]))
    values = st.integers(3 * page, 4000) | st.just(DENSE)
    some = st.lists(values, min_size=len(starts), max_size=len(starts)).map(sorted)
    places = sorted(draw(st.sets(st.tuples(st.integers(2, 4), st.integers(-1, 1)), max_size=3)))
    layers = [
        LayerBudgets(layer=layer, head=None if head < 0 else head, budgets=draw(some))
        for layer, head in places
    ]
    return Schedule(name="s", lengths=starts, budgets=draw(some), layers=layers, page=page)


@given(schedules(), WIDTHS, LONGEST)
def test_bins_change_no_budget_at_any_length(
    schedule: Schedule, width: int | None, longest: int
) -> None:
    refined, bins = make_bins(schedule, width=width, longest=longest)
    edges = {0, 1, longest, 5000} | {e + d for e in refined.lengths.tolist() for d in (-1, 0, 1)}
    for length in sorted(edge for edge in edges if edge >= 0):
        for layer, head in [(None, None), *((item.layer, item.head) for item in schedule.layers)]:
            assert refined.budget(length, layer, head) == schedule.budget(length, layer, head)
    assert set(schedule.lengths.tolist()) <= set(refined.lengths.tolist())
    assert bins.starts == tuple(refined.lengths[: len(bins.starts)])
    assert all(start < longest for start in bins.starts)
    assert bins.stops[:-1] == bins.starts[1:]
    again, same = make_bins(refined, width=width, longest=longest)
    assert (again, same) == (refined, bins)  # so that a restored gate has its bins


@settings(max_examples=200)
@given(st.data(), schedules(), WIDTHS, LONGEST, FACTORS, st.booleans())
def test_any_course_of_changes_is_valid(  # a Schedule refuses budgets that fall or are too small
    data: st.DataObject,
    schedule: Schedule,
    width: int | None,
    longest: int,
    factor: float,
    mass: bool,
) -> None:
    now, bins = make_bins(schedule, width=width, longest=longest, mass=mass)
    for kind in data.draw(st.lists(st.sampled_from(["raise", "dense", "lower"]), max_size=8)):
        place = data.draw(st.integers(0, len(bins.starts) - 1))
        before, now = now, step(data, kind, now, place, factor, bins)
        rows = ([s.budgets, *(layer.budgets for layer in s.layers)] for s in (before, now))
        for old, new in zip(*rows, strict=True):
            if kind == "lower":
                assert (new <= old).all()
                assert (new[place + 1 :] == old[place + 1 :]).all()
            else:
                assert (new >= old).all()
                assert (new[:place] == old[:place]).all()
        if kind == "raise":
            assert place in budgets.changed(before, now) or budgets.is_dense(before, place, bins)


def step(
    data: st.DataObject, kind: str, now: Schedule, place: int, factor: float, bins: Bins
) -> Schedule:
    if kind == "raise":
        return budgets.raised(now, place, factor, bins)
    if kind == "dense":
        after = budgets.made_dense(now, place, bins)
        assert budgets.is_dense(after, place, bins)
        return after
    count = len(bins.starts)
    seen = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    after = budgets.lowered(now, place, factor, bins, seen)
    kept = [i for i in range(place) if seen[i]]
    assert not set(kept) & set(budgets.changed(now, after))
    return after


def test_which_bins() -> None:
    for width, longest, starts, bins in (
        (None, 801, [0], [*range(0, 801, 101)]),
        (None, 800, [0, 300], [0, 300]),
        (None, 80, [0, 300], [*range(0, 80, 10), 300]),  # one is reached: as good as one
        (250, 800, [0, 300], [0, 250, 300, 500, 750]),
        (250, 750, [0], [0, 250, 500]),
        (None, 1, [0], [0]),
    ):
        schedule = Schedule(name="s", lengths=starts, budgets=[64] * len(starts))
        refined, _ = make_bins(schedule, width=width, longest=longest)
        assert refined.lengths.tolist() == bins


def test_whole_pages_upwards() -> None:
    schedule = Schedule.fixed(160)
    now, bins = make_bins(schedule, width=1000, longest=1000)
    assert budgets.raised(now, 0, 1.1, bins).budgets.tolist() == [176]  # 176.00000000000003
    assert budgets.raised(now, 0, 1.11, bins).budgets.tolist() == [192]
    assert budgets.lowered(now, 0, 1.5, bins, [True]).budgets.tolist() == [112]
    odd = Schedule.fixed(50)
    assert budgets.lowered(odd, 0, 1.01, bins, [True]).budgets.tolist() == [50]  # 64 is not less


def test_dense_is_a_budget_of_every_length_that_is_reached() -> None:
    schedule = Schedule(name="s", lengths=[0, 100, 200], budgets=[99, 150, 248])
    now, bins = make_bins(schedule, width=None, longest=250)
    assert [budgets.is_dense(now, i, bins) for i in range(3)] == [True, False, False]
    assert budgets.raised(now, 1, 1.2, bins).budgets.tolist() == [99, 192, 248]
    assert budgets.raised(now, 1, 1.5, bins).budgets.tolist() == [99, 200, 248]
    assert budgets.raised(now, 2, 1.1, bins).budgets.tolist() == [99, 150, DENSE]
    assert budgets.raised(now, 0, 1.5, bins) == now
    assert budgets.made_dense(now, 0, bins).budgets.tolist() == [100, 150, 248]
    assert budgets.made_dense(now, 1, bins).budgets.tolist() == [99, 200, 248]

    # Places are those of the schedule's look-up.
    lengths = np.array([0, 99, 100, 199, 200, 249], np.int32)
    assert bins.places(lengths).tolist() == [0, 0, 1, 1, 2, 2]
