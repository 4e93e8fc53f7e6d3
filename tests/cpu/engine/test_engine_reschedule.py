"""Schedules change between steps: what runs from then on, and what completions say of it."""

import numpy as np
import pytest
from support import engines
from support.engines import SPARSE, alone, changed, engine_of, params, prompt, run, same_bits, steps

from sparrow.engine import Engine
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.sparse.rule import Rule

LONG = 100
WIDE = Schedule.fixed(80)


def at_length(length: int, before: int, after: int) -> Schedule:
    """The change as a schedule of its own: another budget from this length on."""
    return Schedule(name="bins", lengths=[0, length], budgets=[before, after])


def drawn(engine: Engine) -> int:
    return next(iter(engine.loop.requests.values())).samples[0].drawn


def test_before_the_first_decode_step_it_is_the_new_schedule(model) -> None:
    for begun in (0, 1):
        engine = engine_of(model)
        number = engine.add(prompt(LONG), params(), schedule=SPARSE)
        before = steps(engine, begun)
        assert drawn(engine) == begun
        assert engine.reschedule(number, WIDE) == [number]
        done = run(engine, outputs=before)[number, 0]
        same_bits(done, alone(model, prompt(LONG), params(), schedule=WIDE))
        assert done.attention == WIDE.describe()


@pytest.mark.parametrize("asleep", [False, True])
def test_on_the_way_it_is_a_bin_of_its_own(model, asleep) -> None:
    """A change at a length is what a schedule with a bin from that length on does, also for
    samples that are out; dense is a bin that keeps all.
    """
    for new, budget in ((WIDE, 80), (None, DENSE)):
        engine = engine_of(model)
        number = engine.add(prompt(LONG), params(), schedule=SPARSE)
        before = steps(engine, 9)
        length = LONG + drawn(engine)
        if asleep:
            engine.sleep(weights="keep")
        assert engine.reschedule(SPARSE, new) == [number]
        if asleep:
            engine.wake()
        done = run(engine, outputs=before)[number, 0]
        binned = alone(model, prompt(LONG), params(), schedule=at_length(length, 48, budget))
        same_bits(done, binned)
        said = f"from length {length}: {'dense' if new is None else new.describe()}"
        assert done.attention == f"{SPARSE.describe()}; {said}"
        assert done.swaps == asleep
        assert len(np.unique(done.kept.round(2))) > 2


def test_a_request_becomes_dense_and_sparse_again(model) -> None:
    engine = engine_of(model)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    before = steps(engine, 5)
    dense_at = drawn(engine)
    for schedule in (WIDE, None, None):  # no token comes between: one change, and nothing new
        engine.reschedule(number, schedule)
    before += steps(engine, 6)
    sparse_at = drawn(engine)
    engine.reschedule(number, SPARSE)
    done = run(engine, outputs=before)[number, 0]
    expected = alone(model, prompt(LONG), params(), schedule=SPARSE).kept.copy()
    expected[dense_at:sparse_at] = 1
    np.testing.assert_array_equal(done.kept, expected)
    said = f"; from length {LONG + dense_at}: dense; from length {LONG + sparse_at}: "
    assert done.attention == SPARSE.describe() + said + SPARSE.describe()
    assert (engine.runner.budgets._budgets_LAEG[:, 0] == DENSE).all()  # the dense slot


def test_only_those_under_the_schedule_change_and_nothing_is_built_anew(model) -> None:
    """Any number of times, as a gate raises a bin: only schedules in use need a place."""
    engine = engine_of(model)
    asked = [SPARSE, None, Schedule.fixed(64), SPARSE]
    numbers = []
    for seed, schedule in enumerate(asked):
        numbers.append(engine.add(prompt(LONG, seed), params(seed=seed), schedule=schedule))
    before = steps(engine, 12)
    runner = engine.runner
    tensors = (runner.rows.schedule_R, runner.budgets._starts_AE, runner.budgets._budgets_LAEG)
    places = [tensor.data_ptr() for tensor in tensors]
    old = SPARSE
    for budget in (*range(81, 102), 80):
        assert engine.reschedule(old, Schedule.fixed(budget)) == [numbers[0], numbers[3]]
        old = Schedule.fixed(budget)
    done = run(engine, outputs=before)
    assert engine.runner is runner
    tensors = (runner.rows.schedule_R, runner.budgets._starts_AE, runner.budgets._budgets_LAEG)
    assert places == [tensor.data_ptr() for tensor in tensors]
    assert all(done[numbers[at], 0].attention.count("; from length") == 1 for at in (0, 3))
    for at in (1, 2):
        other = alone(model, prompt(LONG, at), params(seed=at), schedule=asked[at])
        same_bits(done[numbers[at], 0], other)
        assert done[numbers[at], 0].attention == other.attention


def test_each_sample_tells_its_own_length(model) -> None:
    """One of three has a row at a time: one is done, one on the way, one yet to come."""
    engine = engine_of(model, max_running=1)
    number = engine.add(prompt(LONG), params(n=3), schedule=SPARSE)
    before = []
    while not any(output.completion for output in before):
        before += steps(engine, 1)
    before += steps(engine, 7)
    count = engine.loop.requests[number].samples[1].drawn
    assert 1 < count < 24
    engine.reschedule(number, WIDE)
    done = run(engine, outputs=before)
    first, second, third = (done[number, sample].attention for sample in range(3))
    assert first == SPARSE.describe()
    assert second == f"{SPARSE.describe()}; from length {LONG + count}: {WIDE.describe()}"
    assert third == WIDE.describe()


def test_a_restart_or_an_abort_tells_what_ran(model) -> None:
    own = engines.tiny()
    engine = engine_of(own)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    steps(engine, 6)
    engine.reschedule(number, WIDE)
    steps(engine, 6)
    engine.update(changed(own), version=1, in_flight="restart")
    done = run(engine)[number, 0]
    assert (done.restarts, done.attention) == (1, WIDE.describe())
    wide = alone(model, prompt(LONG), params(), schedule=WIDE)
    np.testing.assert_array_equal(done.kept, wide.kept)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    steps(engine, 6)
    engine.reschedule(number, WIDE)
    engine.abort(number)
    (output,) = engine.step()
    assert output.completion.attention == SPARSE.describe()  # no token was drawn under the other
    assert engine.idle


def test_what_does_not_fit_is_refused_and_changes_nothing(model) -> None:
    engine = engine_of(model, rule=Rule())
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    before = steps(engine, 4)
    for new, field in (
        (Schedule.fixed(96, page=32), "page"),
        (Schedule.fixed(48, dense_layers=(0,)), "dense_layers"),
        (Schedule.fixed(48, family="llama"), "family"),
        ("wide", "Schedule"),
    ):
        for which in (number, SPARSE):
            with pytest.raises(ValueError, match=field):
                engine.reschedule(which, new)
    with pytest.raises(ValueError, match="reschedule"):
        engine.reschedule(None, SPARSE)
    assert engine.reschedule(7, SPARSE) == engine.reschedule(WIDE, SPARSE) == []
    done = run(engine, outputs=before)[number, 0]
    same_bits(done, alone(model, prompt(LONG), params(), schedule=SPARSE))
