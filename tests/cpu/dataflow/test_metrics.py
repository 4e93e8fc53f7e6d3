"""A step in numbers: the tail of its own tokens, by hand and in a run; held-out accuracy."""

import numpy as np
import pytest
from support.samples import sample

from sparrow.dataflow.local.learner import draw_samples
from sparrow.dataflow.local.metrics import _tail_of_step, validation_metrics
from sparrow.schema.evaluation import (
    Estimate,
    Evaluation,
    EvaluationCell,
    outcome,
    outcome_shares,
)
from sparrow.schema.gate import AcceptanceReading, BinCheck, Figures, GateCheck

NONE = dict.fromkeys(("p01", "p05", "low", "high", "p50", "mean", "estimate"))


def look(*starts: int) -> GateCheck:
    """Bins from these lengths on, the last one open."""
    figures = {"tokens": 0, "prompts": 0, "estimated": 0, **NONE}
    bins = [
        BinCheck(start=start, stop=stop, budget=None, state="unjudged", **figures)
        for start, stop in zip(starts, (*starts[1:], None), strict=True)
    ]
    overall = Figures(**figures)
    return GateCheck(step=0, target=0.86, bins=bins, overall=overall, budget=None, actions=())


def reading(
    start: int, alpha: list[float], entropy: list[float] | None = None
) -> AcceptanceReading:
    lengths = start + np.arange(len(alpha))
    return AcceptanceReading(prompt="a", lengths=lengths, alpha=alpha, entropy=entropy)


def test_by_hand() -> None:
    """0.00 to 1.00, of which 0.80 to 1.00 were choices: a fifth of the way into those is 0.81.

    The first 20 were sure: hard misses.
    """
    entropy = [0.09] * 20 + [0.1] * 60 + [0.11] * 21
    found = _tail_of_step([reading(0, [i / 100 for i in range(101)], entropy)], look(0))
    assert found == pytest.approx(
        {
            "sparse/step/p05": 0.05,
            "sparse/step/p0_1": 0.001,
            "sparse/step/hard_misses": 20_000 / 101,
            "sparse/step/uncertain": 21 / 101,
            "sparse/step/p05_uncertain": 0.81,
            "sparse/step/p05/bin_0": 0.05,
            "sparse/step/survivors/bin_0": 1.0,
        }
    )


def test_bins_are_those_of_the_look_and_need_a_hundred_tokens() -> None:
    """0.5 at 0 to 49 (twice), ones at 50 to 148 (99 tokens), 0.25 from 200 on; no entropies.

    Of four answers two reach 50, one 200.
    """
    parts = [(0, [0.5] * 50), (0, [0.5] * 50), (50, [1.0] * 99), (200, [0.25] * 100)]
    found = _tail_of_step([reading(*part) for part in parts], look(0, 50, 200))
    survivors = {f"sparse/step/survivors/bin_{n}": share for n, share in ((0, 1), (50, 0.5))}
    survivors["sparse/step/survivors/bin_200"] = 0.25
    names = ("p05", "p0_1", "p05/bin_0", "p05/bin_200")
    assert found.keys() == {f"sparse/step/{name}" for name in names} | survivors.keys()
    assert found.items() >= survivors.items()
    assert (found["sparse/step/p05/bin_0"], found["sparse/step/p05/bin_200"]) == (0.5, 0.25)
    sure = _tail_of_step([reading(0, [0.9] * 10, [0.0] * 10)], look(0))
    figures = {"p05": 0.9, "p0_1": 0.9, "hard_misses": 0.0, "uncertain": 0.0}
    figures["survivors/bin_0"] = 1.0
    assert sure == pytest.approx({f"sparse/step/{name}": value for name, value in figures.items()})
    assert _tail_of_step([], look(0)) == _tail_of_step([reading(0, [], [])], look(0)) == {}


def test_outcomes_are_three_and_add_up_to_one() -> None:
    """A right answer at the limit is right; part of the accuracy is not right."""
    answers = [(1.0, False), (1.0, True), (0.5, True), (0.9, False), (0.0, False)]
    found = outcome_shares([outcome(*answer) for answer in answers])
    assert found == {"right": 0.4, "cut_off": 0.2, "wrong": 0.4}
    assert outcome_shares([]) == {}


def test_samples_drawn_for_the_kl_weigh_as_all_of_them() -> None:
    """The mean over tokens is kept on average; samples without an advantage are drawn less."""
    samples = [
        sample(10 + 3 * n, 4, advantage=advantage, seed=n)
        for n, advantage in enumerate([0.0, 2.0, -1.0, 0.0, 0.5, 0.0, -2.0, 1.0])
    ]
    tokens, values = np.array([one.learnt for one in samples]), np.arange(8) ** 2
    every = draw_samples(samples, 8, np.random.default_rng(0))
    assert every == dict.fromkeys(range(8), pytest.approx(1 / tokens.sum()))
    draws = [draw_samples(samples, 3, np.random.default_rng(seed)) for seed in range(3000)]
    assert all(1 <= len(drawn) <= 3 for drawn in draws)
    means = [sum(w * tokens[n] * values[n] for n, w in drawn.items()) for drawn in draws]
    wanted = (tokens * values).sum() / tokens.sum()
    assert np.mean(means) == pytest.approx(wanted, rel=0.03)
    often = np.bincount([n for drawn in draws for n in drawn], minlength=8) / tokens
    assert often[6] > 3 * often[5]
    flat = [one.replace(advantage=0.0) for one in samples]  # no update: any will do
    assert len(draw_samples(flat, 3, np.random.default_rng(0))) <= 3


def test_held_out_accuracy() -> None:
    mean = Estimate(value=0.75, low=0.5, high=0.875)
    lengths = {"tokens": 35.0, "median": 3.0, "entropy": None, "cut_off": 0.25}
    about = {"source": "b", "length": None, "rows": 2, "samples": 1, "mean": mean}
    cell = EvaluationCell(**about, **lengths, passes=(), reasons=(), skipped=())
    settings = {"model": "m", "attention": "dense", "temperature": 1.0, "samples": 4, "seed": 0}
    shares = {"right": 0.5, "cut_off": 0.25, "wrong": 0.25}
    new = Evaluation(**settings, left_out=(), cells=(cell.replace(**shares),))
    assert (
        validation_metrics(new).items() >= {f"val-core/b/{k}": v for k, v in shares.items()}.items()
    )
    assert validation_metrics(Evaluation(**settings, left_out=(), cells=(cell,))) == {
        "val-core/b/cut_off": 0.25,
        "val-core/b/acc/mean@4": 0.75,
        "val-core/b/acc/low": 0.5,
        "val-core/b/acc/high": 0.875,
        "val-aux/b/length/mean": 35.0,
        "val-aux/b/length/median": 3.0,
        "val-aux/b/cut_off": 0.25,
    }
