"""What an engine does for its callers: requests, samples, pages, and what completions hold."""

import numpy as np
import pytest
import torch
from support import engines
from support.engines import SPARSE, alone, engine_of, params, prompt, run, same_bits, steps, tiny

from sparrow import models, ops
from sparrow.engine import Engine
from sparrow.schema.sampling import OutputOptions, SamplingParams
from sparrow.schema.schedule import LayerBudgets, Schedule
from sparrow.sparse.rule import Rule

LONG = prompt(300, 9)
SHORT = [1, 2, 3]


# Requests.


def test_streamed_tokens_come_once_and_completions_alone_where_that_is_asked(engine) -> None:
    """Both hold the same bits, stops included; who is not streamed has one output a sample."""
    stops = params(n=2, stop_token_ids=tuple(range(0, 60, 3)))
    quiet, loud = (engine.add(SHORT, stops, streamed=each) for each in (False, True))
    outputs = list(engine.stream())
    assert engine.generate([], params()) == []
    came: dict[tuple[int, int], list[list[int]]] = {}
    for output in outputs:
        came.setdefault((output.request, output.sample), []).append(output.tokens)
    done = {(each.request, each.sample): each.completion for each in outputs if each.completion}
    assert sorted(done) == [(quiet, 0), (quiet, 1), (loud, 0), (loud, 1)]
    for sample in range(2):
        same_bits(done[quiet, sample], done[loud, sample])
        assert len(came[quiet, sample]) == 1
        streamed = [token for tokens in came[loud, sample] for token in tokens]
        assert streamed == done[loud, sample].token_ids.tolist()
    assert engine.idle


def test_tokens_within_an_interval_come_together(engine) -> None:
    """The first at once, the last with the completion, also where a request is aborted."""
    engine.add(SHORT, params(max_tokens=9), interval=1000.0)
    aborted = engine.add(SHORT, params(max_tokens=9), interval=1000.0)
    came: dict[tuple[int, int], list[int]] = {}
    for step in range(5):
        came |= {(step, output.request): output.tokens for output in engine.step()}
    engine.abort(aborted)
    ended = {output.request: output for output in engine.stream()}
    assert [len(tokens) for tokens in came.values()] == [1, 1]
    for (_, number), first in came.items():
        assert [*first, *ended[number].tokens] == ended[number].completion.token_ids.tolist()
        assert len(ended[number].logprobs) == len(ended[number].tokens) > 1


def test_an_aborted_request_returns_what_it_has(model) -> None:
    """While it waits, between chunks of its prompt, twice, where there is none, and half-way."""
    engine = engine_of(model, max_running=1)
    options = OutputOptions(top_logprobs=3, hidden_states=True)
    running = engine.add([1], params(), options=engines.HIDDEN)
    waiting, chunked = engine.add([2], params(n=2)), engine.add(LONG, params(), options=options)
    outputs = steps(engine, 2)
    for request in (waiting, chunked, chunked, 999):
        engine.abort(request)
    done = run(engine, outputs=outputs)
    assert done[running, 0].finish_reason == "length"
    for key in ((waiting, 0), (waiting, 1), (chunked, 0)):
        assert (done[key].finish_reason, len(done[key].token_ids)) == ("abort", 0)
    late = engine.add([1], params(), options=engines.HIDDEN)
    outputs = steps(engine, 5)
    engine.abort(late)
    ended = run(engine, outputs=outputs)[late, 0]
    whole = done[running, 0]
    assert ended.token_ids.tolist() == whole.token_ids[:5].tolist()
    assert len(ended.hidden) == len(ended.kept) == len(ended.weight_versions) == 5
    assert engine.pool.available == engine.pool.pages


def test_outputs_that_nobody_has_read_are_not_lost(engine) -> None:
    """Not of a stream that is left, and an older abort is no completion of a generate."""
    request = engine.add(SHORT, params(n=2, max_tokens=1))
    stream = engine.stream()
    seen = [next(stream)]
    stream.close()
    seen += engine.stream()
    assert sorted((each.request, each.sample) for each in seen) == [(request, 0), (request, 1)]
    aborted = engine.add([1, 2], params())
    engine.abort(aborted)
    (completion,) = engine.generate([[3]], params(max_tokens=2))
    assert completion.finish_reason == "length"
    (unread,) = engine.stream()
    assert (unread.request, unread.completion.finish_reason) == (aborted, "abort")


# Sampling.


