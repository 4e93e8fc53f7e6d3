"""The sampling and row kernels against their definitions: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from support.rowstates import check_steps

pytest.importorskip("triton")
from sparrow.ops.kernels import sampling as kernel
from sparrow.ops.reference import sampling as definition

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of NaN in interpreters
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch) -> None:
    """Several chunks in a vocabulary that the interpreter can stand."""
    monkeypatch.setattr(kernel, "CHUNK", 16)


def check(logits, seeds, counters, temperatures) -> definition.Draws:
    arguments = (
        logits.to(DEVICE),
        torch.as_tensor(seeds, device=DEVICE),
        torch.as_tensor(counters, device=DEVICE),
        torch.as_tensor(temperatures, device=DEVICE, dtype=torch.float32),
    )
    assert kernel.supports("sample", *arguments)
    expected, actual = definition.sample.definition(*arguments), kernel.sample(*arguments)
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    assert actual.tokens.tolist() == expected.tokens.tolist()
    assert actual.ok.tolist() == expected.ok.tolist()
    for left, right in (
        (actual.logprobs, expected.logprobs),
        (actual.entropies, expected.entropies),
    ):
        torch.testing.assert_close(left, right, atol=3e-6, rtol=3e-6)
    return actual


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_draws(spread: float) -> None:
    for vocabulary in (1, 16, 17, 101):
        torch.manual_seed(vocabulary)
        logits, rows = torch.randn(6, vocabulary) * spread, torch.arange(6)
        check(logits, rows * 7, rows, [1.0, 0.7, 0.01, 2.0, 0.0, 0.5])


def test_uniform_numbers_are_the_definition_s() -> None:
    """In a flat distribution the token is the uniform number, to within one part in 240."""
    seeds = [0, 1, -1, 2**62, -(2**63), 2**63 - 1, 1234567, 42]
    counters = [0, 1, 2, 3, 2**31, 0, 2**40, 5]
    draws = check(torch.zeros(8, 240), seeds, counters, [1.0] * 8)
    uniforms = definition.uniforms(torch.tensor(seeds), torch.tensor(counters))
    assert draws.tokens.tolist() == (uniforms * 240).long().tolist()
    check(torch.zeros(2, 240), torch.tensor([3, 4]).int(), torch.tensor([0, 9]).int(), [1.0] * 2)


def test_greedy_takes_the_earliest_best_token() -> None:
    logits = torch.zeros(4, 70)
    logits[0, 40] = logits[0, 41] = logits[0, 65] = 1.0
    logits[1, 69] = 1e-8  # exp cannot tell it from the others
    logits[2] = -5.0
    logits[3, 15] = logits[3, 16] = 3e38
    draws = check(logits, [0] * 4, [0] * 4, [0.0] * 4)
    assert draws.tokens.tolist() == [40, 69, 0, 15]
    assert draws.logprobs.tolist() == draws.entropies.tolist() == [0.0] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_not_ok(temperature: float) -> None:
    logits = torch.randn(6, 40)
    for row, (place, value) in enumerate([(0, NAN), (39, INF), (20, -INF), (16, NAN)]):
        logits[row, place] = value
    logits[4] = NAN
    draws = check(logits, [5] * 6, [0] * 6, [temperature] * 6)
    assert draws.ok.tolist() == [False] * 5 + [True]
    assert draws.tokens[:5].tolist() == [0] * 5


def test_tokens_without_mass_are_never_drawn() -> None:
    logits = torch.full((12, 64), -1e4)
    logits[:, 17] = logits[:, 30] = 0.0
    draws = check(logits, torch.arange(12), [0] * 12, [1.0] * 12)
    assert set(draws.tokens.tolist()) == {17, 30}
    # Some mark what must not be drawn by the lowest number; half of it is -inf.
    logits = torch.full((6, 64), torch.finfo(torch.float32).min)
    logits[:, 33], logits[:, 60] = 4.0, 4.5
    draws = check(logits, torch.arange(6), [0] * 6, [0.5] * 6)
    assert draws.ok.all()
    assert draws.entropies.isfinite().all()


def test_a_row_draws_the_same_alone_and_from_strided_half_precision() -> None:
    logits = torch.randn(5, 60).half().to(DEVICE)[:, :37]
    seeds, counters = torch.arange(5, device=DEVICE), torch.arange(5, device=DEVICE)
    temperatures = torch.full((5,), 0.8, device=DEVICE)
    many = check(logits, seeds, counters, temperatures)
    for row in range(5):
        one = slice(row, row + 1)
        alone = kernel.sample(logits[one], seeds[one], counters[one], temperatures[one])
        for left, right in zip(alone, many, strict=True):
            assert left.tolist() == right[one].tolist()
    none = slice(0, 0)
    nothing = kernel.sample(logits[none], seeds[none], counters[none], temperatures[none])
    assert [len(x) for x in nothing] == [0, 0, 0, 0]


def test_cuts_are_left_to_the_definition() -> None:
    logits, ints, floats = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), torch.ones(2)
    assert kernel.supports("sample", logits, ints, ints, floats)
    assert not kernel.supports("sample", logits, ints, ints, floats, ints)
    assert not kernel.supports("sample", logits, ints, ints, floats, None, floats)
    assert not kernel.supports("sample", logits, ints, ints, floats, None, None, ints[:, None])
    assert not kernel.supports("sample", logits.double(), ints, ints, floats)


def test_row_kernels_do_what_the_definitions_do() -> None:
    check_steps(kernel, device=DEVICE)
