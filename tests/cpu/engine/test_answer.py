"""Queries through the engine: few at a time, none left behind."""

from collections import defaultdict
from collections.abc import Generator

import pytest

from sparrow import models
from sparrow.engine import Engine
from sparrow.engine.answer import Query, outputs
from sparrow.schema.sampling import SamplingParams


@pytest.fixture(scope="module")
def engine() -> Engine:
    sizes = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1}
    model = models.random("qwen3-0.6b", **sizes, head_size=16, vocabulary=64, max_positions=64)
    return Engine(model, max_running=4)


def query(ids: list[int], tokens: int, n: int = 1) -> Query:
    return Query(ids, SamplingParams(n=n, max_tokens=tokens, seed=ids[0], ignore_eos=True))


QUERIES = [query([1, 2], 9, n=2), query([3], 2), query([4, 5, 6], 5), query([7], 1)]


def test_outputs_are_those_of_their_query_few_at_a_time_and_leave_nothing(engine: Engine) -> None:
    drawn: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, output in outputs(engine, QUERIES, streamed=True, ahead=1):
        assert len(engine.loop.requests) <= 1
        drawn[number, output.sample] += output.tokens
    for number, each in enumerate(QUERIES):
        for sample, alone in enumerate(engine.generate([each.ids], each.params)):
            assert drawn.pop((number, sample)) == alone.token_ids.tolist()
    assert not drawn
    stream = outputs(engine, QUERIES)
    assert isinstance(stream, Generator)
    next(stream)
    stream.close()
    list(engine.stream())
    assert engine.idle
    assert not engine.loop.requests
