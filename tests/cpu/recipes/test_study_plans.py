"""Schedules of a study: budgets of equal cost by hand, and what makes an arm planned."""

from pathlib import Path

import numpy as np
import pytest
from support.studies import DENSE, study
from support.surfaces import surface

from sparrow.schema.base import from_dict
from sparrow.schema.schedule import DENSE as ALL
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface
from sparrow.sparse import named_schedule
from sparrow_recipes.study import plans
from sparrow_recipes.study.plans import drawn_lengths, equal_budget, make_plans

STARVED = {"name": "starved", "role": "collapses", "budget": 64}


def stepped(*budgets: int) -> Schedule:
    """The first budget below 100 tokens, the second from there on."""
    return Schedule(name="s", lengths=[0, 100], budgets=budgets, dense_layers=())


def measured(**changes: object) -> Surface:
    plain = surface()
    variants = [one | {"dense_layers": [], "flow_digest": None} for one in plain["variants"]]
    return from_dict(Surface, plain | {"prompt_tokens": 4, "variants": variants} | changes)


def test_the_budget_of_equal_cost() -> None:
    """Of what is kept, not of budgets: short answers cannot fill a large one."""
    for budgets, lengths, expected in (
        ((64, 64), range(1, 200), 64),  # a fixed budget is its own
        ((64, 128), (80, 160), 112),  # keeps 64 and 128, mean 96: as (80 + 112) / 2
        ((64, ALL), (80, 160), 144),  # 64 and 160, mean 112: as (80 + 144) / 2
        ((48, 48), (16, 40), 48),  # nothing to leave out, and no budget is smaller
        ((ALL, ALL), (80, 160), 160),  # all is kept
        ((64, 128), (160, 320), 128),  # both in the second bin
        ((64, 80), (90, 320), 64),  # 58 (whole pages) and 80, mean 69; 64 has 61, 80 has 77: a tie
    ):
        assert equal_budget(stepped(*budgets), np.array(lengths)) == expected


def test_lengths_at_which_tokens_were_drawn() -> None:
    """A prompt of 4: the first token comes from the prefill, the next is drawn at length 5.

    Sequences of 8 and 6 end before their last length; one without a decoded token counts once.
    """
    assert drawn_lengths(measured(lengths=[8, 6])).tolist() == [5, 6, 7, 5]
    assert drawn_lengths(measured(lengths=[4, 7])).tolist() == [5, 5, 6]


def test_plans_of_given_budgets_need_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "load", lambda *_, **__: pytest.fail("no model is needed"))
    made = study(tmp_path / "s", (DENSE, STARVED))
    assert not made.planned()
    assert study(tmp_path, (DENSE,)).planned()
    make_plans(made)
    assert made.planned()
    found = Schedule.load(made.plan_of(made.cell("starved-0").arm))
    assert (found.budgets.tolist(), found.dense_layers, found.name) == ([64], (), "starved")


def test_a_given_schedule_is_copied(tmp_path: Path) -> None:
    made = study(tmp_path / "s", (DENSE, {"name": "given", "schedule": "tiny-0.86"}))
    make_plans(made)
    found = Schedule.load(made.plan_of(made.cell("given-0").arm))
    assert (found.name, found) == ("tiny-0.86", named_schedule("tiny-0.86"))


def test_planned_arms_and_a_fixed_budget_that_reads_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of 900 and 1500 tokens: 512 from 100 on. A plan that is there stays."""
    targets = [{"name": "low", "target": 0.7}, {"name": "high", "target": 0.9}]
    made = study(tmp_path / "s", [DENSE, {"name": "fixed", "like": "high"}, *targets])
    made.plans.mkdir(parents=True)
    Schedule.fixed(96, name="mine", dense_layers=()).save(made.plans / "low.json")
    chosen = {"low": stepped(64, 128), "high": stepped(64, 512)}
    monkeypatch.setattr(plans, "open_surface", lambda *_: measured())
    monkeypatch.setattr(plans, "planned_schedule", lambda _, __, arm: chosen[arm.name])
    make_plans(made)
    low, high, fixed = (
        Schedule.load(made.plans / f"{name}.json") for name in ("low", "high", "fixed")
    )
    assert (low.name, high.budgets.tolist(), fixed.budgets.tolist()) == ("mine", [64, 512], [512])
    lengths = np.concatenate([np.arange(5, 900), np.arange(5, 1500)])
    assert abs(fixed.kept(lengths, 0).mean() - high.kept(lengths, 0).mean()) < 16


def test_a_surface_of_other_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "surface.json"
    measured().save(file)
    monkeypatch.setattr(plans, "load", lambda *_, **__: None)
    monkeypatch.setattr(plans, "fingerprint", lambda _: "ffff")
    made = study(tmp_path / "s", surface={"surface": str(file)})
    with pytest.raises(ValueError, match="ab12"):
        make_plans(made)
    monkeypatch.setattr(plans, "fingerprint", lambda _: "ab12")
    assert plans.open_surface(made, None, None).fingerprint == "ab12"
