"""A gate that was put away goes on as if nothing had happened; figures and metrics of looks."""

import json

import numpy as np
import pytest

pytest.importorskip("pydantic")

from sparrow.gate import Gate
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.gate import Look, metrics
from sparrow.schema.gate import RatioEstimate as Estimate
from sparrow.schema.schedule import DENSE, Schedule
from sparrow.schema.train import GateConfig
from sparrow.stats import quantile_interval
from tests.support.tails import lived, reading

CONFIG = GateConfig(window=3, least=100, prompts=4, lower=True)
STEPS = Schedule(name="steps", lengths=[0, 128, 256], budgets=[64, 96, 128])


def falling(budgets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Slack first, then a tail that only a large budget holds; no dense rollout does."""
    held = (budgets >= 400) & (budgets < DENSE)
    return np.where(lengths < 256, 0.96, np.where(held, 0.9, 0.8))


@pytest.mark.parametrize("schedule", [STEPS, None])
@pytest.mark.parametrize("cut", [1, 3])
def test_restored_gates_see_and_do_the_same(schedule: Schedule | None, cut: int) -> None:
    config = GateConfig(**(CONFIG.model_dump() | {"mode": "act" if schedule else "warn"}))
    whole = Gate(config, schedule, longest=512)
    looks = lived(whole, range(5), falling)
    first = Gate(config, schedule, longest=512)
    begun = lived(first, range(cut), falling)
    text = json.dumps(first.state(), allow_nan=False)
    second = Gate.restore(config, json.loads(text))
    assert second.state() == first.state()
    assert [*begun, *lived(second, range(cut, 5), falling)] == looks
    assert second.state() == whole.state()
    assert second.schedule == whole.schedule
    assert any(look.actions for look in looks)


def test_other_bins_are_refused() -> None:
    state = Gate(CONFIG, None, longest=512).state()
    other = GateConfig(**(CONFIG.model_dump() | {"bin": 100}))
    with pytest.raises(ValueError, match=r"gate\.bin"):
        Gate.restore(other, state)


def test_figures_are_those_of_the_tokens() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    rng = np.random.default_rng(0)
    alphas = [rng.random(60).astype(np.float32) for _ in range(6)]
    gate.observe(0, [reading(f"p{i % 5}", 300, alpha) for i, alpha in enumerate(alphas[:3])])
    look = gate.observe(1, [reading(f"p{i % 5}", 300, a) for i, a in enumerate(alphas) if i > 2])
    found, every = look.bins[2], np.concatenate(alphas)
    assert (found.tokens, found.prompts) == (360, 5)  # the sixth is of the first's prompt
    assert found.p05 == float(np.quantile(every, 0.05))
    assert found.p01 == pytest.approx(np.quantile(every, 0.01))
    assert found.p50 == pytest.approx(np.quantile(every, 0.5))
    assert found.mean == pytest.approx(every.mean())
    groups = [np.concatenate([alphas[0], alphas[5]]), *alphas[1:5]]
    assert found.low == pytest.approx(quantile_interval(groups).low, abs=0.02)
    assert look.overall.p05 == found.p05


def test_estimates_are_averaged_over_all_tokens_of_the_window() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    gate.observe(0, [], [Estimate(lengths=[10, 130, 300], ratio=[1.0, 0.5, 0.25])])
    ratios = [Estimate(lengths=[300], ratio=[0.75]), Estimate(lengths=[301], ratio=[0.5])]
    look = gate.observe(1, [], ratios)
    assert [each.estimate for each in look.bins] == [1.0, 0.5, 0.5]
    assert [each.estimated for each in look.bins] == [1, 1, 3]
    assert look.overall.estimate == 0.6
    assert look.budget == 128.0
    assert metrics(look) == {"sparse/accept_estimate": 0.6, "sparse/kv_budget": 128.0}
    assert gate.observe(9, []).overall.estimate is None


def test_mean_budget_is_at_most_the_length() -> None:
    schedule = Schedule(name="s", lengths=[0, 128, 256], budgets=[64, 96, DENSE])
    lengths = [Estimate(lengths=[10, 130, 300], ratio=[1.0] * 3)]
    assert Gate(CONFIG, schedule, longest=512).observe(0, [], lengths).budget == 406 / 3
    assert Gate(CONFIG, None, longest=512).observe(0, [], lengths).budget == 440 / 3
    read = [reading("a", 10, np.ones(1))]
    assert Gate(CONFIG, schedule, longest=512).observe(0, read).budget == 10


def test_metrics() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    looks = lived(gate, range(1), falling, start=100)
    named = metrics(looks[0])
    first, second, third = looks[0].bins
    assert named["sparse/gate_violation_frac"] == 1 / 3
    assert named["sparse/accept_p05/bin_0"] == first.p05
    assert named["sparse/accept_p05/bin_128"] == second.p05
    assert named["sparse/accept_p05/bin_256"] == third.p05 < 0.86
    assert named["sparse/accept_p05_low"] <= named["sparse/accept_p05"]
    assert named["sparse/accept_p05"] <= named["sparse/accept_p05_high"]
    assert named["sparse/accept_p01"] < named["sparse/accept_p05"] < named["sparse/accept_mean"]
    assert named["sparse/accept_estimate"] == pytest.approx(named["sparse/accept_mean"])
    assert 64 < named["sparse/kv_budget"] < 128
    assert all(isinstance(value, float) for value in named.values())
    assert looks[0].actions
    assert from_dict(Look, json.loads(json.dumps(to_dict(looks[0])))) == looks[0]
    assert metrics(Gate(CONFIG, STEPS, longest=512).observe(0, [])) == {}
