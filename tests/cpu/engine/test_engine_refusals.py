"""What an engine refuses, in words that say what was wrong and what to do."""

from typing import Any

import numpy as np
import pytest
from support.engines import SPARSE, engine_of, page_bytes, params, prompt, run, step_into, tiny

from sparrow import models
from sparrow.engine import Engine, Output
from sparrow.schema.sampling import OutputOptions, SamplingParams
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.sparse.flows import library
from sparrow.sparse.rule import Rule

TRAINING = OutputOptions(training=True)


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny()


@pytest.fixture(scope="module")
def engine(model: models.Decoder) -> Engine:
    return engine_of(model)


@pytest.mark.parametrize(
    ("ids", "changes", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 211], {}, r"prompt token 211 is not a whole number in 0\.\.210"),
        ([-1], {}, "prompt token -1 is not a"),
        ([1] * 500, {"max_tokens": 13}, "500 tokens and may grow by 13.*context is 512"),
        ([1], {"stop_token_ids": (3, 211)}, r"stop_token_ids \(3, 211\)"),
        ([1], {"stop_token_ids": tuple(range(33)), "min_tokens": 2}, "33 stop ids.*allowed are 32"),
    ],
)
def test_impossible_requests(engine, ids, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add(ids, params(**changes))
    assert engine.idle


def test_the_whole_context_may_be_used(model) -> None:
    engine = engine_of(model, pages=4, max_context=64)
    (completion,) = engine.generate([prompt(40)], params(max_tokens=24))
    assert len(completion.token_ids) == 24


def test_many_stop_ids_are_fine_without_a_minimum(engine) -> None:
    (completion,) = engine.generate([[1]], params(stop_token_ids=tuple(range(211))))
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9}, r"top_p=0\.9.*top_p must be 1"),
        ({"top_k": 5}, "top_k=5.*top_k must be 0"),
        ({"min_tokens": 1}, "min_tokens=1.*min_tokens must be 0"),
        ({"temperature": 0.0}, r"temperature=0\.0.*temperature must be above 0"),
    ],
)
def test_training_refuses_what_cuts_the_distribution(engine, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add([1], params(**changes), options=TRAINING)
    assert engine.idle


def test_training_takes_the_models_own_distribution(engine) -> None:
    own = params(temperature=0.7, max_tokens=2, stop_token_ids=(5,))
    assert len(engine.generate([[1]], own, options=TRAINING)) == 1


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule.fixed(96, page=32), r"page 32 \(the engine runs 16\)"),
        (Schedule.fixed(48, flow="quest"), r"flow 'quest' \(the engine runs 'block-mean'\)"),
        (Schedule.fixed(48, dense_layers=(0,)), "dense_layers"),
        (Schedule.fixed(64, last=3), r"last 3 \(the engine runs 2\)"),
        (Schedule.fixed(64, first=2), r"first 2 \(the engine runs 1\)"),
    ],
)
def test_schedules_of_another_rule(engine, schedule, message) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add([1], params(), schedule=schedule)
    assert engine.idle


def test_schedules_of_another_family(engine) -> None:
    made = Schedule.fixed(48, family="llama")
    message = r"'fixed-48' was not made for this: family 'llama' \(the engine runs 'qwen3'\)"
    with pytest.raises(ValueError, match=message):
        engine.add([1], params(), schedule=made)
    forced = made.forced_onto(family="qwen3")
    (done,) = engine.generate([[1]], params(max_tokens=2), schedule=forced)
    assert done.attention.endswith("; FORCED, made for family llama")


def test_schedules_of_another_model(engine) -> None:
    beyond = LayerBudgets(layer=7, budgets=np.array([64]))
    with pytest.raises(ValueError, match=r"names layers \[7\], the model has 0 to 2"):
        engine.add([1], params(), schedule=Schedule.fixed(48, layers=(beyond,)))


def test_a_schedule_needs_a_rule(model) -> None:
    engine = engine_of(model, rule=None)
    with pytest.raises(ValueError, match=r"dense only \(rule=None\)"):
        engine.add([1], params(), schedule=SPARSE)
    (dense,) = engine.generate([prompt(40)], params())
    (other,) = engine_of(model).generate([prompt(40)], params())
    assert dense.token_ids.tolist() == other.token_ids.tolist()
    assert page_bytes(model, None) < page_bytes(model, Rule())


