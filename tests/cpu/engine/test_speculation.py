"""Exact decoding: with shared noise the tokens of dense decoding, else its distribution."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from support.engines import (
    SPARSE,
    VOCABULARY,
    alone,
    changed,
    engine_of,
    logp,
    params,
    prompt,
    run,
    same_bits,
    steps,
    tiny,
)

from sparrow import ops
from sparrow.engine import Engine
from sparrow.engine.scheduler import SwapFull
from sparrow.models import Decoder, load, load_tokenizer
from sparrow.models.attention import Packed
from sparrow.models.lora import Adapter
from sparrow.schema.sampling import (
    Completion,
    OutputOptions,
    SamplingParams,
    SpeculativeParams,
)
from sparrow.schema.schedule import Schedule
from sparrow.sparse.flows import library
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.rule import Rule
from sparrow.tasks import PUZZLES

PROMPTS = [[5, 9, 2], prompt(40), prompt(16, 1), prompt(150, 2)]


def shared(draft_tokens: int = 4, reselect: int = 1) -> SpeculativeParams:
    settings = {"draft_tokens": draft_tokens, "reselect": reselect}
    return SpeculativeParams(acceptance="shared_noise", **settings)


@pytest.mark.parametrize(
    ("changes", "drafts"),
    [
        ({"n": 2}, {"draft_tokens": 1}),
        ({"n": 2}, {"draft_tokens": 8, "reselect": 3}),
        ({"temperature": 0.7, "top_k": 30, "top_p": 0.9}, {"draft_tokens": 3}),
        ({"temperature": 0.0}, {"draft_tokens": 16, "reselect": 16}),
        ({"stop_token_ids": tuple(range(0, 60, 2)), "min_tokens": 9}, {"draft_tokens": 8}),
        ({"max_tokens": 1}, {"draft_tokens": 3}),
        ({"max_tokens": 2}, {"draft_tokens": 16}),
    ],
    ids=lambda part: ",".join(f"{key}={value}"[:20] for key, value in part.items()),
)
def test_shared_noise_equals_dense_decoding(
    model, changes: dict[str, Any], drafts: dict[str, Any]
) -> None:
    own = params(**{"max_tokens": 40, **changes})
    wanted = engine_of(model).generate(PROMPTS, own)
    speculative = SpeculativeParams(acceptance="shared_noise", **drafts)
    given = engine_of(model).generate(PROMPTS, own, schedule=SPARSE, speculative=speculative)
    same_bits(given, wanted)
    for mine, other in zip(given, wanted, strict=True):
        assert mine.weight_versions.tolist() == other.weight_versions.tolist()


@pytest.mark.parametrize(
    "flow",
    [library.fine_means(4), replace(library.quest, layers=2), library.window],
    ids=lambda flow: flow.name,
)
def test_any_flow_budget_and_company_gives_the_tokens_of_dense_decoding(model, flow: Flow) -> None:
    """Dense, sparse and exact requests in one batch, under both rules, of several draft lengths."""
    rule = Rule(flow=flow, last=3)
    budgets = [Schedule.fixed(budget, flow=flow.name, last=3) for budget in (64, 80, 128)]
    ways = [(None, None), (budgets[0], None), (budgets[1], SpeculativeParams(draft_tokens=5))]
    ways += [(budgets[0], shared(1)), (budgets[1], shared(7, 3)), (budgets[2], shared(20, 4))]
    asked = [(ids, number) for ids in PROMPTS[1:] for number in range(len(ways))]

    def answers(mixed: bool) -> list[Completion]:
        engine = engine_of(model, rule=rule, pages=400)
        for ids, number in asked:
            schedule, how = ways[number] if mixed or ways[number][1] is None else (None, None)
            own = params(seed=number, max_tokens=33)
            engine.add(ids, own, schedule=schedule, speculative=how)
        return [completion for _, completion in sorted(run(engine).items())]

    for (_, number), mine, other in zip(asked, answers(True), answers(False), strict=True):
        if ways[number][1] is None or ways[number][1].acceptance == "shared_noise":
            same_bits(mine, other)


def test_rejection_samples_the_policys_distribution() -> None:
    """All answers of three tokens over a vocabulary of 5, by drafts far from the policy."""
    small = tiny(vocabulary=5, layers=2)
    ids, sparse = [token % 5 for token in prompt(150, 2)], Schedule.fixed(48)
    own = params(n=4000, max_tokens=4, seed=1)
    engine = engine_of(small, pages=400, max_running=64)
    completions = engine.generate(
        [ids], own, schedule=sparse, speculative=SpeculativeParams(draft_tokens=2)
    )
    drafted = sum(completion.speculation.draft_tokens for completion in completions)
    assert sum(c.speculation.accepted_tokens for c in completions) < 0.9 * drafted
    counts = np.zeros((5,) * 4)
    for completion in completions:
        counts[tuple(completion.token_ids)] += 1
    expected = np.zeros_like(counts)
    for answer in np.ndindex(counts.shape):
        sequence = torch.tensor([*ids, *answer])
        with torch.no_grad():
            bounds = torch.tensor([0, len(sequence)])
            hidden = small(sequence, torch.arange(len(sequence)), Packed(bounds=bounds))
            steps_4V = logp(small, hidden[len(ids) - 1 : -1])
        expected[answer] = steps_4V[range(4), answer].sum().exp()
    likely = expected * 4000 > 5  # a chi-square test wants enough of each; the rest is one class
    rest = [counts[~likely].sum()], [expected[~likely].sum()]
    observed = np.concatenate([counts[likely], rest[0]])
    wanted = np.concatenate([expected[likely], rest[1]])
    assert chisquare(observed, wanted / wanted.sum() * observed.sum()).pvalue > 1e-4


def test_swaps_sleep_and_aborts_change_no_token(model) -> None:
    """Too few pages for all: the youngest wait in host memory, rounds over."""
    own = [params(seed=seed, max_tokens=60) for seed in range(4)]
    wanted = [alone(model, PROMPTS[3], each) for each in own]
    engine = engine_of(model, pages=34)
    numbers = [engine.add(PROMPTS[3], each, schedule=SPARSE, speculative=shared(5)) for each in own]
    doomed = engine.add(PROMPTS[3], params(seed=9), schedule=SPARSE, speculative=shared(3))
    outputs = [output for _ in range(6) for output in engine.step()]
    engine.sleep()
    engine.wake()
    engine.abort(doomed)
    done = run(engine, outputs=outputs)
    assert sum(completion.swaps for completion in done.values()) > 1
    for number, completion in zip(numbers, wanted, strict=True):
        same_bits(done[number, 0], completion)
    assert done[doomed, 0].finish_reason == "abort"


def test_an_interrupted_round_leaves_nothing_behind(model, monkeypatch) -> None:
    """Neither in the rows, nor in what later requests draw."""
    engine, own = engine_of(model, speculative=shared(6)), params(max_tokens=30)
    drafts = {"schedule": SPARSE, "speculative": shared(6)}
    verify = engine.runner.verify
    for rounds in (0, 2):
        left = iter(range(rounds))

        def interrupted(samples: Any, left: Any = left) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return verify(samples)

        monkeypatch.setattr(engine.runner, "verify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, own, **drafts)
        monkeypatch.undo()
        few = PROMPTS[: 1 + rounds]
        given = engine.generate(few, own, schedule=SPARSE, speculative=shared(2))
        same_bits(given, engine_of(model).generate(few, own))
        engine.check_integrity()


def test_a_request_without_room_for_drafts_leaves_the_engine_as_it_was(model) -> None:
    """The running sample cannot be swapped out to make room; afterwards there is."""
    engine = engine_of(model, swap_bytes=0)
    drafts = {"schedule": SPARSE, "speculative": shared(2)}
    running = engine.add(PROMPTS[1], params())
    outputs = steps(engine, 3)
    for _ in range(2):
        with pytest.raises(SwapFull):
            engine.add(PROMPTS[1], params(), **drafts)
    done = run(engine, outputs=outputs)
    same_bits(done[running, 0], alone(model, PROMPTS[1], params()))
    same_bits(engine.generate([PROMPTS[1]], params(), **drafts)[0], done[running, 0])


def test_another_schedule_must_be_able_to_draft_too(model) -> None:
    engine = engine_of(model)
    drafts = {"schedule": Schedule.fixed(64, last=3), "speculative": shared(20)}
    request = engine.add(PROMPTS[1], params(), **drafts)
    with pytest.raises(ValueError, match="draft_tokens=20"):
        engine.reschedule(request, SPARSE)
    same_bits(run(engine)[request, 0], alone(model, PROMPTS[1], params()))


def test_a_round_ends_at_a_stop_token_and_nothing_beyond_is_recorded(model) -> None:
    options = OutputOptions(top_logprobs=3, hidden_states=True)
    own = params(max_tokens=60, stop_token_ids=tuple(range(0, VOCABULARY, 9)), n=6)
    wanted = engine_of(model).generate([PROMPTS[1]], own, options=options)
    engine = engine_of(model)
    request = engine.add(PROMPTS[1], own, schedule=SPARSE, speculative=shared(8), options=options)
    done = run(engine)
    assert {completion.finish_reason for completion in wanted} >= {"stop"}
    for sample, completion in enumerate(wanted):
        mine = done[request, sample]
        same_bits(mine, completion)
        spec = mine.speculation
        ended = spec.rounds + spec.accepted_tokens - (len(mine.token_ids) - 1)
        assert ended in (0, 1)  # an accepted draft that stops leaves no further token
        for name in ("hidden", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(completion, name))


def test_statistics_say_what_was_drafted_and_accepted(model) -> None:
    """Dense drafts are all accepted, so every round but the last has all its tokens."""
    dense = Schedule.fixed(4096)
    own = params(max_tokens=38)
    (completion,) = engine_of(model).generate(
        [PROMPTS[1]], own, schedule=dense, speculative=SpeculativeParams(draft_tokens=5)
    )
    spec = completion.speculation
    assert spec.drafted_by_position == spec.accepted_by_position == (6,) * 5
    assert (spec.rounds, spec.draft_tokens, spec.accepted_tokens) == (7, 30, 30)
    (sparse,) = engine_of(model).generate(
        [PROMPTS[3]], own, schedule=SPARSE, speculative=SpeculativeParams(draft_tokens=5)
    )
    spec = sparse.speculation
    assert 0 < spec.accepted_tokens < spec.draft_tokens
    assert spec.rounds + spec.accepted_tokens == 37  # the first token comes from the prompt
    # Drafts behind a rejected one count too: shares of rounds fall from position to position.
    first, *others = spec.accepted_by_position
    assert spec.drafted_by_position[0] >= spec.rounds - 1
    assert all(before >= after for before, after in pairwise([first, *others]))
    assert spec.draft_tokens >= 5 * (spec.rounds - 2)


def test_what_cannot_draft_is_refused(model) -> None:
    stateful = library.running_average(0.7)
    engine = engine_of(model, rule=Rule(flow=stateful))
    with pytest.raises(ValueError, match="state"):
        engine.add(
            [1], params(), schedule=Schedule.fixed(64, flow=stateful.name), speculative=shared()
        )
    with pytest.raises(ValueError, match="draft_tokens"):
        engine_of(model).add([1], params(), schedule=SPARSE, speculative=shared(17))
    with pytest.raises(ValueError, match="rule"):
        engine_of(model, rule=None).add([1], params(), schedule=SPARSE, speculative=shared())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"speculative": shared()}, "schedule"),
        ({"speculative": {"draft_tokens": 4}, "schedule": SPARSE}, "speculative"),
        ({"params": {"max_tokens": 4}}, "params"),
    ]
    for changes, name in wrong:
        with pytest.raises(ValueError, match=name):
            engine_of(model).add([1], **{"params": params(), **changes})


def test_adapters_and_new_weights_between_rounds(model) -> None:
    """Restarted samples are those of the new weights; others say which version drew which token."""
    own, adapter = params(max_tokens=24), Adapter.random(model.spec, 4, b_std=0.5)
    for name in (None, "one"):
        exact, dense = engine_of(tiny()), engine_of(tiny())
        for engine in (exact, dense):
            engine.load_adapter("one", adapter)
        drafts = {"schedule": SPARSE, "speculative": shared(6)}
        restarted = exact.add(PROMPTS[3], own, adapter=name, **drafts)
        outputs = [output for _ in range(4) for output in exact.step()]
        for engine in (exact, dense):
            engine.update(changed(model), version=3, in_flight="restart")
        (wanted,) = dense.generate([PROMPTS[3]], own, adapter=name)
        done = run(exact, outputs=outputs)[restarted, 0]
        same_bits(done, wanted)
        assert done.restarts == 1

        continued = exact.add(PROMPTS[3], own, adapter=name, **drafts)
        outputs = [output for _ in range(5) for output in exact.step()]
        exact.update(changed(model, seed=8), version=4)
        versions = run(exact, outputs=outputs)[continued, 0].weight_versions.tolist()
        assert versions == sorted(versions)
        assert {*versions} == {3, 4}


# Drafts with weights in 8 bits.

INT8 = SpeculativeParams(acceptance="shared_noise", draft_tokens=4, weights="int8")


def int8_of(engine: Engine) -> Any:
    assert engine.runner.int8 is not None
    return engine.runner.int8


@pytest.mark.parametrize("tied", [False, True])
def test_drafts_in_8_bits_change_no_token(tied: bool) -> None:
    model = tiny(tied=tied)
    wanted = engine_of(model).generate(PROMPTS, params(max_tokens=40))
    engine = engine_of(model)
    before = engine.memory.int8
    given = engine.generate(PROMPTS, params(max_tokens=40), schedule=SPARSE, speculative=INT8)
    same_bits(given, wanted)
    assert before == 0
    matrices = [
        p for p in model.parameters() if p.ndim == 2 and (tied or p is not model.embed.weight)
    ]
    outputs = sum(len(matrix) for matrix in matrices)
    assert engine.memory.int8 == sum(matrix.numel() for matrix in matrices) + 4 * outputs
    assert "8 bits" in engine.memory.describe()
    head = ops.Int8Weight.quantise(model.head.detach())
    assert torch.equal(int8_of(engine).head.data_EI, head.data_EI)


def test_only_drafts_run_in_8_bits(model, monkeypatch) -> None:
    """Beside a dense request they run with the model's weights."""
    (alone,) = engine_of(model).generate([PROMPTS[1]], params(max_tokens=60))
    engine, used, mixed = engine_of(model), list[bool](), list[bool]()
    exact = engine.add(PROMPTS[3], params(max_tokens=20), schedule=SPARSE, speculative=INT8)
    dense = engine.add(PROMPTS[1], params(max_tokens=60))
    plain, decode = engine.runner._decoder, engine.runner.decode

    def decoder(merged: bool, int8: bool = False) -> Decoder:
        used.append(int8)
        return plain(merged, int8)

    def step(samples: Any, **options: Any) -> Any:
        mixed.append(any(sample.request.speculative is None for sample in samples))
        used.clear()
        output = decode(samples, **options)
        assert used == [not mixed[-1]]
        return output

    monkeypatch.setattr(engine.runner, "_decoder", decoder)
    monkeypatch.setattr(engine.runner, "decode", step)
    done = run(engine)
    assert {*mixed} == {True, False}
    same_bits([done[dense, 0]], [alone])
    assert len(done[exact, 0].token_ids) == 20


