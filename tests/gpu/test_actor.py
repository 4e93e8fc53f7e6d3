"""The actor's adapter on a GPU: merged weights under graphs, mixed batches, exact decoding."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from support.loud import loud

from sparrow import models, ops
from sparrow.engine import Engine
from sparrow.models.attention import Packed
from sparrow.models.lora import Adapter
from sparrow.schema.sampling import Completion, SamplingParams, SpeculativeParams
from sparrow.schema.schedule import Schedule

PROMPTS = [[5, 9, 2], list(range(40)), [7] * 300, list(range(90))]
SPARSE = Schedule.fixed(64)
EXACT = {"schedule": SPARSE, "speculative": SpeculativeParams(draft_tokens=5)}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> models.Decoder:
    return loud(request.param, max_positions=4096)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 11, "n": 2, **changes})


def actor(model: models.Decoder, seed: int = 1, b_std: float = 0.3) -> Adapter:
    return Adapter.random(model.spec, 8, b_std=b_std, seed=seed, device="cuda")


def acting(model: models.Decoder, adapter: Adapter | None, **changes: Any) -> Engine:
    engine = Engine(model, **{"max_running": 16, "max_context": 1024, "reuse": "none", **changes})
    engine.set_actor(adapter)
    return engine


def same(left: list[Completion], right: list[Completion]) -> bool:
    return all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(left, right, strict=True)
    )


def answers(engine: Engine, ways: list[dict[str, Any]]) -> list[Completion]:
    """Every prompt in each of these ways, all in one batch."""
    for how in ways:
        for prompt in PROMPTS:
            engine.add(prompt, params(n=1), **how)
    done = {o.request: o.completion for o in engine.stream() if o.completion is not None}
    return [done[number] for number in sorted(done)]


def check_log_probs(model: models.Decoder, completions: list[Completion]) -> None:
    """Those of a dense pass by this model."""
    atol = 2e-3 if model.dtype == torch.float32 else 0.15
    for completion in completions:
        ids = torch.tensor([*completion.prompt_ids, *completion.token_ids], device="cuda")
        start = len(completion.prompt_ids)
        attention = Packed(bounds=torch.tensor([0, len(ids)], device="cuda"))
        with torch.no_grad(), ops.using("reference"):
            hidden = model(ids, torch.arange(len(ids), device="cuda"), attention)
            stats = ops.token_stats(hidden[start - 1 : -1], model.head, ids[start:])
        np.testing.assert_allclose(completion.logprobs, stats.logprob.cpu(), atol=atol)


@pytest.mark.parametrize(
    "ways",
    [[{"schedule": SPARSE}], [EXACT], [{}, {"schedule": SPARSE}, EXACT]],
    ids=["sparse", "exact", "mixed"],
)
def test_graphs_equal_eager_steps(model: models.Decoder, ways: list[dict[str, Any]]) -> None:
    adapter = actor(model)
    replayed = answers(acting(model, adapter), ways)
    assert same(replayed, answers(acting(model, adapter, graphs=False), ways))
    assert not same(replayed, answers(acting(model, None), ways))


@pytest.mark.parametrize("how", [{"schedule": SPARSE}, EXACT], ids=["sparse", "exact"])
def test_a_zero_actor_changes_no_bit(model: models.Decoder, how: dict[str, Any]) -> None:
    plain = acting(model, None).generate(PROMPTS, params(), **how)
    assert same(acting(model, actor(model, b_std=0.0)).generate(PROMPTS, params(), **how), plain)


def test_mixed_batches(model: models.Decoder) -> None:
    """Dense rows are those of the model, sparse ones of a wide budget those of merged weights."""
    engine = acting(model, actor(model))
    done = answers(engine, [{}, {"schedule": Schedule.fixed(1024)}])
    check_log_probs(model, done[: len(PROMPTS)])
    assert engine.runner.merged is not None
    check_log_probs(engine.runner.merged, done[len(PROMPTS) :])


def test_another_actor_needs_no_new_captures(model: models.Decoder) -> None:
    engine = acting(model, actor(model))
    first = engine.generate(PROMPTS, params(), schedule=SPARSE)
    assert engine.runner.graphs is not None
    captured = dict(engine.runner.graphs._captured)
    assert any(kind.merged for kind in captured)
    engine.set_actor(actor(model, seed=2))
    second = engine.generate(PROMPTS, params(), schedule=SPARSE)
    assert engine.runner.graphs._captured.keys() == captured.keys()
    assert all(engine.runner.graphs._captured[kind] is captured[kind] for kind in captured)
    assert not same(first, second)
    fresh = acting(model, actor(model, seed=2)).generate(PROMPTS, params(), schedule=SPARSE)
    assert same(second, fresh)
    engine.set_actor(None)
    plain = acting(model, None).generate(PROMPTS, params(), schedule=SPARSE)
    assert same(engine.generate(PROMPTS, params(), schedule=SPARSE), plain)


def test_exact_decoding_has_dense_log_probs(model: models.Decoder) -> None:
    engine = acting(model, actor(model))
    check_log_probs(model, engine.generate(PROMPTS, params(), **EXACT))
    check_log_probs(model, answers(engine, [{}, EXACT]))


def test_sleep_frees_the_merged_weights(model: models.Decoder) -> None:
    engine = acting(model, actor(model))
    calm = engine.generate(PROMPTS, params(), schedule=SPARSE)
    assert engine.runner.merged is not None
    shared = {id(weight) for weight in model.parameters()}
    own = sum(w.nbytes for w in engine.runner.merged.parameters() if id(w) not in shared)
    held = engine.memory.pages * engine.memory.page_bytes + engine.memory.weights + own
    before = torch.cuda.memory_allocated()
    engine.sleep(weights="host")
    assert before - torch.cuda.memory_allocated() > 0.95 * held
    engine.wake()
    assert same(engine.generate(PROMPTS, params(), schedule=SPARSE), calm)
