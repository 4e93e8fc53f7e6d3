"""Sampling: frequencies, seeds, log-probs, rows that cannot be drawn from; a step's two ends."""

import math

import pytest
import torch
from support.rowstates import make_draws, make_rows

from sparrow import ops
from sparrow.ops.reference.sampling import uniforms

LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.0, 0.5, -2.0, 1.5, 0.25])
DRAWS = 20_000
INF, NAN = float("inf"), float("nan")


def draw(logits_BV, temperature: float = 1.0, seed: int = 0, **cuts) -> ops.Draws:
    """Each row with a seed of its own; cuts are one number (or one row) for all."""
    rows = len(logits_BV)
    names = {"top_k": "top_k_B", "top_p": "top_p_B", "forbidden": "forbidden_BS"}
    many = {names[name]: torch.tensor([cut] * rows) for name, cut in cuts.items()}
    seeds_B, counters_B = seed + torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    return ops.sample(logits_BV, seeds_B, counters_B, torch.full((rows,), temperature), **many)


def expected(temperature: float, top_k: int = 0, top_p: float = 1.0, forbidden=()) -> list[float]:
    """The distribution, written out over a list."""
    mass = [math.exp(logit / temperature) for logit in LOGITS.tolist()]
    mass = [0.0 if token in forbidden else share for token, share in enumerate(mass)]
    order = sorted(range(len(mass)), key=lambda token: (-mass[token], token))
    for token in order[top_k or len(mass) :]:
        mass[token] = 0.0
    total, before = sum(mass), 0.0
    for token in order:
        share = mass[token] / total
        if top_p < 1 and before >= top_p:
            mass[token] = 0.0
        before += share
    return [m / sum(mass) for m in mass]


CUTS: list[dict] = [
    *({}, {"top_k": 3}, {"top_k": 1}, {"top_k": 100}, {"top_p": 0.8}, {"top_p": 0.01}),
    *({"top_k": 5, "top_p": 0.7}, {"forbidden": [2, -1, 6]}, {"forbidden": [2], "top_k": 2}),
    *({"forbidden": [-1, -1]}, {"forbidden": [2, 4], "top_p": 0.8, "top_k": 4}),
]


@pytest.mark.parametrize("temperature", [3.0, 1.0, 0.6, 0.05])
def test_frequencies_logprobs_and_entropy(temperature: float) -> None:
    for cuts in CUTS:
        draws = draw(LOGITS.expand(DRAWS, -1), temperature, **cuts)
        p = torch.tensor(expected(temperature, **cuts), dtype=torch.float64)
        frequency = torch.bincount(draws.tokens, minlength=len(p)) / DRAWS
        assert ((frequency - p).abs() <= 5 * (p * (1 - p) / DRAWS).sqrt()).all()
        torch.testing.assert_close(draws.logprobs, p[draws.tokens].log().float())
        entropy = -torch.special.xlogy(p, p).sum().float()
        torch.testing.assert_close(draws.entropies, entropy.expand(DRAWS), atol=1e-5, rtol=1e-5)
        assert draws.ok.all()


def test_uniform_numbers_are_splitmix64() -> None:
    """The published first outputs of the generator, and its second as counter 1."""
    outputs = [0xE220A8397B1DCDAF, 6457827717110365317, 3203168211198807973]
    numbers = uniforms(torch.tensor([0, 1234567, 1234567]), torch.tensor([0, 0, 1]))
    assert numbers.tolist() == [(output >> 11) * 2.0**-53 for output in outputs]


def test_uniform_numbers_fill_the_interval_and_neighbours_are_unrelated() -> None:
    seeds, counters = torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)
    numbers = uniforms(seeds, counters)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert len(numbers.unique()) == len(numbers)
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert 99 - 5 * math.sqrt(198) < chi_square < 99 + 5 * math.sqrt(198)
    for seed, counter in ((0, 1), (1, 0), (1, 1), (1, -1), (7, 0), (0, 64)):
        pair = [uniforms(seeds + 1000, counters + 100)]
        pair.append(uniforms(seeds + 1000 + seed, counters + 100 + counter))
        assert torch.corrcoef(torch.stack(pair))[0, 1].abs() < 5 / math.sqrt(len(seeds))


def test_a_row_alone_and_among_others_has_the_same_bits() -> None:
    """With cuts; without them see test_cpu_sampling."""
    torch.manual_seed(0)
    rows = 13
    arguments = [torch.randn(rows, 1001) * 4, torch.arange(rows) * 3, torch.arange(rows)]
    arguments += [torch.rand(rows), torch.arange(rows), torch.rand(rows)]
    arguments.append(torch.randint(-5, 1001, (rows, 6)))
    many = ops.sample(*arguments)
    for row in range(rows):
        alone = ops.sample(*(argument[row : row + 1] for argument in arguments))
        for left, right in zip(alone, many, strict=True):
            assert left.tolist() == right[row : row + 1].tolist()


def test_rows_that_cannot_be_drawn_from_are_not_ok() -> None:
    for value in (NAN, INF, -INF):
        for temperature in (0.0, 1.0):
            logits = LOGITS.repeat(3, 1)
            logits[1, 4] = value
            draws = draw(logits, temperature)
            assert draws.ok.tolist() == [True, False, True]
            assert draws.tokens[1] == draws.logprobs[1] == draws.entropies[1] == 0
            whole = draw(LOGITS.repeat(3, 1), temperature)
            assert draws.tokens[[0, 2]].tolist() == whole.tokens[[0, 2]].tolist()
    draws = draw(torch.zeros(2, 3), forbidden=[0, 2, 1, 1, -1])  # every token forbidden
    assert not draws.ok.any()
    assert draws.tokens.tolist() == draws.logprobs.tolist() == draws.entropies.tolist() == [0, 0]


def test_a_step_reads_rows_and_moves_them_on() -> None:
    rows, draws = make_rows(6, 4), make_draws(2)
    rows.length_R[2] = 37
    before = ops.RowState(*(tensor.clone() for tensor in rows))
    step = ops.step_inputs(torch.tensor([2, 5]), rows, page=16, width=3)
    assert step.lengths_B.tolist() == [38, 0]  # row 5 is padding
    assert step.positions_B.tolist() == [37, 0]
    assert step.slots_B.tolist() == [int(rows.table_RM[2, 2]) * 16 + 5, -1]
    assert torch.equal(step.table_BM, rows.table_RM[[2, 5], :3])
    own = (step.ids_B, step.seeds_B, step.counters_B, step.temperature_B)
    kept = (rows.token_R, rows.seed_R, rows.drawn_R, rows.temperature_R)
    assert all(left[0] == right[2] for left, right in zip(own, kept, strict=True))
    packed = ops.step_outputs(torch.tensor([2, 5]), draws, rows, advance=True)
    assert rows.token_R[2] == draws.tokens[0]
    assert rows.drawn_R[2] == before.drawn_R[2] + 1
    assert rows.length_R[[2, 5]].tolist() == [38, -1]
    assert torch.equal(rows.token_R[[0, 1, 3, 4]], before.token_R[[0, 1, 3, 4]])
    assert torch.equal(packed[0], draws.tokens.int())
    assert torch.equal(packed[1].view(torch.float32), draws.logprobs)
    assert torch.equal(packed[2].view(torch.float32), draws.entropies)
    assert torch.equal(packed[3].bool(), draws.ok)
    ops.step_outputs(torch.tensor([2]), make_draws(1), rows, advance=False)
    assert rows.length_R[2] == 38
