"""Whatever a schedule holds: its file loses nothing, and look-up is a scan of the bins."""

import json
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.schedule import LayerBudgets, Note, Schedule

TEXT = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs"]))
NAME = TEXT.filter(bool)


def rising(draw: st.DrawFn, count: int, least: int) -> list[int]:
    values = st.integers(least, 2**31 - 1)
    return sorted(draw(st.lists(values, min_size=count, max_size=count)))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    starts = [0, *sorted(draw(st.sets(st.integers(1, 2**31 - 1), max_size=6)))]
    page, first, last = (draw(st.integers(low, 40)) for low in (1, 0, 1))
    least, count = (first + last) * page, len(starts)
    numbers = sorted(draw(st.sets(st.integers(0, 90), max_size=6)))
    own = draw(st.sets(st.sampled_from(numbers))) if numbers else set()
    notes = draw(st.dictionaries(TEXT, TEXT, max_size=3))
    return Schedule(
        name=draw(NAME),
        lengths=starts,
        budgets=rising(draw, count, least),
        layers=tuple(
            LayerBudgets(layer=layer, budgets=rising(draw, count, least), head=head)
            for layer in sorted(own)
            for head in (None, *sorted(draw(st.sets(st.integers(0, 7), max_size=2))))
        ),
        flow=draw(NAME),
        page=page,
        first=first,
        last=last,
        dense_layers=tuple(number for number in numbers if number not in own),
        model=draw(st.none() | TEXT),
        family=draw(st.none() | NAME),
        provenance=tuple(Note(key=key, text=text) for key, text in notes.items()),
    )


@given(schedules())
def test_survives_json_and_its_file(schedule: Schedule) -> None:
    assert from_dict(Schedule, json.loads(json.dumps(to_dict(schedule)))) == schedule
    with tempfile.TemporaryDirectory() as folder:
        schedule.save(Path(folder) / "schedule.json")
        assert Schedule.load(Path(folder) / "schedule.json") == schedule


@given(schedules(), st.data())
def test_look_up_is_a_scan_of_the_bins(schedule: Schedule, data: st.DataObject) -> None:
    near = st.sampled_from([int(start) + step for start in schedule.lengths for step in (0, 1)])
    length = data.draw(near | st.integers(0, 2**31 - 1))
    begun = [i for i, start in enumerate(schedule.lengths.tolist()) if start <= length]
    assert schedule.budget(length) == schedule.budgets[begun[-1]]
