"""What an engine does for its callers: requests, samples, pages, and what completions hold."""

from typing import Any

import numpy as np
import pytest
import torch
from support.engines import (
    HIDDEN,
    SPARSE,
    VOCABULARY,
    assert_same_bits,
    count_prefill,
    engine_of,
    logp,
    params,
    prompt,
    recorded_hidden,
    run,
    same_bits,
    step_into,
    steps,
    tiny,
    tokens_of,
)

from sparrow import models, ops
from sparrow.engine import Engine, Output
from sparrow.engine.pool import PAGE
from sparrow.schema.sampling import OutputOptions
from sparrow.schema.schedule import LayerBudgets, Schedule

LONG = prompt(300, 9)


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny()


@pytest.fixture
def engine(model: models.Decoder) -> Engine:
    return engine_of(model)


# Requests.


def test_completions_come_prompt_by_prompt(engine) -> None:
    given = engine.generate([[1, 2], [3]], [params(n=2, max_tokens=3), params(max_tokens=5)])
    assert [each.prompt_ids.tolist() for each in given] == [[1, 2], [1, 2], [3]]
    assert [len(each.token_ids) for each in given] == [3, 3, 5]
    assert engine.generate([], params()) == []
    assert engine.idle


def test_steps_bring_every_token_once_and_then_the_completion(engine) -> None:
    first = engine.add([1, 2, 3], params(max_tokens=4, n=2))
    second = engine.add([4], params(max_tokens=2))
    came: dict[tuple[int, int], list[int]] = {}
    done = {}
    for output in engine.stream():
        came.setdefault((output.request, output.sample), []).extend(output.tokens)
        if output.completion is not None:
            done[output.request, output.sample] = output.completion
    assert sorted(done) == [(first, 0), (first, 1), (second, 0)]
    assert came == {key: each.token_ids.tolist() for key, each in done.items()}
    assert engine.idle


def test_requests_may_join_at_any_step(engine, model) -> None:
    early = engine.add([1, 2, 3], params())
    outputs = steps(engine, 5)
    late = engine.add(prompt(40), params(seed=2))
    done = run(engine, outputs=outputs)
    assert_same_bits(done[early, 0], engine_of(model).generate([[1, 2, 3]], params())[0])
    assert_same_bits(done[late, 0], engine_of(model).generate([prompt(40)], params(seed=2))[0])


def test_an_aborted_request_returns_what_it_has(engine, model) -> None:
    other = engine.add([4], params())
    request = engine.add([1, 2, 3], params(n=2), options=HIDDEN)
    outputs = steps(engine, 5)
    engine.abort(request)
    engine.check_integrity()
    done = run(engine, outputs=outputs)
    whole = engine_of(model).generate([[1, 2, 3]], params(n=2))
    for number, full in enumerate(whole):
        ended = done[request, number]
        assert ended.finish_reason == "abort"
        assert ended.error is None
        assert ended.token_ids.tolist() == full.token_ids[:5].tolist()
        assert len(ended.hidden) == len(ended.kept) == len(ended.weight_versions) == 5
    assert_same_bits(done[other, 0], engine_of(model).generate([[4]], params())[0])


def test_a_request_may_be_aborted_before_its_first_token(model) -> None:
    engine = engine_of(model, max_running=1)
    options = OutputOptions(top_logprobs=3, hidden_states=True)
    running = engine.add([1], params())
    waiting, chunked = engine.add([2], params(n=2)), engine.add(LONG, params(), options=options)
    outputs = steps(engine, 2)
    engine.abort(waiting)
    engine.abort(chunked)
    engine.abort(chunked)
    engine.abort(999)
    done = run(engine, outputs=outputs)
    assert done[running, 0].finish_reason == "length"
    for key in ((waiting, 0), (waiting, 1), (chunked, 0)):
        assert done[key].finish_reason == "abort"
        assert len(done[key].token_ids) == 0


def test_a_prompt_may_be_aborted_between_its_chunks(engine) -> None:
    request = engine.add(LONG, params())
    engine.step()
    engine.abort(request)
    done = run(engine)
    assert done[request, 0].finish_reason == "abort"
    assert engine.pool.available == engine.pool.pages