def test_seeds_decide_samples_and_the_global_one_is_left_alone(engine) -> None:
    first = engine.generate([SHORT], params(n=3))
    same_bits(first, engine.generate([SHORT], params(n=3)))
    other = engine.generate([SHORT], params(n=3, seed=12))
    state = torch.get_rng_state()
    unseeded = engine.generate([SHORT] * 2, params(seed=None))
    assert torch.equal(state, torch.get_rng_state())
    every = [*first, *other, *unseeded]
    assert len({tuple(each.token_ids) for each in every}) == len({each.seed for each in every}) == 8


def test_stops_minimum_and_maximum(model) -> None:
    """Of the caller and of the model; a row forgets those of who was there before."""
    engine = engine_of(model, max_running=1)
    free = alone(model, SHORT, params())
    stop = int(free.token_ids[4])
    end = free.token_ids.tolist().index(stop) + 1
    (ended,) = engine.generate([SHORT], params(stop_token_ids=(stop,)))
    assert ended.finish_reason == "stop"
    assert ended.token_ids.tolist() == free.token_ids[:end].tolist()
    stops = tuple(range(32))
    (longer,) = engine.generate([SHORT], params(stop_token_ids=stops, min_tokens=15))
    assert not set(longer.token_ids[:15].tolist()) & set(stops)
    (later,) = engine.generate([SHORT], params(top_k=engines.VOCABULARY))
    same_bits(later, alone(model, SHORT, params(top_k=engines.VOCABULARY)))
    own_end = tiny(eos_ids=tuple(range(60)))
    given = alone(own_end, SHORT, params(ignore_eos=False, max_tokens=60))
    assert given.finish_reason == "stop"
    assert given.token_ids[-1] < 60
    assert alone(own_end, SHORT, params(max_tokens=60)).finish_reason == "length"


# Pages.


def test_samples_of_a_group_share_the_prompts_pages(engine, model) -> None:
    """18 full pages once, the unfinished one for each of 4: not 4 times 19."""
    engine.add(LONG, params(n=4, max_tokens=3))
    steps(engine, 3)
    assert len(engine.scheduler.running) == 4
    assert engine.pool.pages - engine.pool.available == 18 + 4
    run(engine)
    whole = engine.generate([prompt(32)], params(n=3))
    same_bits(whole, engine_of(model, reuse="none").generate([prompt(32)], params(n=3)))


def test_a_later_request_reuses_the_prefix(engine, model) -> None:
    """Whole chunks of 128 tokens on a CPU, so that bits do not depend on what was cached; the last
    token is always computed.
    """
    passes = engines.count_prefill(engine)
    wanted = 0
    for ids, computed in (
        (LONG, 300),
        (LONG, 300 - 256),
        ([*LONG[:200], 7, *LONG[201:]], 300 - 128),
        (LONG[:256], 128),
    ):
        (given,) = engine.generate([ids], params(max_tokens=2))
        wanted += computed
        assert engines.tokens_of(passes) == wanted
        same_bits(given, alone(model, ids, params(max_tokens=2)))
    alike = engine_of(model, reuse="none")
    passes = engines.count_prefill(alike)
    alike.generate([LONG, LONG], params(max_tokens=2))
    assert engines.tokens_of(passes) == 600
    assert alike.pool.cached == 0


# What completions hold.


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
def test_statistics_are_of_the_recorded_hidden_states(engine, model, schedule) -> None:
    """Options of one request are not those of another in its batch."""
    own = params(temperature=0.6, n=2)
    for top, hidden in ((5, True), (2, False), (0, False)):
        options = OutputOptions(top_logprobs=top, hidden_states=hidden)
        engine.add(prompt(100), own, schedule=schedule, options=options)
    done = run(engine)
    for sample in range(2):
        completion, two, none = (done[request, sample] for request in range(3))
        hidden_TC, head = engines.recorded_hidden(completion), model.head.detach()
        ids = torch.tensor(completion.token_ids)
        stats = ops.token_stats(hidden_TC, head, ids, temperature=0.6)
        np.testing.assert_allclose(completion.logprobs, stats.logprob, atol=1e-5)
        np.testing.assert_allclose(completion.entropies, stats.entropy, atol=1e-4)
        best = engines.logp(model, hidden_TC, 0.6).topk(5, dim=1)
        np.testing.assert_allclose(completion.top_logprobs, best.values, atol=1e-5)
        assert completion.top_ids.tolist() == best.indices.tolist()
        assert two.top_ids.tolist() == completion.top_ids[:, :2].tolist()
        assert none.top_ids is none.hidden is two.hidden is None


