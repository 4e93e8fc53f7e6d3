"""Admission, batches and data algorithms: the bound of staleness holds in any order of events."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.dataflow.asynchronous.dispatch import DispatchedBatch, Dispatcher
from sparrow.dataflow.asynchronous.prompt_ledger import Lease, PromptLedger
from sparrow.dataflow.asynchronous.selection import (
    PROMPTS,
    DropSolved,
    Greso,
    fifo,
    make_data_algorithms,
)
from sparrow.functions import register
from sparrow.schema.simulation import DispatchConfig
from sparrow.training.objectives.advantages import informative

MIXED = (0.0, 1.0)


def dispatcher(**settings: Any) -> Dispatcher[int]:
    return Dispatcher(ledger=PromptLedger(), **{"batch": 4, **settings})


def start_all(own: Dispatcher[int], worker: str = "w") -> list[Lease]:
    started = []
    while (lease := own.next(worker)) is not None:
        started.append(lease)
    return started


def finish(own: Dispatcher[int], lease: Lease, rewards: tuple[float, ...] = MIXED) -> None:
    own.finish(lease, rewards, lease.version, lease.position)


def test_without_staleness_it_is_the_synchronous_loop() -> None:
    own = dispatcher()
    for step in range(3):
        started = start_all(own)
        assert [lease.position for lease in started] == list(range(4 * step, 4 * step + 4))
        random.Random(step).shuffle(started)
        for lease in started:
            assert own.take() is None
            finish(own, lease)
        batch = own.take()
        assert batch is not None
        assert (batch.step, batch.groups) == (step, list(range(4 * step, 4 * step + 4)))
        assert start_all(own) == []  # while it learns nothing starts
        own.advance()
    assert not own.dropped


def test_dropped_groups_are_replaced_in_order() -> None:
    own = dispatcher(keeps=informative)
    first = start_all(own)
    for lease in first:
        finish(own, lease, MIXED if lease.position % 2 else (1.0, 1.0))
    assert [lease.position for lease in start_all(own)] == [4, 5]


@given(
    st.integers(0, 4),
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["start", "end", "learn", "arrive", "lose"]), st.integers(0, 99))
    ),
    st.booleans(),
)
def test_no_token_is_too_old_and_nothing_is_thrown_away(
    staleness: int, batch: int, events: list[tuple[str, int]], by_arrival: bool
) -> None:
    order = {"order": fifo} if by_arrival else {}
    own = dispatcher(batch=batch, staleness=staleness, attempts=10**6, **order)
    started, used = dict[int, Lease](), set[int]()

    def check(taken: DispatchedBatch[int] | None) -> None:
        for answered in () if taken is None else taken.fresh:
            assert taken is not None
            assert 0 <= taken.step - answered.oldest <= staleness
            assert answered.group not in used
            used.add(answered.group)

    for event, number in events:
        if event == "start" and (lease := own.next(str(number % 3))) is not None:
            started[lease.number] = lease
        elif event == "end" and started:
            finish(own, started.pop(sorted(started)[number % len(started)]))
        elif event == "learn":
            check(own.take())
        elif event == "arrive" and own.version < own.step:
            own.advance()
        elif event == "lose":
            for lease in own.lose(str(number % 3)):
                del started[lease.number]
    if not by_arrival:
        assert not own.dropped
    audit = own.ledger.audit(steps=own.step)
    assert not audit.problems
    assert (audit.used, audit.dropped) == (len(used), sum(own.dropped.values()))


def test_due_groups_are_waited_for_or_aborted() -> None:
    for late in ("wait", "abort"):
        own = dispatcher(batch=2, staleness=1, late=late)
        slow, *others = start_all(own)
        assert len(others) == 3
        for lease in others:
            finish(own, lease)
        assert own.take() is not None  # step 0 needs two of them, and the slow one is not due yet
        own.advance()
        for lease in start_all(own):
            finish(own, lease)
        batch = own.take()
        if late == "wait":
            assert batch is None
            finish(own, slow)
            batch = own.take()
            assert batch is not None
            assert slow.position in batch.groups
        else:
            assert batch is not None
            assert own.dropped == {"straggler": 1}
            finish(own, slow)  # comes too late, and is ignored
        assert not own.ledger.audit(steps=own.step).problems


def test_replay_obeys_the_staleness_and_is_recorded() -> None:
    own = dispatcher(batch=4, staleness=1, replay=0.5)
    seen = []
    for _ in range(4):
        for lease in start_all(own):
            finish(own, lease)
        batch = own.take()
        assert batch is not None
        assert all(batch.step - one.oldest <= 1 for one in batch.replayed)
        seen.append((len(batch.fresh), len(batch.replayed)))
        own.advance()
    assert seen[0] == (2, 0)
    assert (2, 2) in seen
    assert not own.ledger.audit(steps=4).problems


def test_a_prompt_that_fails_again_and_again_is_dropped() -> None:
    own = dispatcher(batch=1, attempts=2)
    for _ in range(2):
        lease = own.next("w")
        assert lease is not None
        assert lease.position == 0
        own.fail(lease, "the judge crashed")
    replaced = own.next("w")
    assert replaced is not None
    assert replaced.position == 1
    assert own.dropped == {"failed too often": 1}


def test_solved_rows_are_left_out_and_may_come_back() -> None:
    chosen = DropSolved(threshold=0.9)
    chosen.observe("7", (1.0, 1.0))
    assert not chosen.admits("7", 0.0)
    assert chosen.admits("8", 0.0)
    chosen.observe("7", (0.0, 0.0))
    assert chosen.admits("7", 0.0)


def test_greso_skips_rows_by_their_streak() -> None:
    chosen = Greso()
    assert chosen.admits("1", 0.999)
    for _ in range(3):
        chosen.observe("1", (0.0, 0.0))
    assert chosen.admits("1", 0.0)
    assert not chosen.admits("1", chosen.keep["hard"] ** 3)
    chosen.observe("1", MIXED)
    assert chosen.admits("1", 0.999)
    easy = Greso(window=2)
    for _ in range(200):
        easy.observe("2", (1.0, 1.0))
    assert easy.keep["easy"] == easy.least  # more visits than the target come out equal
    assert easy.keep["hard"] == easy.most
    assert easy.admits("2", 0.049)  # now and then
    easy.observe("2", (1.0, 1.0))
    assert easy.keep["hard"] == easy.most  # in the middle of a window


@pytest.mark.parametrize("name", PROMPTS)
def test_filters_are_restored_from_their_state(name: str) -> None:
    first, second = PROMPTS[name](), PROMPTS[name]()
    for row, rewards in [(1, (1.0, 1.0)), (2, (0.0, 0.0)), (2, (0.0, 0.0)), (3, MIXED)]:
        first.observe(row, rewards)
    second.restore(first.state())
    assert second.state() == first.state()
    draws = [(row, draw / 20) for row in range(5) for draw in range(20)]
    assert [first.admits(*one) for one in draws] == [second.admits(*one) for one in draws]


def least(rewards: list[float], *, reward: float) -> bool:
    return max(rewards) >= reward


def test_settings_are_checked_and_functions_can_be_passed() -> None:
    own = register(least, "dispatch.group_filter")
    made = make_data_algorithms(
        DispatchConfig(
            prompt_filter="drop_solved",
            prompt_settings={"threshold": 0.5},
            group_filter=own,
            group_settings={"reward": 0.25},
            order="fifo",
        )
    )
    made.prompts.observe("row", [1.0, 0.5])
    assert not made.prompts.admits("row", 0.0)
    assert made.keeps([0.0, 0.25])
    assert not made.keeps([0.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompt_filter": "grso"}, "allowed: all, drop_solved, greso"),
        ({"prompt_filter": "greso", "prompt_settings": {"stp": 0.1}}, "its settings: easy_target"),
        ({"prompt_filter": "greso", "prompt_settings": {"step": 2.0}}, "step"),
        ({"prompt_filter": "greso", "prompt_settings": {"streaks": 1}}, "its settings"),
        ({"group_filter": "all", "group_settings": {"reward": 1.0}}, "its settings: none"),
        ({"prompt_filter": "greso", "prompt_settings": {"least": 0.9, "most": 0.1}}, "at most"),
        ({"order": "os:getcwd"}, "tried on a small example"),
        ({"prompt_filter": "os:getcwd"}, "expected admits, observe, state and restore"),
    ],
)
def test_bad_data_algorithms_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_data_algorithms(DispatchConfig.model_validate(settings))


def test_a_filter_that_leaves_out_everything_is_an_error() -> None:
    class Nothing(DropSolved):
        def admits(self, _row: str, _draw: float) -> bool:
            return False

    with pytest.raises(ValueError, match="prompt filter"):
        dispatcher(prompts=Nothing()).next("w")


def test_filtered_groups_do_not_let_everything_start() -> None:
    own = dispatcher(staleness=1, keeps=informative)
    for _ in range(100):
        lease = own.next("w")
        assert lease is not None
        own.finish(lease, (0.0, 0.0), 0, 0)
    assert len(start_all(own)) == 2 * own.batch * own.refills


def test_weights_cannot_be_newer_than_the_batches_that_made_them() -> None:
    with pytest.raises(ValueError, match="not taken"):
        dispatcher().advance()
    with pytest.raises(ValueError, match="staleness"):
        dispatcher(staleness=-1)
