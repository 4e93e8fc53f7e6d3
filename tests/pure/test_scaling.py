"""Advice on the number of rollout workers, from shares of idle time."""

from sparrow.dataflow.asynchronous.rollout import scaling_advice


def test_a_learner_that_waits_wants_more_and_idle_workers_are_too_many() -> None:
    advice = {
        (0.0, 0.5, 1): "more rollout workers",
        (0.0, 0.11, 4): "more rollout workers",
        (0.0, 0.07, 4): None,
        (0.6, 0.01, 2): "fewer rollout workers",
        (0.4, 0.01, 2): None,  # one of two would have to do more than it can
        (0.9, 0.0, 1): None,
    }
    for (rollout, learner, workers), expected in advice.items():
        found = scaling_advice(rollout, learner, workers=workers)
        assert (None if found is None else found[0]) == expected
