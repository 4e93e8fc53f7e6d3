"""Queries through the engine: in order whatever ends first, few at a time, none left behind."""

from collections import Counter

import pytest

from sparrow import models
from sparrow.engine import Engine
from sparrow.engine.answer import Query, complete, outputs
from sparrow.schema.sampling import SamplingParams


@pytest.fixture(scope="module")
def engine() -> Engine:
    sizes = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1}
    model = models.random("qwen3-0.6b", **sizes, head_size=16, vocabulary=64, max_positions=64)
    return Engine(model, max_running=4)


def query(ids: list[int], tokens: int, n: int = 1) -> Query:
    return Query(ids, SamplingParams(n=n, max_tokens=tokens, seed=ids[0], ignore_eos=True))


QUERIES = [query([1, 2], 9, n=2), query([3], 2), query([4, 5, 6], 5), query([7], 1)]


def test_completions_come_in_the_order_of_queries_and_samples_with_text(engine: Engine) -> None:
    found = complete(engine, QUERIES, lambda ids: " ".join(map(str, ids)))
    assert [[len(one.token_ids) for one in samples] for samples in found] == [[9, 9], [2], [5], [1]]
    for query, samples in zip(QUERIES, found, strict=True):
        for one in samples:
            assert one.prompt_ids.tolist() == query.ids
            assert one.text == " ".join(map(str, one.token_ids.tolist()))
    alone = [engine.generate([each.ids], each.params) for each in QUERIES]
    tokens = [[[one.token_ids.tolist() for one in row] for row in rows] for rows in (found, alone)]
    assert tokens[0] == tokens[1]


def test_keeps_few_in_the_engine_and_leaves_nothing_behind(engine: Engine) -> None:
    drawn: Counter[tuple[int, int]] = Counter()
    for number, output in outputs(engine, QUERIES, streamed=True, ahead=1):
        assert len(engine.loop.requests) <= 1
        drawn[number, output.sample] += len(output.tokens)
    assert drawn == {(0, 0): 9, (0, 1): 9, (1, 0): 2, (2, 0): 5, (3, 0): 1}
    found = outputs(engine, QUERIES)
    next(found)
    found.close()
    list(engine.stream())
    assert engine.idle
    assert not engine.loop.requests