def test_state_cannot_be_computed_anew(model) -> None:
    rule = Rule(flow=library.running_average(0.25))
    message = r"preempt='recompute' with .*'running-average-0.25': its state \(r\).*preempt='swap'"
    with pytest.raises(ValueError, match=message):
        engine_of(model, rule=rule, preempt="recompute")
    engine_of(model, rule=rule, preempt="swap")
    engine_of(model, preempt="recompute")


def test_a_rule_of_its_own_takes_its_own_schedules(model) -> None:
    engine = engine_of(model, rule=Rule(dense_layers=frozenset((0,))))
    schedule = Schedule.fixed(48, dense_layers=(0,))
    (mine,) = engine.generate([prompt(100)], params(max_tokens=4), schedule=schedule)
    assert "dense layers: 0" in mine.attention
    with pytest.raises(ValueError, match="was not made for this"):
        engine.add([1], params(), schedule=SPARSE)


def test_schedules_of_ended_requests_make_room(model) -> None:
    """A long run tries many budgets; only those in use need a place."""
    engine = engine_of(model)
    for budget in range(48, 48 + 20):
        engine.generate([[1]], params(max_tokens=1), schedule=Schedule.fixed(budget))


def test_memory_that_holds_no_sequence_is_refused_with_the_plan(model) -> None:
    with pytest.raises(ValueError, match="does not fit with one sequence of 512 tokens") as caught:
        engine_of(model, pages=31)
    for part in ("weights", "KiB a token", "31 pages of 16 = 496 tokens", "smaller max_context"):
        assert part in str(caught.value)
    engine_of(model, pages=32)


def test_more_memory_than_there_is(model) -> None:
    with pytest.raises(ValueError, match=r"kv_bytes=\d+ is more than cpu has"):
        Engine(model, kv_bytes=2**60, max_context=4096, max_running=2**24)


def test_a_longer_context_than_the_models(model) -> None:
    with pytest.raises(ValueError, match="max_context=5000, but the model's context is 4096"):
        engine_of(model, max_context=5000)


@pytest.mark.parametrize(
    "settings", [{"preempt": "swop"}, {"reuse": "promts"}, {"max_running": 0}, {"swap_bytes": -1}]
)
def test_settings_that_mean_nothing(model, settings) -> None:
    """A misspelt one must not quietly become another mode."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        engine_of(model, **settings)


def test_adapters_and_options_that_are_not_there(engine) -> None:
    with pytest.raises(ValueError, match="no adapter 'x' is loaded; loaded: none"):
        engine.add([1], params(), adapter="x")
    with pytest.raises(ValueError, match="no adapter 'x'"):
        engine.drop_adapter("x")
    with pytest.raises(ValueError, match="top_logprobs=212, the vocabulary has 211"):
        engine.add([1], params(), options=OutputOptions(top_logprobs=212))


def test_generate_wants_an_engine_of_its_own_and_matching_params(engine) -> None:
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling params"):
        engine.generate([[1], [2]], [params()])
    request = engine.add([1], params(max_tokens=2))
    with pytest.raises(ValueError, match="has requests already"):
        engine.generate([[1]], params())
    assert run(engine)[request, 0].finish_reason == "length"


def test_a_refused_prompt_leaves_no_part_of_a_generate_behind(engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        engine.generate([[1], []], params())
    assert engine.idle
    engine.check_integrity()


def _crowded(model: models.Decoder, **settings: Any) -> tuple[Engine, SamplingParams]:
    return engine_of(model, pages=14, max_context=200, **settings), params(n=3, max_tokens=60)


def test_too_little_room_for_swapping(model) -> None:
    engine, own = _crowded(model, swap_bytes=1000)
    with pytest.raises(RuntimeError, match=r"host memory for swapping.*swap_bytes.*fewer"):
        engine.generate([prompt(30)], own)
    assert engine.idle
    engine.check_integrity()


def test_after_swapping_failed_an_abort_makes_room_and_the_others_are_right(model) -> None:
    """Who steps by hand can give up one request; tables and pages of the rest still agree."""
    engine = engine_of(model, pages=14, max_context=200, swap_bytes=1000)
    ids = [engine.add(prompt(16, seed), params(seed=seed, max_tokens=72)) for seed in range(3)]
    outputs: list[Output] = []
    with pytest.raises(RuntimeError, match="swap_bytes"):
        step_into(outputs, engine)
    engine.check_integrity()
    engine.abort(ids[-1])
    done = run(engine, outputs=outputs)
    for seed in range(2):
        (calm,) = engine_of(model).generate([prompt(16, seed)], params(seed=seed, max_tokens=72))
        assert done[ids[seed], 0].token_ids.tolist() == calm.token_ids.tolist()