def test_generate_returns_its_own_completions_alone(engine) -> None:
    """An abort whose output nobody has read yet is not a completion of these prompts."""
    aborted = engine.add([1, 2], params())
    engine.abort(aborted)
    (completion,) = engine.generate([[3]], params(max_tokens=2))
    assert completion.finish_reason == "length"
    (unread,) = engine.stream()
    assert unread.request == aborted
    assert unread.completion.finish_reason == "abort"


def test_a_stream_that_is_left_loses_nothing(engine) -> None:
    """Of a step that ends two samples one was looked at; the other is still to come."""
    request = engine.add([1, 2, 3], params(n=2, max_tokens=1))
    stream = engine.stream()
    seen = [next(stream)]
    stream.close()
    seen += engine.stream()
    assert sorted((each.request, each.sample) for each in seen) == [(request, 0), (request, 1)]


# Sampling.


def test_equal_seeds_give_equal_samples_and_others_differ(engine) -> None:
    first = engine.generate([[1, 2, 3]], params(n=3))
    same_bits(first, engine.generate([[1, 2, 3]], params(n=3)))
    other = engine.generate([[1, 2, 3]], params(n=3, seed=12))
    assert len({tuple(each.token_ids) for each in [*first, *other]}) == 6
    assert len({each.seed for each in [*first, *other]}) == 6


def test_without_a_seed_samples_differ_and_the_global_one_is_left_alone(engine) -> None:
    state = torch.get_rng_state()
    first, second = engine.generate([[1, 2, 3]] * 2, params(seed=None, max_tokens=8))
    assert first.token_ids.tolist() != second.token_ids.tolist()
    assert torch.equal(state, torch.get_rng_state())


def test_greedy_takes_the_best_token(engine, model) -> None:
    options = OutputOptions(hidden_states=True, top_logprobs=2)
    (completion,) = engine.generate([prompt(20)], params(temperature=0.0), options=options)
    best = logp(model, recorded_hidden(completion)).argmax(1)
    assert completion.token_ids.tolist() == best.tolist()
    assert completion.top_ids[:, 0].tolist() == best.tolist()
    assert not completion.logprobs.any()
    assert not completion.entropies.any()


def test_top_k_and_top_p_cut_and_renormalise(engine, model) -> None:
    own = params(top_k=4, temperature=0.8)
    (by_k,) = engine.generate([prompt(20)], own, options=HIDDEN)
    p = logp(model, recorded_hidden(by_k), 0.8).exp()
    ids = torch.tensor(by_k.token_ids).long()
    top = p.topk(4, dim=1)
    assert (top.indices == ids[:, None]).any(1).all()
    expected = (p.gather(1, ids[:, None])[:, 0] / top.values.sum(1)).log()
    np.testing.assert_allclose(by_k.logprobs, expected, atol=1e-4)
    (by_p,) = engine.generate([prompt(20)], params(top_p=0.3), options=HIDDEN)
    p = logp(model, recorded_hidden(by_p)).exp()
    own_p = p.gather(1, torch.tensor(by_p.token_ids).long()[:, None])
    assert (torch.where(p > own_p, p, 0).sum(1) < 0.3 + 1e-5).all()


def test_stops_minimum_and_maximum(engine) -> None:
    (free,) = engine.generate([[1, 2, 3]], params())
    stop = int(free.token_ids[4])
    end = free.token_ids.tolist().index(stop) + 1
    (ended,) = engine.generate([[1, 2, 3]], params(stop_token_ids=(stop,)))
    assert ended.finish_reason == "stop"
    assert ended.token_ids.tolist() == free.token_ids[:end].tolist()
    stops = tuple(range(32))
    (longer,) = engine.generate([[1, 2, 3]], params(stop_token_ids=stops, min_tokens=15))
    assert not set(longer.token_ids[:15].tolist()) & set(stops)
    (exact,) = engine.generate([[1, 2, 3]], params(max_tokens=1))
    assert exact.finish_reason == "length"
    assert exact.token_ids.tolist() == free.token_ids[:1].tolist()


