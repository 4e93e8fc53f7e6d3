"""Log-prob, entropy and acceptance against full log-softmax in double precision; comparisons of two
distributions.
"""

import pytest
import torch
from torch import Tensor

from sparrow import ops
from sparrow.ops.reference import acceptance as definitions
from sparrow.ops.reference import logprob

TOKENS, WIDTH, VOCABULARY = 37, 16, 101


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    p_TC = torch.randn(TOKENS, WIDTH, generator=generator)
    q_TC = p_TC + 0.3 * torch.randn(TOKENS, WIDTH, generator=generator)
    head_VC = torch.randn(VOCABULARY, WIDTH, generator=generator)
    return p_TC, q_TC, head_VC, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def full(hidden_TC: Tensor, head_VC: Tensor, temperature: float = 1.0) -> Tensor:
    return (hidden_TC.double() @ head_VC.double().T / temperature).log_softmax(1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprob_and_entropy(inputs, temperature) -> None:
    hidden, _, head, ids = inputs
    logp = full(hidden, head, temperature)
    expected, entropy = logp[torch.arange(TOKENS), ids], -(logp.exp() * logp).sum(1)
    for chunk in (1, 7, 36, 37, 38, None):
        stats = ops.token_stats(hidden, head, ids, temperature=temperature, chunk=chunk)
        torch.testing.assert_close(stats.logprob.double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(stats.entropy.double(), entropy, atol=1e-5, rtol=1e-5)
    temperature_T = torch.linspace(0.5, 2.0, TOKENS)
    stats = ops.token_stats(hidden, head, ids, temperature=temperature_T, chunk=5)
    for token in (0, 17, 36):
        alone = hidden[token, None], head, ids[token, None]
        single = ops.token_stats(*alone, temperature=float(temperature_T[token]))
        torch.testing.assert_close(stats.logprob[token], single.logprob[0])


@pytest.mark.parametrize("chunk", [4, None])
def test_gradients(inputs, chunk) -> None:
    hidden, _, head, ids = inputs
    hidden = hidden[:6, :4].double().requires_grad_()
    head = head[:9, :4].double().requires_grad_()

    def stats(hidden: Tensor, head: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.token_stats(hidden, head, ids[:6] % 9, temperature=0.7, chunk=chunk))

    assert torch.autograd.gradcheck(stats, (hidden, head))
    frozen = inputs[0].requires_grad_(), inputs[2]  # costs no gradient memory
    ops.token_stats(*frozen, ids).logprob.sum().backward()
    assert frozen[0].grad is not None
    assert frozen[1].grad is None


def test_acceptance_is_one_minus_total_variation(inputs) -> None:
    hidden, _, head, _ = inputs
    other = hidden + 0.3 * torch.randn_like(hidden)
    alpha = ops.acceptance(hidden, other, head, temperature=0.8, chunk=6)
    p, q = (full(h, head, 0.8).exp() for h in (hidden, other))
    torch.testing.assert_close(alpha.double(), 1 - (p - q).abs().sum(1) / 2, atol=1e-5, rtol=0)
    assert 0 < alpha.min() < 0.95
    assert torch.equal(alpha, ops.acceptance(other, hidden, head, temperature=0.8, chunk=6))
    torch.testing.assert_close(ops.acceptance(hidden, hidden, head), torch.ones(TOKENS))
    assert ops.acceptance(hidden, hidden, head).max() <= 1
    assert ops.acceptance(50 * hidden, -50 * hidden, head).max() < 1e-6
    other_head = head + 0.2 * torch.randn_like(head)
    alpha = ops.acceptance(hidden, hidden, head, q_head_VC=other_head)
    p, q = (full(hidden, h).exp() for h in (head, other_head))
    torch.testing.assert_close(alpha.double(), torch.minimum(p, q).sum(1), atol=1e-5, rtol=0)


def test_logits_of_bf16_weights_and_sums_over_a_large_vocabulary_are_fp32(inputs) -> None:
    """150 thousand terms in fp32: the sum must not lose those that come late."""
    generator = torch.Generator().manual_seed(5)
    large = [torch.randn(rows, 8, generator=generator) for rows in (4, 151_936)]
    halves = (inputs[0].bfloat16(), inputs[2].bfloat16(), inputs[3])
    for (hidden, head, ids), error in ((halves, 1e-5), ((*large, torch.arange(4)), 5e-6)):
        stats = ops.token_stats(hidden, head, ids)
        expected = full(hidden, head)[torch.arange(len(ids)), ids]
        assert stats.logprob.dtype == torch.float32
        torch.testing.assert_close(stats.logprob.double(), expected, atol=error, rtol=1e-5)


def test_never_a_tokens_by_vocabulary_tensor(inputs, monkeypatch) -> None:
    """Forward and backward of every chunked op see at most `chunk` rows of logits.

    A comparison makes the logits of both sides once.
    """
    hidden, _, head, ids = inputs
    rows: list[int] = []
    whole = logprob.logits.definition

    def watched(hidden: Tensor, head: Tensor) -> Tensor:
        rows.append(len(hidden))
        return whole(hidden, head)

    monkeypatch.setattr(logprob.logits, "definition", watched)
    ops.token_stats(hidden.requires_grad_(), head, ids, chunk=5).logprob.sum().backward()
    ops.acceptance(hidden, hidden, head, chunk=5)
    assert max(rows) == 5
    assert sum(rows) == 4 * TOKENS  # stats twice (forward, backward), and p and q
    rows.clear()
    ops.compare(*(part.detach() for part in inputs), chunk=5)
    assert max(rows) == 5
    assert sum(rows) == 2 * TOKENS
    assert logprob.chunk_tokens(151_936) * 151_936 * 4 <= 64 * 2**20


def test_no_tokens() -> None:
    hidden, head = torch.zeros(0, 4), torch.zeros(9, 4)
    assert ops.token_stats(hidden, head, torch.zeros(0, dtype=torch.long)).logprob.shape == (0,)
    assert ops.acceptance(hidden, hidden, head).shape == (0,)
    ids = torch.zeros(0, dtype=torch.long)
    assert all(part.shape == (0,) for part in ops.compare(hidden, hidden, head, ids, top_k=3))


# Two distributions.


def test_a_comparison_has_the_bits_of_the_single_ops(inputs) -> None:
    p_TC, q_TC, head_VC, ids_T = inputs
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        p, q, head = (part.to(dtype) for part in (p_TC, q_TC, head_VC))
        for options in ({}, {"chunk": 5, "temperature": 0.7}, {"q_head_VC": 1.1 * head}):
            comparison = ops.compare(p, q, head, ids_T, **options)
            assert torch.equal(comparison.alpha, ops.acceptance(p, q, head, **options))
            assert all(part.shape == (TOKENS,) for part in comparison)
    temperature_T = torch.linspace(0.5, 2, TOKENS)
    options = {"chunk": 8, "temperature": temperature_T}
    comparison = ops.compare(p_TC, q_TC, head_VC, ids_T, **options)
    assert all(part.dtype == torch.float32 for part in comparison)
    mine, other = (ops.token_stats(side, head_VC, ids_T, **options) for side in (p_TC, q_TC))
    assert torch.equal(comparison.entropy, mine.entropy)
    assert torch.equal(comparison.logp, mine.logprob)
    assert torch.equal(comparison.logq, other.logprob)


def test_only_rounding_is_smoothed(inputs, monkeypatch) -> None:
    """A bound that is wrong by more than rounding stays wrong, for everyone to see."""
    p_TC, q_TC, head_VC, ids_T = inputs
    whole = definitions.acceptance_bounds
    for shift, holds in ((0.5e-5, True), (1e-3, False)):

        def wrong(*lists: Tensor, by: float = shift) -> tuple[Tensor, Tensor]:
            lower_T, upper_T = whole(*lists)
            return lower_T + by, upper_T - by

        monkeypatch.setattr(definitions, "acceptance_bounds", wrong)
        comparison = ops.compare(p_TC, q_TC, head_VC, ids_T, top_k=VOCABULARY)
        assert bool((comparison.lower <= comparison.alpha).all()) is holds
        assert bool((comparison.alpha <= comparison.upper).all()) is holds


def test_the_bracket_over_a_large_vocabulary() -> None:
    """Where fp32 sums are at their worst: 150 thousand terms, peaked, usual and flat."""
    generator = torch.Generator().manual_seed(5)
    head_VC = torch.randn(151_936, 8, generator=generator)
    p_TC = 2 * torch.randn(3, 8, generator=generator)
    noise_TC = torch.randn(3, 8, generator=generator) * torch.logspace(-6, 0, 3)[:, None]
    ids_T = torch.zeros(3, dtype=torch.long)
    for temperature in (0.05, 1.0, 20.0):
        for top_k in (20, 151_936):
            options = {"temperature": temperature, "top_k": top_k}
            comparison = ops.compare(p_TC, p_TC + noise_TC, head_VC, ids_T, **options)
            assert (comparison.lower <= comparison.alpha).all()
            assert (comparison.alpha <= comparison.upper).all()
        assert (comparison.upper - comparison.lower).max() < definitions.ROUNDING