@pytest.mark.parametrize("stay", ["keep", "host", "drop"])
def test_weights_in_8_bits_follow_the_model(model, stay: Any) -> None:
    """Through updates in place and sleep; quantised once for each version."""
    engine = engine_of(tiny())
    engine.generate(PROMPTS[:2], params(), schedule=SPARSE, speculative=INT8)
    place = int8_of(engine).head.data_EI.data_ptr()
    engine.update(changed(model), version=3)
    given = engine.generate(PROMPTS[:2], params(), schedule=SPARSE, speculative=INT8)
    assert int8_of(engine).head.data_EI.data_ptr() == place
    other = engine_of(tiny())
    other.update(changed(model), version=3)
    same_bits(given, other.generate(PROMPTS[:2], params()))
    fresh = ops.Int8Weight.quantise(engine.model.head.detach())
    assert torch.equal(int8_of(engine).head.data_EI, fresh.data_EI)
    edition = engine._int8._edition
    engine.sleep(weights=stay)
    engine.wake()
    if stay == "drop":
        engine.update(changed(model, seed=8), version=4)
    engine.generate(PROMPTS[:2], params(), schedule=SPARSE, speculative=INT8)
    fresh = ops.Int8Weight.quantise(engine.model.head.detach())
    assert torch.equal(int8_of(engine).head.data_EI, fresh.data_EI)
    assert engine._int8._edition == edition + (stay == "drop")