def test_a_row_forgets_the_stops_of_who_was_there_before(model) -> None:
    engine = engine_of(model, max_running=1)
    engine.generate([[1]], params(stop_token_ids=tuple(range(20)), min_tokens=5, max_tokens=6))
    (later,) = engine.generate([[1, 2, 3]], params(top_k=VOCABULARY))
    (fresh,) = engine_of(model).generate([[1, 2, 3]], params(top_k=VOCABULARY))
    assert_same_bits(later, fresh)


def test_the_models_own_end_stops_unless_ignored() -> None:
    model = tiny(eos_ids=tuple(range(60)))
    engine = engine_of(model)
    (ended,) = engine.generate([[1, 2, 3]], params(ignore_eos=False, max_tokens=60))
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] < 60
    (ignored,) = engine.generate([[1, 2, 3]], params(max_tokens=60))
    assert ignored.finish_reason == "length"


# Pages.


def held(engine: Engine) -> int:
    return engine.pool.pages - engine.pool.available


def test_samples_of_a_group_share_the_prompts_pages(engine) -> None:
    """18 full pages once, the unfinished one for each of 4: not 4 times 19."""
    engine.add(LONG, params(n=4, max_tokens=3))
    steps(engine, 3)
    assert len(engine.scheduler.running) == 4
    assert held(engine) == 18 + 4


