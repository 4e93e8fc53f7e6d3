"""Replays: exact acceptance by hand, and the pages that the engine itself chose."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import HIDDEN, dense_hidden, engine_of, logp, prompt, recorded_hidden, tiny
from support.replays import Replay, replay
from torch import Tensor

from sparrow import models, ops
from sparrow.schema.sampling import Completion, SamplingParams
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.sparse.flows import library
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.tensor import FlowError
from sparrow.sparse.rule import Rule

BY_LENGTH = {"lengths": [0, 150, 161, 177], "budgets": [48, 64, 80, 112], "dense_layers": ()}
BY_HEAD = (
    LayerBudgets(layer=1, budgets=[64]),
    LayerBudgets(layer=1, head=0, budgets=[112]),
    LayerBudgets(layer=2, head=1, budgets=[96]),
)
SCHEDULES = {
    "fixed": Schedule.fixed(48, dense_layers=()),
    "wider": Schedule.fixed(80, dense_layers=()),
    "dense-layers": Schedule.fixed(48, dense_layers=(1,)),
    "window": Schedule.fixed(64, first=0, last=4, dense_layers=()),
    "by-length": Schedule(name="by-length", **BY_LENGTH),
    "by-layer": Schedule.fixed(
        48, dense_layers=(), layers=(LayerBudgets(layer=1, budgets=[96]),), name="by-layer"
    ),
    "by-head": Schedule.fixed(48, dense_layers=(0,), layers=BY_HEAD, name="by-head"),
}


def sampled(
    model: models.Decoder, schedule: Schedule, ids: list[int], flow: Flow = library.block_mean
) -> Completion:
    """What an engine that runs the schedule's own rule wrote under it."""
    own = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    engine = engine_of(model, rule=Rule.of(schedule, flow))
    (completion,) = engine.generate([ids], own, schedule=schedule, options=HIDDEN)
    return completion


