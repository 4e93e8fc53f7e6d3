"""The simulator: figures by hand, and what failures do."""

from typing import Any

import pytest

from sparrow.dataflow.asynchronous.simulation import simulate
from sparrow.schema.simulation import SimulateConfig, SimulatedRun

EQUAL = {"spread": 0.0, "tokens": 1000, "token_ms": 10.0, "learn_seconds": 5.0, "sync_seconds": 1.0}


def simulated(**settings: Any) -> list[SimulatedRun]:
    base: dict[str, Any] = {"hours": 1, "workers": 2, "slots": 4, "batch": 4, "samples": 2}
    return list(simulate(SimulateConfig(**base | EQUAL | settings)).rows)


def test_synchronous_steps_by_hand() -> None:
    """10 s of answers, 5 s of learning, 1 s of weights; half of the slots have nothing to do."""
    (run,) = simulated(staleness=(0,))
    assert run.steps == pytest.approx(3600 / 16, abs=1)
    assert run.seconds_per_step == pytest.approx(16, rel=0.01)
    assert run.learner_idle == pytest.approx(11 / 16, abs=0.01)
    assert run.rollout_idle == pytest.approx(1 - 0.5 * 10 / 16, abs=0.01)
    assert (run.token_staleness, run.oldest, run.wasted, run.dropped, run.again) == (0, 0, 0, {}, 0)


def test_staleness_hides_one_side_behind_the_other() -> None:
    sync, one, many = simulated(staleness=(0, 1, 8))
    assert one.speed_up == pytest.approx(sync.seconds_per_step / one.seconds_per_step)
    assert many.seconds_per_step == pytest.approx(5, rel=0.05)  # the learner is never idle
    assert many.learner_idle < 0.05
    assert 0 < one.token_staleness <= 1 < many.token_staleness <= 8
    assert many.wasted == 0


def test_few_workers_are_the_limit_and_the_advice_says_so() -> None:
    result = simulate(
        SimulateConfig(**EQUAL, hours=1, workers=1, slots=2, batch=4, samples=1, staleness=(0, 4))
    )
    assert result.rows[1].seconds_per_step == pytest.approx(20, rel=0.05)  # two rounds of 10 s
    assert "about 4 workers" in result.advice[-1]


def test_workers_that_fail_cost_time_and_no_prompt() -> None:
    whole, failing, fewer = (
        simulated(staleness=(2,), hours=4, workers=6, slots=2, batch=12, seed=3, **own)[0]
        for own in ({}, {"failure_hours": 0.2, "repair_seconds": 120}, {"lose": 0.34})
    )
    assert failing.again > 20
    assert failing.seconds_per_step > whole.seconds_per_step
    assert fewer.seconds_per_step == pytest.approx(1.5 * whole.seconds_per_step, rel=0.1)
    assert failing.wasted > 0
    assert not set(failing.dropped) - {"failed too often"}


def test_data_algorithms_cost_rollouts() -> None:
    settings = {"staleness": (2,), "spread": 0.5, "samples": 4, "rows": 50, "solved": 0.7}
    every, informative, solved, greso = (
        simulated(**settings, **own)[0]
        for own in (
            {},
            {"group_filter": "informative"},
            {"group_filter": "informative", "prompt_filter": "drop_solved"},
            {"group_filter": "informative", "prompt_filter": "greso"},
        )
    )
    assert every.wasted == 0
    assert informative.dropped["uninformative"] > 0
    for better in (solved, greso):
        assert better.wasted < informative.wasted
        assert better.dropped["prompt filter"] > 0


def test_samples_under_way_are_kept_recomputed_or_started_again() -> None:
    settings = {"staleness": (4,), "spread": 0.5, "recompute_seconds": 3.0}
    keep, recompute, restart = (
        simulated(**settings, in_flight=way)[0] for way in ("keep", "recompute", "restart")
    )
    assert keep.steps > recompute.steps
    assert keep.wasted == 0
    assert restart.wasted > 0.2
    assert restart.token_staleness < keep.token_staleness


def test_stragglers_can_be_aborted() -> None:
    settings = {"staleness": (0,), "spread": 1.0, "workers": 4, "samples": 1}
    (wait,) = simulated(**settings)
    (abort,) = simulated(**settings, late="abort", oversample=2.0)
    assert abort.seconds_per_step < wait.seconds_per_step
    assert abort.dropped["straggler"] > 0
    assert abort.wasted > 0


def test_the_same_seed_gives_the_same_figures() -> None:
    settings = {"staleness": (1,), "spread": 0.5, "failure_hours": 0.5, "seed": 5}
    assert simulated(**settings) == simulated(**settings)


def test_without_a_step_it_says_what_happened() -> None:
    for own, what in (
        ({"hours": 0.001}, "more hours"),
        ({"group_filter": "informative", "samples": 1}, "uninformative"),
        ({"failure_hours": 1e-4}, "dispatched again"),
    ):
        result = simulate(SimulateConfig(**EQUAL, workers=2, batch=4, **{"hours": 1.0} | own))
        assert {(run.steps, run.seconds_per_step, run.speed_up) for run in result.rows} == {
            (0, None, None)
        }
        (advice,) = result.advice
        assert what in advice