def test_unfinished_pages_are_never_shared_in_place(engine) -> None:
    engine.add(LONG, params(n=4, max_tokens=40))
    engine.add(LONG, params(seed=3, max_tokens=40))
    for _ in range(30):
        engine.step()
        running = engine.scheduler.running
        written = [sample.context.pages[(sample.length - 2) // PAGE] for sample in running]
        tails = [page for s in running for page in s.context.pages[len(LONG) // PAGE :]]
        assert len(set(written)) == len(written)
        assert all(engine.pool._references[page] == 1 for page in tails)
        engine.check_integrity()


def test_a_prompt_of_whole_pages_is_shared_whole(engine, model) -> None:
    given = engine.generate([prompt(32)], params(n=3))
    same_bits(given, engine_of(model, reuse="none").generate([prompt(32)], params(n=3)))


def test_a_later_request_reuses_the_prefix(engine) -> None:
    """Whole chunks of 128 tokens on a CPU, so that bits do not depend on what was cached."""
    engine.generate([LONG], params(max_tokens=2))
    passes = count_prefill(engine)
    engine.generate([LONG], params(max_tokens=2))
    assert tokens_of(passes) == 300 - 256
    engine.generate([[*LONG[:200], 7, *LONG[201:]]], params(max_tokens=2))
    assert tokens_of(passes) == 300 - 256 + 300 - 128


def test_the_last_token_of_a_prompt_is_always_computed(engine, model) -> None:
    passes = count_prefill(engine)
    whole = LONG[:256]
    first, second = (engine.generate([whole], params(max_tokens=3)) for _ in range(2))
    assert tokens_of(passes) == 256 + 128
    same_bits(first, second)


def test_without_reuse_every_prompt_is_computed(model) -> None:
    engine = engine_of(model, reuse="none")
    passes = count_prefill(engine)
    engine.generate([LONG, LONG], params(max_tokens=2))
    assert tokens_of(passes) == 600
    assert engine.pool.cached == 0


@pytest.mark.parametrize(("reuse", "schedule", "computed"), [
    ("all", None, 40), ("prompts", None, 168), ("all", SPARSE, 168),
])  # fmt: skip
def test_answers_are_reused_where_asked_for_and_dense(model, reuse, schedule, computed) -> None:
    """A second turn: prompt, answer and 39 more tokens, the answer's last one included."""
    engine = engine_of(model, reuse=reuse)
    (first,) = engine.generate([LONG[:200]], params(max_tokens=60), schedule=schedule)
    turn = [*LONG[:200], *first.token_ids.tolist(), *prompt(36, 3)]
    passes = count_prefill(engine)
    (second,) = engine.generate([turn], params(max_tokens=4))
    assert tokens_of(passes) == computed
    (fresh,) = engine_of(model).generate([turn], params(max_tokens=4))
    assert second.token_ids.tolist() == fresh.token_ids.tolist()
    np.testing.assert_allclose(second.logprobs, fresh.logprobs, atol=1e-4)


# What completions hold.


@pytest.mark.parametrize("schedule", [None, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_statistics_are_of_the_recorded_hidden_states(engine, model, schedule, temperature) -> None:
    options = OutputOptions(hidden_states=True, top_logprobs=5)
    own = params(temperature=temperature, n=2)
    given = engine.generate([prompt(100)], own, schedule=schedule, options=options)
    for completion in given:
        hidden, head = recorded_hidden(completion), model.head.detach()
        ids = torch.tensor(completion.token_ids)
        stats = ops.token_stats(hidden, head, ids, temperature=temperature)
        np.testing.assert_allclose(completion.logprobs, stats.logprob, atol=1e-5)
        np.testing.assert_allclose(completion.entropies, stats.entropy, atol=1e-4)
        best = logp(model, hidden, temperature).topk(5, dim=1)
        np.testing.assert_allclose(completion.top_logprobs, best.values, atol=1e-5)
        assert completion.top_ids.tolist() == best.indices.tolist()


def test_options_of_one_request_are_not_those_of_another(engine) -> None:
    """Also not where they share a batch and ask for different numbers of tokens."""
    wants = [{}, {"top_logprobs": 2}, {"top_logprobs": 7, "hidden_states": True}]
    for seed, want in enumerate(wants):
        engine.add([1, 2], params(max_tokens=4, seed=seed), options=OutputOptions(**want))
    done = run(engine)
    none, two, seven = (done[number, 0] for number in range(3))
    assert none.top_ids is None
    assert none.hidden is None
    assert two.top_ids.shape == two.top_logprobs.shape == (4, 2)
    assert two.hidden is None
    assert seven.top_ids.shape == (4, 7)
    assert seven.hidden.shape == (4, 64)


def test_the_record_says_what_ran(engine) -> None:
    (dense,) = engine.generate([[1, 2]], params(max_tokens=3))
    assert dense.attention == "dense"
    assert dense.weight_versions.tolist() == [0, 0, 0]
    assert dense.kept.tolist() == [1, 1, 1]
    assert (dense.swaps, dense.restarts, dense.recomputed, dense.adapter) == (0, 0, (), None)
    (sparse,) = engine.generate([[1, 2]], params(max_tokens=3), schedule=SPARSE)
    assert sparse.attention == SPARSE.describe()


def test_kept_shares_are_what_the_selection_keeps(engine) -> None:
    """Two bins and a layer of its own; layers 0 and 1 are dense."""
    own = LayerBudgets(layer=2, budgets=np.array([64, 96]))
    schedule = Schedule(
        name="bins", lengths=np.array([0, 115]), budgets=np.array([48, 80]), layers=(own,)
    )
    (completion,) = engine.generate([prompt(100)], params(max_tokens=40), schedule=schedule)
    expected = [1.0]
    for length in range(101, 140):
        scores = torch.randn(1, 1, -(-length // 16))
        budget = torch.tensor([schedule.budget(length, 2)])
        lists = ops.select_pages(scores, torch.tensor([length]), budget, page=16)
        kept = (int(lists.counts) - 1) * 16 + (length - 1) % 16 + 1
        expected.append((2 * length + kept) / (3 * length))
    np.testing.assert_allclose(completion.kept, expected, rtol=1e-6)


# Trouble.


def nan_model() -> models.Decoder:
    """Token 13 gives NaN wherever it stands; the head is not tied to it."""
    model = tiny(tied=False)
    with torch.no_grad():
        model.embed.weight[13] = float("nan")
    return model


def test_bad_logits_fail_their_request_and_no_other() -> None:
    model = nan_model()
    engine = engine_of(model, pages=20, max_context=200)
    healthy = [token for token in prompt(40) if token != 13]
    good = engine.add(healthy, params(top_k=12, stop_token_ids=(13,), min_tokens=24))
    bad = engine.add([1, 13, 2], params(n=2), schedule=SPARSE)
    done = run(engine)
    for number in range(2):
        assert done[bad, number].finish_reason == "error"
        assert "NaN" in done[bad, number].error
        assert len(done[bad, number].token_ids) == 0
    assert done[good, 0].finish_reason == "length"
    own = params(top_k=12, stop_token_ids=(13,), min_tokens=24)
    assert_same_bits(done[good, 0], engine_of(model).generate([healthy], own)[0])


def test_pages_that_held_nan_do_no_harm_later() -> None:
    """The pool is just large enough for one sequence, so its pages are written over."""
    model = nan_model()
    engine = engine_of(model, pages=8, max_context=128)
    (bad,) = engine.generate([[13] * 100], params())
    assert bad.finish_reason == "error"
    own = params(stop_token_ids=(13,), min_tokens=24)
    healthy = [token for token in prompt(50) if token != 13]
    for schedule in (None, SPARSE):
        (good,) = engine.generate([healthy], own, schedule=schedule)
        (fresh,) = engine_of(model).generate([healthy], own, schedule=schedule)
        assert_same_bits(good, fresh)


def test_a_sample_that_goes_bad_later_keeps_what_it_has(engine, model) -> None:
    """NaN in the pages of one running sample; its neighbour of the same group goes on."""
    request = engine.add(prompt(20), params(n=2))
    outputs = steps(engine, 6)
    victim = engine.scheduler.running[1]
    engine.runner.cache.field("v", 1)[victim.context.pages[-1]] = float("nan")
    done = run(engine, outputs=outputs)
    whole = engine_of(model).generate([prompt(20)], params(n=2))
    assert_same_bits(done[request, 0], whole[0])
    ended = done[request, 1]
    assert ended.finish_reason == "error"
    assert ended.token_ids.tolist() == whole[1].token_ids[:6].tolist()


def _break_once(engine: Engine, name: str) -> None:
    inner = getattr(engine.runner, name)

    def broken(*_: Any) -> None:
        setattr(engine.runner, name, inner)
        raise RuntimeError("out of memory")

    setattr(engine.runner, name, broken)


@pytest.mark.parametrize("part", ["prefill", "decode", "first_draws"])
def test_after_a_failed_generate_nothing_is_left_behind(engine, model, part) -> None:
    """Above all no page that is offered for reuse although it was never computed."""
    _break_once(engine, part)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([LONG], params(max_tokens=6))
    assert engine.idle
    engine.check_integrity()
    (again,) = engine.generate([LONG], params(max_tokens=6))
    assert_same_bits(again, engine_of(model).generate([LONG], params(max_tokens=6))[0])


@pytest.mark.parametrize("part", ["prefill", "decode", "first_draws"])
def test_after_a_failed_step_nothing_goes_on_from_what_it_left(engine, model, part) -> None:
    """Wrong tokens without a word are no option: those concerned must go first."""
    request = engine.add(LONG, params(max_tokens=6))
    _break_once(engine, part)
    outputs: list[Output] = []
    with pytest.raises(RuntimeError, match="out of memory"):
        step_into(outputs, engine)
    with pytest.raises(RuntimeError, match="a step has failed: abort every request"):
        engine.step()
    engine.abort(request)
    again = engine.generate([LONG], params(max_tokens=6))
    same_bits(again, engine_of(model).generate([LONG], params(max_tokens=6)))


def test_the_header_says_what_runs(engine) -> None:
    header = engine.header()
    for part in ("qwen3", "v0", "float32 on cpu", "page 16", "block-mean", "up to 64 at once"):
        assert part in header


def test_an_interrupt_while_planning_leaves_no_page_that_was_never_computed(engine, model) -> None:
    """The keys of a prompt are published with its plan: if the plan is not run, they must go."""
    publish = engine.scheduler._publish

    def interrupted(*args: Any) -> None:
        publish(*args)
        raise KeyboardInterrupt

    engine.scheduler._publish = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([LONG], params(max_tokens=6))
    engine.scheduler._publish = publish
    longer = [*LONG, 5, 6, 7]
    again = engine.generate([longer], params(max_tokens=6))
    same_bits(again, engine_of(model).generate([longer], params(max_tokens=6)))


def test_after_a_failed_step_aborts_are_delivered_and_the_loop_ends(engine) -> None:
    request = engine.add(LONG, params(max_tokens=6))
    _break_once(engine, "prefill")
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.abort(request)
    (output,) = engine.stream()
    assert output.completion.finish_reason == "abort"
    assert engine.idle