def replayed(model: models.Decoder, completion: Completion, *given: Any) -> Replay:
    """Under a schedule, by the block mean or another flow."""
    return replay(model, completion.prompt_ids.tolist(), completion.token_ids.tolist(), *given)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The dense and the sparse hidden states of every replay from now on."""
    seen: list[tuple[Tensor, Tensor]] = []
    inner = ops.acceptance

    def spy(p_TC: Tensor, q_TC: Tensor, head_VC: Tensor, **settings: Any) -> Tensor:
        seen.append((p_TC, q_TC))
        return inner(p_TC, q_TC, head_VC, **settings)

    monkeypatch.setattr(ops, "acceptance", spy)
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_replay_sees_what_the_engine_sampled_from(model, hidden, name: str) -> None:
    """The important one: log-probs agree only where the same pages were chosen at every token.

    q by the hidden states that the engine recorded, p by a dense pass: nothing of the replay.
    """
    schedule = SCHEDULES[name]
    completion = sampled(model, schedule, prompt(150, 2))
    alpha = replayed(model, completion, schedule).alpha
    answer = torch.tensor(completion.token_ids.tolist())[:, None]
    dense, sparse = (logp(model, x_TC).gather(1, answer)[:, 0] for x_TC in hidden[0])
    np.testing.assert_allclose(completion.logprobs, sparse, atol=1e-4)
    assert not np.allclose(completion.logprobs, dense, atol=1e-1)  # or it would say nothing
    wanted = wanted_alpha(model, completion)
    np.testing.assert_allclose(alpha, wanted, atol=1e-4)
    assert alpha.min() < 0.9
    assert alpha[0] > 1 - 1e-5  # the first token is drawn at the prompt's end, which is dense
    other = SCHEDULES["wider" if name == "fixed" else "fixed"]  # a wrong budget is noticed
    assert not np.allclose(replayed(model, completion, other).alpha, wanted, atol=1e-2)


def wanted_alpha(model: models.Decoder, completion: Completion) -> np.ndarray:
    """sum_v min(p(v), q(v)) in double precision."""
    passes = (dense_hidden(model, completion), recorded_hidden(completion))
    p_TV, q_TV = (logp(model, hidden_TC).double().exp() for hidden_TC in passes)
    return torch.minimum(p_TV, q_TV).sum(1).numpy()


def test_a_budget_of_the_whole_length_gives_alpha_1(model, hidden) -> None:
    """Both passes see the same bits; alpha is 1 but for the rounding of a sum over words."""
    ids, answer = prompt(70, 4), prompt(50, 5)
    every = replay(model, ids, answer, Schedule.fixed(120, dense_layers=()))
    ((dense_TC, sparse_TC),) = hidden
    assert torch.equal(dense_TC, sparse_TC)
    np.testing.assert_allclose(every.alpha, 1, atol=1e-6, rtol=0)
    # Entropy is that of the dense policy, also where the actor is sparse.
    logp_TV = logp(model, dense_TC).double()
    found = replay(model, ids, answer, SCHEDULES["fixed"])
    np.testing.assert_allclose(found.entropy, -(logp_TV.exp() * logp_TV).sum(1), atol=1e-4)
    assert found.alpha.min() < 0.999


def test_budgets_go_by_the_length_with_the_current_token(model) -> None:
    """A bin that starts at 161 tokens: the 161st is the first that keeps more, as in the engine."""
    ids = prompt(150, 2)
    narrow = Schedule.fixed(48, dense_layers=())
    completion = sampled(model, narrow, ids)
    answer = completion.token_ids.tolist()
    below = replay(model, ids, answer, narrow)
    start = 161
    steps = Schedule(name="steps", lengths=[0, start], budgets=[48, 4096], dense_layers=())
    found = replay(model, ids, answer, steps)
    before = found.lengths < start
    assert np.array_equal(found.alpha[before], below.alpha[before])
    assert found.lengths[before.sum()] == start
    assert found.alpha[before.sum()] != below.alpha[before.sum()]
    kept = sampled(model, steps, ids).kept
    assert (kept[1:][before[1:]] < 1).all()  # the first token is drawn by the dense prefill
    assert (kept[~before] == 1).all()


@pytest.mark.parametrize("flow", [library.quest, library.fine_means(4), library.running_average()])
def test_any_flow_is_replayed_as_the_engine_decodes_it(model, flow: Flow) -> None:
    layers = (LayerBudgets(layer=1, head=1, budgets=[96]),)
    schedule = Schedule.fixed(64, dense_layers=(0,), layers=layers, flow=flow.name)
    completion = sampled(model, schedule, prompt(150, 2), flow)
    found = replayed(model, completion, schedule, flow).alpha
    np.testing.assert_allclose(found, wanted_alpha(model, completion), atol=1e-4)
    assert found.min() < 0.9
    with pytest.raises(ValueError, match=flow.name):  # the flow must be the one that it names
        replay(model, prompt(20), prompt(5, 1), schedule)


def test_one_choice_for_several_layers(hidden) -> None:
    """Sparse layers 1 and 2 use the choice of 1, layer 3 its own: in the engine and in a replay."""
    deep, single = tiny(layers=4), library.fine_means(4)
    flow = replace(single, layers=2)
    assert flow.digest != single.digest
    schedule = Schedule.fixed(64, dense_layers=(0,), flow=flow.name)
    rule = Rule.of(schedule, flow)
    assert [rule.chooser(layer) for layer in (1, 2, 3)] == [1, 1, 3]
    completion = sampled(deep, schedule, prompt(150, 2), flow)
    found = replayed(deep, completion, schedule, flow).alpha
    np.testing.assert_allclose(found, wanted_alpha(deep, completion), atol=1e-4)
    assert not np.allclose(found, replayed(deep, completion, schedule, single).alpha, atol=1e-2)
    whole = Schedule.fixed(4096, dense_layers=(0,), flow=flow.name)
    np.testing.assert_allclose(replayed(deep, completion, whole, flow).alpha, 1, atol=1e-6, rtol=0)
    layers = (LayerBudgets(layer=1, budgets=[96]),)
    with pytest.raises(ValueError, match="by layer"):
        Rule.of(Schedule.fixed(64, dense_layers=(0,), flow=flow.name, layers=layers), flow)
    with pytest.raises(FlowError, match=r"Flow\.layers"):
        replace(single, layers=0)
