"""Schedules change between steps: what runs from then on, and what completions say of it."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from support.engines import (
    SPARSE,
    assert_same_bits,
    changed,
    count_prefill,
    engine_of,
    params,
    prompt,
    run,
    steps,
    tiny,
    tokens_of,
)

from sparrow import models
from sparrow.engine import AsyncEngine, Engine
from sparrow.schema.sampling import Completion
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.sparse.flows import library
from sparrow.sparse.rule import Rule

LONG = 100
WIDE = Schedule.fixed(80)


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny()


def at_length(length: int, before: int, after: int) -> Schedule:
    """The change as a schedule of its own: another budget from this length on."""
    return Schedule(name="bins", lengths=[0, length], budgets=[before, after])


def drawn(engine: Engine) -> int:
    return next(iter(engine.loop.requests.values())).samples[0].drawn


def from_the_start(model: models.Decoder, schedule: Schedule | None) -> Completion:
    (done,) = engine_of(model).generate([prompt(LONG)], params(), schedule=schedule)
    return done


def test_before_the_first_decode_step_it_is_the_new_schedule(model) -> None:
    for begun in (0, 1):
        engine = engine_of(model)
        number = engine.add(prompt(LONG), params(), schedule=SPARSE)
        before = steps(engine, begun)
        assert drawn(engine) == begun
        assert engine.reschedule(number, WIDE) == [number]
        done = run(engine, outputs=before)[number, 0]
        assert_same_bits(done, from_the_start(model, WIDE))
        assert done.attention == WIDE.describe()


def test_before_a_budget_bites_tokens_are_those_of_the_new_schedule(model) -> None:
    short = prompt(20)
    engine = engine_of(model)
    number = engine.add(short, params(max_tokens=60), schedule=SPARSE)
    before = steps(engine, 10)
    engine.reschedule(SPARSE, Schedule.fixed(64))
    done = run(engine, outputs=before)[number, 0]
    (other,) = engine_of(model).generate(
        [short], params(max_tokens=60), schedule=Schedule.fixed(64)
    )
    assert_same_bits(done, other)


def test_on_the_way_it_is_a_bin_of_its_own(model) -> None:
    """A change at a length is what a schedule with a bin from that length on does."""
    engine = engine_of(model)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    before = steps(engine, 9)
    length = LONG + drawn(engine)
    assert engine.reschedule(SPARSE, WIDE) == [number]
    done = run(engine, outputs=before)[number, 0]
    assert_same_bits(done, from_the_start(model, at_length(length, 48, 80)))
    said = f"{SPARSE.describe()}; from length {length}: {WIDE.describe()}"
    assert done.attention == said
    assert len(np.unique(done.kept.round(2))) > 2
    assert done.token_ids.tolist() != from_the_start(model, SPARSE).token_ids.tolist()


def test_a_request_becomes_dense_and_sparse_again(model) -> None:
    engine = engine_of(model)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    before = steps(engine, 5)
    dense_at = drawn(engine)
    engine.reschedule(number, None)
    engine.reschedule(number, None)  # which is nothing new
    before += steps(engine, 6)
    sparse_at = drawn(engine)
    engine.reschedule(number, SPARSE)
    done = run(engine, outputs=before)[number, 0]
    sparse = from_the_start(model, SPARSE)
    expected = sparse.kept.copy()
    expected[dense_at:sparse_at] = 1
    np.testing.assert_array_equal(done.kept, expected)
    said = f"; from length {LONG + dense_at}: dense; from length {LONG + sparse_at}: "
    assert done.attention == SPARSE.describe() + said + SPARSE.describe()
    assert (engine.runner.budgets._budgets_LAEG[:, 0] == DENSE).all()  # the dense slot


def test_dense_from_a_length_on_is_a_bin_that_keeps_all(model) -> None:
    engine = engine_of(model)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    before = steps(engine, 5)
    length = LONG + drawn(engine)
    engine.reschedule(number, None)
    done = run(engine, outputs=before)[number, 0]
    assert_same_bits(done, from_the_start(model, at_length(length, 48, DENSE)))


def test_a_dense_request_becomes_sparse(model) -> None:
    engine = engine_of(model)
    number = engine.add(prompt(LONG), params())
    before = steps(engine, 8)
    count = drawn(engine)
    engine.reschedule(number, SPARSE)
    done = run(engine, outputs=before)[number, 0]
    dense, sparse = from_the_start(model, None), from_the_start(model, SPARSE)
    assert done.token_ids[:count].tolist() == dense.token_ids[:count].tolist()
    assert done.kept.tolist() == [*dense.kept[:count], *sparse.kept[count:]]
    assert done.attention == f"dense; from length {LONG + count}: {SPARSE.describe()}"


def test_only_those_under_the_schedule_change(model) -> None:
    engine = engine_of(model)
    asked = [SPARSE, None, Schedule.fixed(64), SPARSE]
    numbers = [
        engine.add(prompt(LONG, seed), params(seed=seed), schedule=schedule)
        for seed, schedule in enumerate(asked)
    ]
    before = steps(engine, 12)
    assert engine.reschedule(SPARSE, WIDE) == [numbers[0], numbers[3]]
    done = run(engine, outputs=before)
    assert all("; from length" in done[numbers[at], 0].attention for at in (0, 3))
    for at in (1, 2):
        (alone,) = engine_of(model).generate(
            [prompt(LONG, at)], params(seed=at), schedule=asked[at]
        )
        assert_same_bits(done[numbers[at], 0], alone)
        assert done[numbers[at], 0].attention == alone.attention


def test_nothing_is_built_anew(model) -> None:
    engine = engine_of(model)
    engine.add(prompt(LONG), params(), schedule=SPARSE)
    steps(engine, 4)
    tables = engine.runner.budgets
    parts = (engine.runner, engine.runner.cache, engine.runner.rows, engine.pool, tables)
    tensors = (engine.runner.rows.schedule_R, tables._starts_AE, tables._budgets_LAEG)
    places = [tensor.data_ptr() for tensor in tensors]
    engine.reschedule(SPARSE, WIDE)
    steps(engine, 2)
    now = engine.runner
    same = (now, now.cache, now.rows, engine.pool, now.budgets)
    assert all(a is b for a, b in zip(parts, same, strict=True))
    tensors = (now.rows.schedule_R, now.budgets._starts_AE, now.budgets._budgets_LAEG)
    assert places == [tensor.data_ptr() for tensor in tensors]


def test_any_number_of_changes(model) -> None:
    """A gate raises a bin again and again; only schedules in use need a place."""
    engine = engine_of(model)
    beside = engine.add(prompt(LONG, 1), params(max_tokens=60), schedule=WIDE)
    number = engine.add(prompt(LONG), params(max_tokens=60), schedule=SPARSE)
    old, before = SPARSE, steps(engine, 3)
    for budget in range(49, 80):
        new = Schedule.fixed(budget)
        assert engine.reschedule(old, new) == [number]
        old, before = new, before + steps(engine, 1)
    done = run(engine, outputs=before)
    assert done[number, 0].attention.count("from length") == 31
    assert done[beside, 0].attention == WIDE.describe()


def test_samples_that_are_out_follow_too(model) -> None:
    engine = engine_of(model)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    before = steps(engine, 9)
    length = LONG + drawn(engine)
    engine.sleep(weights="keep")
    engine.reschedule(SPARSE, WIDE)
    engine.wake()
    done = run(engine, outputs=before)[number, 0]
    assert done.swaps == 1
    assert_same_bits(done, from_the_start(model, at_length(length, 48, 80)))


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


def test_a_restart_is_under_the_new_schedule_alone(model) -> None:
    own = tiny()
    engine = engine_of(own)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    steps(engine, 6)
    engine.reschedule(number, WIDE)
    steps(engine, 6)
    engine.update(changed(own), version=1, in_flight="restart")
    done = run(engine)[number, 0]
    assert done.restarts == 1
    assert done.attention == WIDE.describe()
    np.testing.assert_array_equal(done.kept, from_the_start(model, WIDE).kept)


def test_one_that_is_aborted_tells_too(model) -> None:
    engine = engine_of(model)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    steps(engine, 6)
    engine.reschedule(number, WIDE)
    engine.abort(number)
    (output,) = engine.step()
    assert output.completion.attention == SPARSE.describe()  # no token was drawn under the other
    assert engine.idle


def test_a_once_sparse_answer_is_never_shared(model) -> None:
    def computed_of(schedule: Schedule | None) -> int:
        """Prompt tokens to compute for a prompt that goes on from an answer that ended dense."""
        engine = engine_of(model, reuse="all")
        number = engine.add(prompt(LONG), params(max_tokens=200), schedule=schedule)
        before = steps(engine, 50)
        engine.reschedule(number, None)
        done = run(engine, outputs=before)[number, 0]
        passes = count_prefill(engine)
        engine.generate([[*prompt(LONG), *done.token_ids.tolist(), 1, 2]], params(max_tokens=1))
        return tokens_of(passes)

    assert computed_of(None) < 302 - 128  # the answer's pages too
    assert computed_of(SPARSE) == 302  # its prompt has no whole chunk of 128


def test_kept_is_not_counted_under_a_mass(model) -> None:
    flow = replace(library.quest, name="mass", mass=0.9)
    schedule = Schedule.fixed(48, flow="mass")
    engine = engine_of(model, rule=Rule(flow=flow))
    number = engine.add(prompt(LONG), params(), schedule=schedule)
    before = steps(engine, 6)
    engine.reschedule(number, None)
    done = run(engine, outputs=before)[number, 0]
    assert done.kept is None
    assert done.attention.endswith(": dense")


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (Schedule.fixed(96, page=32), r"page 32 \(the engine runs 16\)"),
        (Schedule.fixed(48, dense_layers=()), "dense_layers"),
        (Schedule.fixed(48, family="llama"), r"family 'llama' \(the engine runs 'qwen3'\)"),
        ("wide", "give a Schedule"),
    ],
)
def test_a_schedule_of_another_place_is_refused(model, new, message) -> None:
    engine = engine_of(model)
    number = engine.add(prompt(LONG), params(), schedule=SPARSE)
    before = steps(engine, 4)
    for which in (number, SPARSE):
        with pytest.raises(ValueError, match=message):
            engine.reschedule(which, new)
    assert_same_bits(run(engine, outputs=before)[number, 0], from_the_start(model, SPARSE))


def test_who_is_meant_must_be_said(model) -> None:
    engine = engine_of(model)
    with pytest.raises(ValueError, match="got None, allowed: a request's number, a Schedule"):
        engine.reschedule(None, SPARSE)
    assert engine.reschedule(7, SPARSE) == []
    assert engine.reschedule(SPARSE, WIDE) == []
    dense_only = engine_of(model, rule=None)
    number = dense_only.add([1], params(max_tokens=2))
    with pytest.raises(ValueError, match="dense only"):
        dense_only.reschedule(number, SPARSE)
    assert dense_only.reschedule(number, None) == [number]
    assert run(dense_only)[number, 0].attention == "dense"


def test_in_an_asynchronous_engine(model) -> None:
    async def play() -> Completion:
        async with AsyncEngine(engine_of(model)) as rollouts:
            seen, done = 0, None
            async for output in rollouts.stream(prompt(LONG), params(), schedule=SPARSE):
                seen += len(output.tokens)
                if seen == 3:
                    await rollouts.run(lambda engine: engine.reschedule(SPARSE, WIDE))
                done = output.completion
            assert done is not None
            return done

    done = asyncio.run(play())
    assert len(done.token_ids) == 24
    assert SPARSE.describe() in done.attention
