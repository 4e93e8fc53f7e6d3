"""Requests of which only completions are wanted: one output a sample, and nothing lost by it."""

import pytest
from support.engines import assert_same_bits, engine_of, params, run, steps, tiny

from sparrow import models
from sparrow.engine import Engine


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny()


@pytest.fixture
def engine(model: models.Decoder) -> Engine:
    return engine_of(model)


def test_what_is_not_streamed_comes_once_with_everything(engine: Engine) -> None:
    """Beside a streamed request; one output a sample, equal bit for bit to the streamed one's."""
    quiet = engine.add([1, 2, 3], params(n=3), streamed=False)
    loud = engine.add([1, 2, 3], params(n=3))
    outputs = list(engine.stream())
    own = [each for each in outputs if each.request == quiet]
    assert sorted(each.sample for each in own) == [0, 1, 2]
    done = {each.sample: each.completion for each in own}
    streamed: dict[int, list[int]] = {sample: [] for sample in done}
    for each in outputs:
        if each.request == loud:
            streamed[each.sample] += each.tokens
    others = {each.sample: each.completion for each in outputs if each.request == loud}
    for sample, completion in done.items():
        assert completion.token_ids.tolist() == streamed[sample]
        assert len(completion.token_ids) == 24
        assert_same_bits(completion, others[sample])
    assert len([each for each in outputs if each.request == loud]) == 3 * 24
    assert engine.idle


def test_a_stop_token_ends_what_is_not_streamed(engine: Engine, model: models.Decoder) -> None:
    """It ends where the streamed one ends, with the same reason."""
    (whole,) = engine_of(model).generate([[1, 2, 3]], params())
    stop = params(stop_token_ids=(int(whole.token_ids[6]),))
    quiet, loud = (engine.add([1, 2, 3], stop, streamed=each) for each in (False, True))
    done = run(engine)
    assert len(done[quiet, 0].token_ids) <= 7
    assert done[quiet, 0].finish_reason == "stop"
    assert_same_bits(done[quiet, 0], done[loud, 0])


def test_an_aborted_request_that_is_not_streamed_returns_what_it_has(engine: Engine) -> None:
    request = engine.add([1, 2, 3], params(), streamed=False)
    assert steps(engine, 5) == []
    engine.abort(request)
    (output,) = engine.stream()
    assert output.completion.finish_reason == "abort"
    assert len(output.completion.token_ids) == 5
