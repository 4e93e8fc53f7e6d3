"""The tail gate in worlds where the tail follows from budget and length: policy, figures, state."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from sparrow.gate import Gate
from sparrow.schema.base import from_dict, to_dict
from sparrow.schema.gate import AcceptanceReading, Action, GateCheck, metrics
from sparrow.schema.gate import RatioEstimate as Estimate
from sparrow.schema.schedule import DENSE, LayerBudgets, Schedule
from sparrow.schema.train import GateConfig
from sparrow.stats import quantile_interval, rate_interval

Level = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (budgets, lengths) -> p05

CONFIG = GateConfig(target=0.86, window=4, least=100, prompts=4, patience=3, raises=3, factor=1.5)
FIXED = Schedule.fixed(64, provenance=())
STEPS = Schedule(name="steps", lengths=[0, 128, 256], budgets=[64, 96, 128], family="qwen3")


def reading(prompt: str, start: int, alpha: np.ndarray) -> AcceptanceReading:
    """Tokens drawn at start, start + 1, ..."""
    return AcceptanceReading(prompt=prompt, lengths=start + np.arange(len(alpha)), alpha=alpha)


def lived(
    gate: Gate, steps: range, level: Level, *, start: int = 40, stop: int = 512, n: int = 8
) -> list[GateCheck]:
    """The looks of so many steps; the first stop ends them, as it ends training.

    Of the tokens of each of n prompts 90 % are 1, the others within 0.05 of the level's p05.
    """
    looks: list[GateCheck] = []
    lengths = np.arange(start, stop)
    for step in steps:
        rng, budgets = np.random.default_rng([step, n]), np.full(len(lengths), DENSE)
        if gate.schedule is not None:
            starts = gate.schedule.lengths
            budgets = gate.schedule.budgets[np.searchsorted(starts, lengths, side="right") - 1]
        p05, readings = level(budgets, lengths), []
        for i in range(n):
            bad = rng.random(len(lengths)) < 0.1
            alpha = np.where(bad, p05 + rng.uniform(-0.05, 0.05, len(lengths)), 1.0)
            readings.append(reading(f"{step}/{i}", start, np.clip(alpha, 0, 1)))
        estimates = [Estimate(lengths=each.lengths, ratio=each.alpha) for each in readings]
        looks.append(gate.observe(step, readings, estimates))
        if any(action.kind == "stop" for action in looks[-1].actions):
            break
    return looks


def kinds(looks: list[GateCheck]) -> list[str]:
    return [action.kind for look in looks for action in look.actions]


def config(**changes: object) -> GateConfig:
    return GateConfig(**(CONFIG.model_dump() | changes))


def flat(p05: float) -> Level:
    return lambda budgets, lengths: np.full(len(lengths), p05)


def needs(least: dict[int, int], good: float = 0.93, bad: float = 0.7) -> Level:
    """Good where the budget is at least what the bin's start asks for."""
    starts = sorted(least)

    def level(budgets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        asked = np.array([least[s] for s in starts])
        places = np.searchsorted(starts, lengths, side="right") - 1
        return np.where(budgets >= asked[places], good, bad)

    return level


def actions(looks: list[GateCheck]) -> list[Action]:
    return [action for look in looks for action in look.actions]


def budgets(gate: Gate) -> list[int]:
    return gate.schedule.budgets.tolist()


def test_a_tail_drop_in_one_bin_raises_that_bin() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    assert kinds(lived(gate, range(5), flat(0.93))) == []
    found = actions(lived(gate, range(5, 12), needs({0: 0, 256: 250})))
    assert [(a.kind, a.start, a.stop, a.before, a.after) for a in found] == [
        ("raise", 256, None, 128, 192),
        ("raise", 256, None, 192, 288),
    ]
    assert budgets(gate) == [64, 96, 288]
    assert found[0].low <= found[0].p05 <= found[0].high < found[0].target == 0.86
    # Old, good tokens were still in the window: it took a look or two to see the drop.
    assert 5 <= found[0].step <= 8
    assert f"{found[0].p05:.4f}" in found[0].reason
    assert (gate.schedule.name, gate.schedule.family) == ("steps+gate2", "qwen3")
    (note,) = gate.schedule.provenance  # which says what was done to it
    assert "128 -> 192 tokens; step" in note.text
    gate = Gate(CONFIG, STEPS, longest=512)
    (look,) = lived(gate, range(1), needs({0: 0, 128: 100}))
    assert [action.kind for action in look.actions] == ["raise"]
    assert budgets(gate) == [64, 144, 144]  # later bins are lifted


def done(gate: Gate, level: Level, start: int = 40) -> list[tuple[str, int, int | None]]:
    looks = lived(gate, range(5), level, start=start)
    return [(a.kind, a.start, a.after) for a in actions(looks)]


def test_bins_are_raised_and_made_dense() -> None:
    gate = Gate(CONFIG, FIXED, longest=512)
    raised = [("raise", 448, 96), ("raise", 448, 144), ("raise", 448, 224)]  # 216 in whole pages
    assert done(gate, needs({0: 0, 448: 512}), start=380) == [*raised, ("dense", 448, DENSE)]
    assert budgets(gate) == [64] * 7 + [DENSE]
    # A middle bin runs dense at its stop and lifts later ones; so does a raise that gets there.
    for changes in ({"raises": 0}, {"factor": 4.0}):
        gate = Gate(config(**changes), STEPS, longest=512)
        assert done(gate, needs({0: 0, 128: 256, 256: 0})) == [("dense", 128, 256)]
        assert budgets(gate) == [64, 256, 256]
    # One raise at a time: lifted bins have no tokens under their new budget, so they wait.
    gate = Gate(CONFIG, FIXED, longest=512)
    assert done(gate, needs({0: 0, 128: 96})) == [("raise", 128, 96)]
    assert budgets(gate) == [64, 64] + [96] * 6
    # Under a mass only all is dense.
    gate = Gate(config(factor=8.0), STEPS, longest=512, mass=True)
    raised = [("raise", 128, 768), ("raise", 128, 6144), ("raise", 128, 49152)]
    assert done(gate, needs({0: 0, 128: DENSE, 256: 0})) == [*raised, ("dense", 128, DENSE)]


def test_a_dense_bin_waits_for_earlier_ones() -> None:
    """Its tokens read what earlier ones wrote, so those get their chance before a stop."""
    gate = Gate(CONFIG, Schedule(name="s", lengths=[0, 256], budgets=[64, DENSE]), longest=512)

    def level(budgets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.full(len(lengths), 0.93 if budgets[0] >= 200 else 0.7)

    assert done(gate, level) == [("raise", 0, 96), ("raise", 0, 144), ("raise", 0, 224)]


def test_bins_that_no_token_reaches_do_not_hold_lowering_back() -> None:
    gate = Gate(config(lower=True, patience=5), Schedule.fixed(256), longest=512)
    # Bin 128 is dense: what it reads is 192, and that goes down; later ones may not pass it.
    assert done(gate, flat(0.97), start=130) == [("lower", 128, 128)]
    assert budgets(gate) == [128, 128, 128, 256, 256, 256, 256, 256]


def test_what_even_dense_does_not_help_stops() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    looks = lived(gate, range(100), needs({0: 0, 256: DENSE + 1}))
    assert kinds(looks) == ["raise", "raise", "raise", "dense", "stop"]
    assert looks[-1].bins[-1].state == "dense"
    layers = (LayerBudgets(layer=2, budgets=[64, 64]),)  # dense only if every layer is
    by_layer = Schedule(name="s", lengths=[0, 256], budgets=[64, DENSE], layers=layers)
    again = lived(Gate(CONFIG, by_layer, longest=512), range(30), needs({0: 0, 256: DENSE + 1}))
    assert kinds(again) == kinds(looks)
    stop = looks[-1].actions[0]
    assert stop.before == stop.after == DENSE
    assert budgets(gate) == [64, 96, DENSE]


def test_a_dense_rollout_has_no_budget_to_raise() -> None:
    gate = Gate(CONFIG, None, longest=512)
    looks = lived(gate, range(3), flat(0.9))
    assert kinds(looks) == []
    assert [(each.start, each.state) for each in looks[-1].bins] == [
        (start, "dense") for start in range(0, 512, 64)
    ]
    (look,) = lived(gate, range(20, 21), flat(0.6))
    assert {(action.kind, action.before) for action in look.actions} == {("stop", None)}
    assert gate.schedule is None


def observed(gate: Gate, step: int, p05: float) -> GateCheck:
    """Prompts that differ so much that nothing is sure."""
    ends = np.linspace(-0.12, 0.12, 8)
    tokens = [np.where(np.arange(100) < 10, p05 + end, 1.0) for end in ends]
    found = [reading(f"{step}/{i}", 300, alpha) for i, alpha in enumerate(tokens)]
    return gate.observe(step, found)


def test_not_surely_below_takes_patience() -> None:
    gate = Gate(config(window=1), STEPS, longest=512)
    looks = [observed(gate, step, p05) for step, p05 in enumerate([0.84, 0.84, 0.875, 0.84, 0.84])]
    assert kinds(looks) == []
    assert looks[0].bins[2].p05 < 0.86 < looks[0].bins[2].high
    nothing = gate.observe(5, [])  # a look without tokens of the bin neither counts nor resets
    assert nothing.actions == ()
    (action,) = observed(gate, 6, 0.84).actions
    assert (action.kind, action.start) == ("raise", 256)
    assert "3 checks" in action.reason
    # The same tokens are not counted twice.
    gate = Gate(config(window=100, patience=2), STEPS, longest=512)
    looks = [observed(gate, 0, 0.84), *(gate.observe(step, []) for step in range(1, 10))]
    assert kinds(looks) == []
    assert all(look.bins[2].judged for look in looks)


def test_warn_changes_nothing_and_says_it_once_a_window() -> None:
    gate = Gate(config(mode="warn"), STEPS, longest=512)
    before = gate.schedule
    looks = lived(gate, range(12), needs({0: 0, 256: 999}))
    assert [(a.step, a.kind) for a in actions(looks)] == [(n, "warn") for n in (0, 4, 8)]
    assert gate.schedule == before
    assert looks[0].actions[0].before == looks[0].actions[0].after == 128
    # Off concludes nothing, and slack is not used unless asked for.
    for changes, p05 in (({"mode": "off"}, 0.5), ({}, 0.97)):
        gate = Gate(config(**changes), STEPS, longest=512)
        assert kinds(lived(gate, range(5), flat(p05))) == []
        assert gate.schedule == STEPS


def test_noise_above_the_target_is_left_alone() -> None:
    for schedule, p05 in ((FIXED, 0.875), (STEPS, 0.866), (None, 0.875)):
        gate = Gate(config(least=400), schedule, longest=512)
        looks = lived(gate, range(7), flat(p05), n=12, start=256)
        assert kinds(looks) == []
        lows = [each.low for look in looks for each in look.bins if each.low is not None]
        assert min(lows) < 0.86  # not sure to be above, and yet no action


def test_few_prompts_or_tokens_are_unjudged() -> None:
    for names, tokens in ((["the same"] * 20, 100), ([f"{i}" for i in range(20)], 4)):
        found = [reading(name, 300, np.full(tokens, 0.1)) for name in names]
        look = Gate(CONFIG, STEPS, longest=512).observe(0, found)
        assert (look.bins[2].tokens, look.bins[2].prompts) == (20 * tokens, len(set(names)))
        assert (look.bins[2].state, look.actions) == ("unjudged", ())
        assert (look.bins[0].tokens, look.bins[0].p05) == (0, None)


def test_the_window_moves_on_and_starts_anew_after_an_action() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    looks = lived(gate, range(6), flat(0.93), start=300, stop=400)
    assert [look.bins[2].tokens for look in looks] == [800, 1600, 2400, 3200, 3200, 3200]
    assert gate.observe(8, []).bins[2].tokens == 800  # of steps 5 to 8
    gate = Gate(CONFIG, STEPS, longest=512)
    lived(gate, range(1), needs({0: 0, 256: 999}))
    look = gate.observe(1, [])  # only the bin that was changed
    assert [each.tokens > 0 for each in look.bins] == [True, True, False]
    assert look.bins[2].budget == 192


def test_lower_where_there_is_slack() -> None:
    gate = Gate(config(lower=True), STEPS, longest=512)
    found = actions(lived(gate, range(11), flat(0.97)))
    assert {action.kind for action in found} == {"lower"}
    assert found[0].step == 2  # patience
    assert budgets(gate) == [48, 48, 48]  # the pages that are always kept
    # Lowered, then raised, it is never lowered again.
    gate = Gate(config(lower=True), STEPS, longest=512)
    looks = lived(gate, range(12), needs({0: 0, 256: 100}, good=0.97), start=256)
    ours = [a for look in looks for a in look.actions if a.start == 256]
    assert [(a.kind, a.before, a.after) for a in ours] == [("lower", 128, 96), ("raise", 96, 144)]
    assert budgets(gate)[2] == 144


def test_budgets_by_layer_move_alike() -> None:
    rows = (2, None, [64, 64, 256]), (2, 1, [48, 48, 64]), (3, None, [64, 1000, DENSE])
    layers = [LayerBudgets(layer=at, head=head, budgets=own) for at, head, own in rows]
    schedule = Schedule(name="s", lengths=[0, 128, 256], budgets=[64, 96, 128], layers=layers)
    gate = Gate(CONFIG, schedule, longest=512)
    lived(gate, range(1), needs({0: 0, 256: 150}))
    assert budgets(gate) == [64, 96, 192]
    own = [each.budgets.tolist() for each in gate.schedule.layers]
    assert own == [[64, 64, 384], [48, 48, 96], [64, 1000, DENSE]]


def test_bad_input() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    with pytest.raises(ValueError, match="length 512"):
        gate.observe(0, [reading("a", 412, np.ones(101))])
    gate.observe(0, [reading("a", 411, np.ones(101))])  # what was refused left no trace
    with pytest.raises(ValueError, match="got 0"):
        gate.observe(0, [])
    with pytest.raises(ValueError, match=r"gate\.bin=4"):
        Gate(config(bin=4), STEPS, longest=512)
    with pytest.raises(ValueError, match="alpha"):
        reading("a", 0, np.array([1.0, 1.5]))


# Hard misses.


def missing(gate: Gate, step: int, *counts: int, sure: bool = True) -> GateCheck:
    """Of 100 tokens from length 300 on of each prompt so many are 0; the policy was sure or not."""
    readings = []
    for i, count in enumerate(counts):
        alpha = np.where(np.arange(100) < count, 0.0, 1.0)
        entropy = np.full(100, 0.05 if sure else 0.5)
        about = {"prompt": f"{step}/{i}", "lengths": 300 + np.arange(100)}
        readings.append(AcceptanceReading(**about, alpha=alpha, entropy=entropy))
    return gate.observe(step, readings)


def test_hard_misses_are_a_second_bound() -> None:
    """3 of 100 tokens: p05 is 1, and of 1000 tokens 30 are missed."""
    look = missing(Gate(CONFIG, STEPS, longest=512), 0, *[3] * 8)
    found = look.bins[2]
    assert (found.p05, found.p0_1.value, found.hard_misses.value) == (1.0, 0.0, 30.0)
    wanted = rate_interval([np.arange(100) < 3] * 8)
    assert (found.hard_misses.low, found.hard_misses.high) == (wanted.low, wanted.high)
    assert look.actions == ()
    named = metrics(look)
    assert named["sparse/hard_misses"] == named["sparse/hard_misses_max"] == 30
    assert named["sparse/hard_misses/bin_256"] == 30
    assert named["sparse/hard_misses_low/bin_256"] == wanted.low
    assert named["sparse/gate_violation_frac"] == named["sparse/accept_p0_1/bin_256"] == 0

    own = config(hard_misses=5.0)
    gate = Gate(own, STEPS, longest=512)
    look = missing(gate, 0, *[3] * 8)
    (action,) = look.actions
    assert (action.kind, action.before, action.after) == ("raise", 128, 192)
    assert action.hard_misses == look.bins[2].hard_misses
    assert "hard misses" in action.reason
    assert "p05" not in action.reason
    assert metrics(look)["sparse/gate_violation_frac"] == 1
    for changes, kind in (({"mode": "warn"}, ["warn"]), ({"mode": "off"}, [])):
        other = Gate(own.replace(**changes), STEPS, longest=512)
        assert kinds([missing(other, 0, *[3] * 8)]) == kind
        assert other.schedule == STEPS
    assert kinds([missing(Gate(own, None, longest=512), 0, *[3] * 8)]) == ["stop"]
    assert missing(Gate(own, STEPS, longest=512), 0, *[3] * 8, sure=False).actions == ()


def test_hard_misses_that_are_not_surely_too_many_take_patience() -> None:
    gate = Gate(config(hard_misses=5.0, window=1), STEPS, longest=512)
    looks = [missing(gate, step, 4, 4, *[0] * 6) for step in range(2)]
    assert looks[0].bins[2].hard_misses.value == 10
    assert looks[0].bins[2].hard_misses.low < 5
    looks += [missing(gate, 2, *[0] * 8)]  # resets
    looks += [missing(gate, step, 4, 4, *[0] * 6) for step in (3, 4, 5)]
    assert [(a.kind, a.step) for a in actions(looks)] == [("raise", 5)]
    assert "3 checks" in actions(looks)[0].reason


def test_budgets_fall_only_where_hard_misses_surely_are_within_the_bound() -> None:
    """Without any in 2400 tokens, up to 3.7 / 2400 are possible: 1.5 per 1000."""
    for bound, lowered in ((1.0, []), (2.0, ["lower"])):
        gate = Gate(config(hard_misses=bound, lower=True), STEPS, longest=512)
        looks = [missing(gate, step, *[0] * 12) for step in range(4)]
        assert kinds(looks) == lowered


def test_hard_misses_need_entropies() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    look = gate.observe(0, [reading(f"{i}", 300, np.ones(100)) for i in range(4)])
    assert look.bins[2].hard_misses is None
    assert "sparse/hard_misses" not in metrics(look)
    bounded = Gate.restore(config(hard_misses=5.0), gate.state())
    with pytest.raises(ValueError, match="entropy"):
        bounded.observe(1, [reading("a", 300, np.ones(100))])
    look = missing(bounded, 1, *[3] * 8)  # the window still has tokens without
    assert (look.bins[2].hard_misses, look.actions) == (None, ())
    assert kinds([missing(bounded, step, *[3] * 8) for step in (4, 5)]) == ["raise", "raise"]


def test_states_of_older_versions_are_restored() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    missing(gate, 0, *[3] * 8)
    state = json.loads(json.dumps(gate.state()))
    assert Gate.restore(CONFIG, state).state() == state
    for window in state["watches"]:
        del window["missing"]
        window["samples"] = [sample[:3] for sample in window["samples"]]
    look = Gate.restore(CONFIG, state).observe(1, [])
    assert (look.bins[2].tokens, look.bins[2].hard_misses) == (800, None)


# Stop rules on the policy.


def ruled(gate: Gate, *figures: tuple[float | None, float | None]) -> list[list[str]]:
    """The actions of steps with this entropy and KL, as metric and kind; through JSON each time."""
    found = []
    for entropy, kl in figures:
        gate = Gate.restore(gate.config, json.loads(json.dumps(gate.state(), allow_nan=False)))
        look = gate.observe(gate.state()["step"] + 1, [])
        look = gate.judge_policy(look, entropy=entropy, kl=kl)
        found.append([f"{a.metric} {a.kind}" for a in look.actions])
    return found


def test_a_kl_above_its_bound_stops() -> None:
    far, near = (None, 0.2), (None, 0.1)
    rule = config(max_kl=0.1, patience=2)
    assert ruled(Gate(rule, None, longest=512), far, near, far, far) == [[], [], [], ["kl stop"]]
    unknown = (None, None)  # a step without an update neither counts nor resets
    assert ruled(Gate(rule, None, longest=512), far, unknown, far)[-1] == ["kl stop"]
    broken = (None, float("nan"))
    assert ruled(Gate(rule, None, longest=512), broken, broken)[-1] == ["kl stop"]
    warns = Gate(rule.replace(mode="warn", window=2), None, longest=512)
    assert ruled(warns, *[far] * 4) == [[], ["kl warn"], [], ["kl warn"]]
    for quiet in (rule.replace(mode="off"), config(patience=2)):
        assert ruled(Gate(quiet, None, longest=512), *[(9.0, 9.0)] * 5) == [[]] * 5


def test_an_entropy_far_from_that_of_the_first_steps_stops() -> None:
    """The mean of the first two is 0.2: between 0.1 and 0.4 nothing is said."""
    rule = config(entropy_factor=2.0, window=2, patience=2)
    first = [(0.1, None), (0.3, None)]
    for beyond in (0.41, 0.09):
        steps = [*first, (0.39, None), (beyond, None), (0.11, None), *[(beyond, None)] * 2]
        assert ruled(Gate(rule, None, longest=512), *steps) == [[]] * 6 + [["entropy stop"]]
    # The first steps count also where the rule is set later; a run of an older version has none.
    gate = Gate(rule.replace(entropy_factor=None), None, longest=512)
    for entropy, _ in first:
        gate.judge_policy(gate.observe(gate.state()["step"] + 1, []), entropy=entropy, kl=None)
    state = gate.state()
    later = ruled(Gate.restore(rule, state), *[(0.5, None)] * 3)
    assert later == [[], ["entropy stop"], ["entropy stop"]]
    older = {key: value for key, value in state.items() if key != "policy"}
    assert ruled(Gate.restore(rule, older), *[(0.5, None)] * 4) == [[]] * 4


# State and figures.


def falling(budgets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Slack first, then a tail that only a large budget holds; no dense rollout does."""
    held = (budgets >= 400) & (budgets < DENSE)
    return np.where(lengths < 256, 0.96, np.where(held, 0.9, 0.8))


@pytest.mark.parametrize("schedule", [STEPS, None])
@pytest.mark.parametrize("cut", [1, 3])
def test_restored_gates_see_and_do_the_same(schedule: Schedule | None, cut: int) -> None:
    own = config(window=3, lower=True, mode="act" if schedule else "warn")
    whole = Gate(own, schedule, longest=512)
    looks = lived(whole, range(5), falling)
    first = Gate(own, schedule, longest=512)
    begun = lived(first, range(cut), falling)
    text = json.dumps(first.state(), allow_nan=False)
    second = Gate.restore(own, json.loads(text))
    assert second.state() == first.state()
    assert [*begun, *lived(second, range(cut, 5), falling)] == looks
    assert second.state() == whole.state()
    assert second.schedule == whole.schedule
    assert any(look.actions for look in looks)
    with pytest.raises(ValueError, match=r"gate\.bin"):  # it has other bins
        Gate.restore(config(bin=100), first.state())


def test_figures_are_those_of_the_tokens() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    rng = np.random.default_rng(0)
    alphas = [rng.random(60).astype(np.float32) for _ in range(6)]
    gate.observe(0, [reading(f"p{i % 5}", 300, alpha) for i, alpha in enumerate(alphas[:3])])
    look = gate.observe(1, [reading(f"p{i % 5}", 300, a) for i, a in enumerate(alphas) if i > 2])
    found, every = look.bins[2], np.concatenate(alphas)
    assert (found.tokens, found.prompts) == (360, 5)  # the sixth is of the first's prompt
    assert found.p05 == float(np.quantile(every, 0.05))
    wanted = (*np.quantile(every, (0.01, 0.5)), every.mean())
    assert (found.p01, found.p50, found.mean) == pytest.approx(wanted)
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
    # A mean budget is at most the length.
    lengths = [Estimate(lengths=[10, 130, 300], ratio=[1.0] * 3)]
    for schedule, mean in ((STEPS, (10 + 96 + 128) / 3), (None, 440 / 3)):
        assert Gate(CONFIG, schedule, longest=512).observe(0, [], lengths).budget == mean


def test_metrics() -> None:
    gate = Gate(CONFIG, STEPS, longest=512)
    looks = lived(gate, range(1), falling, start=100)
    named = metrics(looks[0])
    assert named["sparse/gate_violation_frac"] == 1 / 3
    for bin in looks[0].bins:
        assert named[f"sparse/accept_p05/bin_{bin.start}"] == bin.p05
    assert named["sparse/accept_p01"] < named["sparse/accept_p05_low"]
    assert named["sparse/accept_p05"] == looks[0].overall.p05
    assert named["sparse/accept_p05_high"] < named["sparse/accept_mean"]
    assert named["sparse/accept_estimate"] == pytest.approx(named["sparse/accept_mean"])
    assert 64 < named["sparse/kv_budget"] < 128
    assert from_dict(GateCheck, json.loads(json.dumps(to_dict(looks[0])))) == looks[0]
    assert metrics(Gate(CONFIG, STEPS, longest=512).observe(0, [])) == {}