def test_kept_shares_are_what_the_selection_keeps(engine) -> None:
    """Two bins and a layer of its own; layers 0 and 1 are dense."""
    own = LayerBudgets(layer=2, budgets=np.array([64, 96]))
    bins = {"lengths": [0, 115], "budgets": [48, 80], "layers": (own,)}
    schedule = Schedule(name="bins", dense_layers=(0, 1), **bins)
    (completion,) = engine.generate([prompt(100)], params(max_tokens=40), schedule=schedule)
    expected = [1.0]
    for length in range(101, 140):
        scores = torch.randn(1, 1, -(-length // 16))
        budget = torch.tensor([schedule.budget(length, 2)])
        lists = ops.select_pages(scores, torch.tensor([length]), budget, page=16)
        kept = (int(lists.counts) - 1) * 16 + (length - 1) % 16 + 1
        expected.append((2 * length + kept) / (3 * length))
    np.testing.assert_allclose(completion.kept, expected, rtol=1e-6)


# Rules that come with schedules.


def test_a_default_engine_runs_under_the_rule_of_a_schedule(model) -> None:
    """The same bits as under `Rule.of(schedule)`, one after another, and dense in between."""
    engine = engine_of(model)
    for schedule in (
        Schedule.fixed(64, dense_layers=(2,)),
        Schedule.fixed(64, first=0, last=4, name="window"),
        Schedule.fixed(48, flow="quest"),  # which stores other page summaries
        SPARSE,
    ):
        flow = engine_of(model)._rule_for(schedule).flow
        own = engine_of(model, rule=Rule.of(schedule, flow))
        expected = own.generate([LONG], params(), schedule=schedule)
        same_bits(engine.generate([LONG], params(), schedule=schedule)[0], expected[0])
        same_bits(engine.generate([LONG], params())[0], alone(model, LONG, params()))


def test_a_rule_does_not_change_under_running_requests(model) -> None:
    engine = engine_of(model)
    first = engine.add(LONG, params(), schedule=SPARSE)
    other = engine.add(LONG, params(), schedule=Schedule.fixed(96))  # of the same rule
    before = steps(engine, 4)
    for schedule in (Schedule.fixed(64, dense_layers=(0,)), Schedule.fixed(64, flow="quest")):
        with pytest.raises(ValueError, match=rf"\[{first}, {other}\]"):
            engine.add(LONG, params(), schedule=schedule)
    done = run(engine, outputs=before)
    same_bits(done[first, 0], alone(model, LONG, params(), schedule=SPARSE))

    dense = engine.add(LONG, params())  # a dense one waits for no rule, but for its page summaries
    with pytest.raises(ValueError, match="quest"):
        engine.add(LONG, params(), schedule=Schedule.fixed(64, flow="quest"))
    sparse = engine.add(LONG, params(), schedule=Schedule.fixed(64, dense_layers=(0,)))
    done = run(engine)
    same_bits(done[dense, 0], alone(model, LONG, params()))
    assert "dense layers: 0" in done[sparse, 0].attention
    with pytest.raises(ValueError, match=r"Rule\.of"):  # a rule that was given stays
        engine_of(model, rule=Rule()).add(LONG, params(), schedule=Schedule.fixed(48, last=1))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_fixed_budget_is_sparse_in_every_layer_of_small_models_too(layers: int) -> None:
    model, schedule = tiny(layers=layers), Schedule.fixed(64)
    (done,) = engine_of(model).generate([LONG], params(), schedule=schedule)
    assert done.kept[1:].max() <= 64 / len(LONG)


# Text.


def test_text_in_text_out(model) -> None:
    tiny_model = models.load("tiny", device="cpu")
    engine = Engine(tiny_model, max_context=512)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    text = "countdown 3 5 7 reach 22 <think>"
    ids = models.load_tokenizer("tiny").encode(text)
    for prompts in (text, [text], [text, text]):
        completions = engine.generate(prompts, greedy)
        assert len(completions) == (2 if len(prompts) == 2 else 1)
        for completion in completions:
            assert completion.prompt_ids.tolist() == ids
            assert completion.text
    assert engine.generate([ids], greedy)[0].text is None
    for prompts in ("abc", ["abc"]):  # no tokenizer: a model of random weights
        with pytest.raises(TypeError, match="tokenizer"):
            engine_of(model).generate(prompts, greedy)
