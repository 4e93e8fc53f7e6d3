"""Acceptance of drafts: by its definition, over prompts, and what is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import prompt, tiny

import sparrow
from sparrow import models, ops
from sparrow.calibration import drafts
from sparrow.calibration.replay import Arm, Prompt, make_arm, make_variant, read, sparse_hidden
from sparrow.calibration.store import Store
from sparrow.schema.surface import DraftCell
from sparrow.sparse.flows import library
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.rule import Rule

SEQUENCES = [Prompt(number=n, name=str(n), ids=tuple(prompt(200, n)), start=70) for n in range(3)]


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny()


def arm_of(model: models.Decoder, flow: Flow, budget: int, **changes: Any) -> Arm:
    variant = make_variant(flow, flow.name, model.spec, **changes)
    return make_arm(variant, flow, budget)


@pytest.mark.parametrize("flow", [library.block_mean, library.fine_means(4), library.quest])
def test_a_round_is_a_sparse_continuation_of_a_dense_prefix(model, flow: Flow) -> None:
    """Which a pass over the whole sequence gives, with all tokens before the round dense."""
    arm, ids = arm_of(model, flow, 64), prompt(150)
    rounds = drafts.DraftRounds(model, ids, Rule.of(arm.schedule, flow), start=75, draft_tokens=7)
    alpha_BJ = rounds.acceptance(arm.schedule, temperature=0.8)
    assert rounds.starts_B.tolist() == list(range(75, 144, 7))
    for start, alpha_J in zip(rounds.starts_B.tolist(), alpha_BJ, strict=True):
        dense = read(model, ids[: start + 7])
        sparse_TC = sparse_hidden(model, dense, start, arm.schedule, flow)
        wanted_T = ops.acceptance(
            dense.hidden_TC[start:], sparse_TC[start:], model.head, temperature=0.8
        )
        torch.testing.assert_close(alpha_J, wanted_T, atol=2e-4, rtol=0)
    assert alpha_BJ.min() < 0.99


def test_cells_are_means_over_prompts_and_are_not_measured_twice(model, tmp_path: Path) -> None:
    arms = [arm_of(model, library.block_mean, budget) for budget in (64, 112, 196, 400)]
    store = Store(tmp_path / "drafts.jsonl")

    def measure(store: Store) -> list[DraftCell]:
        settings = {"draft_tokens": 8, "reselect": (1, 4)}
        return drafts.measure_drafts(model, SEQUENCES, arms, store, **settings)

    cells = measure(store)
    found = [(cell.budget, cell.reselect, cell.rounds) for cell in cells]
    # The other budgets are as long as a sequence.
    assert found == [(64, 1, 48), (64, 4, 48), (112, 1, 30), (112, 4, 30)]
    for cell in cells:
        assert cell.prompts == 3
        assert len(cell.acceptance) == cell.draft_tokens == 8
        assert cell.accepted.low < cell.accepted.value < cell.accepted.high <= 8
    small, _, large, _ = cells
    assert small.accepted.value < large.accepted.value
    model.forward, forward = None, model.forward
    try:
        assert measure(Store(tmp_path / "drafts.jsonl")) == cells
    finally:
        model.forward = forward


def test_what_cannot_draft_is_refused(model, tmp_path: Path) -> None:
    store = Store(tmp_path / "drafts.jsonl")
    for flow, draft_tokens, said in (
        (library.running_average(0.7), 8, "state"),
        (library.block_mean, 17, "draft_tokens=17"),
    ):
        arms = [arm_of(model, flow, 64)]
        with pytest.raises(ValueError, match=said):
            drafts.measure_drafts(model, SEQUENCES, arms, store, draft_tokens=draft_tokens)


def test_what_cannot_draft_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"task": "assignments", "length": 100, "out": tmp_path}
    for changes in ({"draft_tokens": 17}, {"draft_tokens": 4, "flow": "running_average"}):
        with pytest.raises(ValueError, match="draft"):
            sparrow.calibrate("tiny", device="cpu", **settings, **changes)
        assert len((tmp_path / "measured.jsonl").read_text().splitlines()) == 1  # what it is about


def test_pages_selected_once_for_several_drafts_cost_acceptance(model) -> None:
    """The first draft is the same; a budget of the whole sequence loses nothing."""
    ids, arm = prompt(200), arm_of(model, library.block_mean, 64)
    rule = Rule.of(arm.schedule)

    def alpha(budget: int, reselect: int) -> torch.Tensor:
        settings = {"start": 75, "draft_tokens": 8, "reselect": reselect}
        rounds = drafts.DraftRounds(model, ids, rule, **settings)
        return rounds.acceptance(arm_of(model, library.block_mean, budget).schedule)

    each, held = alpha(64, 1), alpha(64, 8)
    assert not torch.equal(held[:, 1:], each[:, 1:])
    assert abs(held[:, 0].mean() - each[:, 0].mean()) < 0.1  # reserved pages may differ by one
    torch.testing.assert_close(alpha(400, 8), torch.ones_like(each), atol=1e-4, rtol=0)