def test_the_actor_drafts_in_8_bits(model) -> None:
    """Of the merged weights; and of the model's own again when the actor is gone."""
    engine, adapter = engine_of(model), Adapter.random(model.spec, 4, b_std=0.5)
    wanted = engine_of(model).generate(PROMPTS, params())
    exact: Any = {"schedule": SPARSE, "speculative": INT8}
    same_bits(engine.generate(PROMPTS, params(), **exact), wanted)
    plain = int8_of(engine).layers[0].attention.qkv.weight.data_EI.clone()
    engine.set_actor(adapter)
    same_bits(engine.generate(PROMPTS, params(), **exact), wanted)
    merged = engine._actor.decoder.layers[0].attention.qkv.weight
    adapted = int8_of(engine).layers[0].attention.qkv.weight.data_EI
    assert torch.equal(adapted, ops.Int8Weight.quantise(merged).data_EI)
    assert not torch.equal(adapted, plain)
    engine.set_actor(None)
    same_bits(engine.generate(PROMPTS, params(), **exact), wanted)
    assert torch.equal(int8_of(engine).layers[0].attention.qkv.weight.data_EI, plain)


def test_adapters_of_requests_draft_with_16_bits(model) -> None:
    engine, adapter = engine_of(model), Adapter.random(model.spec, 4, b_std=0.5)
    engine.load_adapter("one", adapter)
    dense = engine.generate(PROMPTS, params(), adapter="one")
    exact = engine.generate(PROMPTS, params(), adapter="one", schedule=SPARSE, speculative=INT8)
    same_bits(exact, dense)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flow",
    [library.block_mean, library.quest, library.fine_means(4), library.value_gated, library.window],
    ids=lambda flow: flow.name,
)
def test_a_thousand_answers_equal_dense_decoding(flow: Flow) -> None:
    """200 answers of `tiny` for each of five flows: random budgets, draft lengths, neighbours."""
    random = Random(flow.name)
    model = load("tiny", device="cpu")
    tokenizer = load_tokenizer(model.source)
    asked = []
    for _ in range(50):
        row = PUZZLES["assignments"].row(random.randrange(10**6), random.randrange(100, 160))
        ids = tokenizer(row.prompt, add_special_tokens=False)["input_ids"]
        asked.append((ids, SamplingParams(n=4, max_tokens=72, seed=random.randrange(2**31))))
    wanted = Engine(model, max_context=1024).generate(*zip(*asked, strict=True))
    engine = Engine(model, max_context=1024, rule=Rule(flow=flow, last=3), max_running=24)
    numbers = []
    for ids, own in asked:
        budget = Schedule.fixed(random.randrange(64, 112, 16), flow=flow.name, last=3)
        drafts = shared(random.randrange(1, 17), random.randrange(1, 6))
        numbers.append(engine.add(ids, own, schedule=budget, speculative=drafts))
        if random.random() < 0.5:
            other = random.choice([None, SpeculativeParams(draft_tokens=random.randrange(1, 9))])
            schedule = budget if other else random.choice([None, budget])
            engine.add(ids, own.replace(n=1), schedule=schedule, speculative=other)
    done = run(engine, most=10**5)
    mine = [done[number, sample] for number in numbers for sample in range(4)]
    for exact, dense in zip(mine, wanted, strict=True):
        assert exact.token_ids.tolist() == dense.token_ids.tolist()
    drafted = sum(completion.speculation.draft_tokens for completion in mine)
    assert 0.2 * drafted < sum(c.speculation.accepted_tokens for c in mine) < drafted
