"""Calibration on a GPU: schedules changed under captured graphs, bounds, the engine's own alpha."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from support.loud import loud
from support.replays import replay

from sparrow import models, ops
from sparrow.calibration.replay import Prompt, RolloutJob, make_arm, make_variant, roll_out
from sparrow.engine import Engine
from sparrow.schema.sampling import SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows.library import block_mean
from sparrow.sparse.rule import Rule

PROMPT = [n * 7 % 1000 for n in range(200)]
NARROW, WIDE = Schedule.fixed(64), Schedule.fixed(160)


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return loud(torch.float32, max_positions=1024)


def test_a_schedule_changed_under_graphs_is_one_with_a_bin_there(model: models.Decoder) -> None:
    params = SamplingParams(max_tokens=80, seed=3, ignore_eos=True)
    engine = Engine(model, max_running=4, max_context=512)
    number = engine.add(PROMPT, params, schedule=NARROW)
    outputs = [output for _ in range(30) for output in engine.step()]
    (sample,) = engine.loop.requests[number].samples
    length = len(PROMPT) + sample.drawn
    assert engine.reschedule(NARROW, WIDE) == [number]
    outputs += list(engine.stream())
    (changed,) = [output.completion for output in outputs if output.completion]

    bins = Schedule(name="bins", lengths=[0, length], budgets=[64, 160])
    again = Engine(model, max_running=4, max_context=512)
    (wanted,) = again.generate([PROMPT], params, schedule=bins)
    assert np.array_equal(changed.token_ids, wanted.token_ids)
    assert np.array_equal(changed.logprobs, wanted.logprobs)
    np.testing.assert_array_equal(changed.kept, wanted.kept)
    assert f"from length {length}:" in changed.attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_bracket_acceptance_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = torch.randn(151_936, 128, device="cuda", dtype=dtype) / 4
    p = torch.randn(256, 128, device="cuda", dtype=dtype)
    q = p + 0.1 * torch.randn_like(p)
    ids = torch.randint(151_936, (256,), device="cuda")
    found = ops.compare(p, q, head, ids)
    assert (found.lower <= found.alpha).all()
    assert (found.alpha <= found.upper).all()
    assert torch.equal(found.alpha, ops.acceptance(p, q, head))


def test_the_engine_strays_as_a_replay_says(model: models.Decoder) -> None:
    own = make_arm(make_variant(block_mean, "block_mean", model.spec), block_mean, 64)
    engine = Engine(model, rule=Rule.of(own.schedule), max_running=4, max_context=512)
    given = Prompt(number=0, name="given", ids=tuple(PROMPT))
    params = SamplingParams(max_tokens=100, seed=5, ignore_eos=True)
    ((_, found),) = roll_out(engine, [RolloutJob(own, given, params)])
    again = replay(model, PROMPT, found.ids[len(PROMPT) :].tolist(), own.schedule)
    np.testing.assert_allclose(found.alpha, again.alpha[1:], atol=0.02)
    assert found.alpha.min() < 0.95
