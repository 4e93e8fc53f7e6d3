"""Log-prob, entropy, top-k and acceptance against full log-softmax in double precision."""

import pytest
import torch

from sparrow import ops
from sparrow.ops.reference import logprob

TOKENS, WIDTH, VOCABULARY = 37, 16, 101


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator)
    return hidden, head, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def full_log_softmax(
    hidden: torch.Tensor, head: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    return (hidden.double() @ head.double().T / temperature).log_softmax(1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprob_and_entropy(inputs, temperature) -> None:
    hidden, head, ids = inputs
    logp = full_log_softmax(hidden, head, temperature)
    expected, entropy = logp[torch.arange(TOKENS), ids], -(logp.exp() * logp).sum(1)
    for chunk in (1, 7, 36, 37, 38, None):
        stats = ops.token_stats(hidden, head, ids, temperature=temperature, chunk=chunk)
        torch.testing.assert_close(stats.logprob.double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(stats.entropy.double(), entropy, atol=1e-5, rtol=1e-5)


def test_a_temperature_per_token(inputs) -> None:
    hidden, head, ids = inputs
    temperature = torch.linspace(0.5, 2.0, TOKENS)
    stats = ops.token_stats(hidden, head, ids, temperature=temperature, chunk=5)
    for token in (0, 17, 36):
        alone = ops.token_stats(
            hidden[token, None], head, ids[token, None], temperature=float(temperature[token])
        )
        torch.testing.assert_close(stats.logprob[token], alone.logprob[0])


@pytest.mark.parametrize("chunk", [4, None])
def test_gradients(inputs, chunk) -> None:
    hidden, head, ids = inputs
    hidden = hidden[:6, :4].double().requires_grad_()
    head = head[:9, :4].double().requires_grad_()

    def stats(hidden: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ops.token_stats(hidden, head, ids[:6] % 9, temperature=0.7, chunk=chunk))

    assert torch.autograd.gradcheck(stats, (hidden, head))


def test_a_frozen_head_costs_no_gradient_memory(inputs) -> None:
    hidden, head, ids = inputs
    hidden.requires_grad_()
    ops.token_stats(hidden, head, ids).logprob.sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_top_k(inputs) -> None:
    hidden, head, _ = inputs
    top = ops.top_k(hidden, head, 5, chunk=8)
    expected = full_log_softmax(hidden, head).topk(5)
    assert torch.equal(top.ids, expected.indices)
    torch.testing.assert_close(top.logprobs.double(), expected.values, atol=1e-5, rtol=1e-5)


def test_acceptance_is_one_minus_total_variation(inputs) -> None:
    hidden, head, _ = inputs
    other = hidden + 0.3 * torch.randn_like(hidden)
    alpha = ops.acceptance(hidden, other, head, temperature=0.8, chunk=6)
    p, q = (full_log_softmax(h, head, 0.8).exp() for h in (hidden, other))
    torch.testing.assert_close(alpha.double(), 1 - (p - q).abs().sum(1) / 2, atol=1e-5, rtol=0)
    assert 0 < alpha.min() < 0.95
    assert torch.equal(alpha, ops.acceptance(other, hidden, head, temperature=0.8, chunk=6))


def test_acceptance_of_equals_is_one_and_of_strangers_zero(inputs) -> None:
    hidden, head, _ = inputs
    alpha = ops.acceptance(hidden, hidden, head)
    torch.testing.assert_close(alpha, torch.ones(TOKENS))
    assert alpha.max() <= 1
    apart = ops.acceptance(50 * hidden, -50 * hidden, head)
    assert apart.max() < 1e-6


def test_acceptance_with_two_heads(inputs) -> None:
    hidden, head, _ = inputs
    other_head = head + 0.2 * torch.randn_like(head)
    alpha = ops.acceptance(hidden, hidden, head, q_head_VC=other_head)
    p, q = (full_log_softmax(hidden, h).exp() for h in (head, other_head))
    torch.testing.assert_close(alpha.double(), torch.minimum(p, q).sum(1), atol=1e-5, rtol=0)


def test_bf16_weights_give_fp32_logits(inputs) -> None:
    hidden, head, ids = (t.bfloat16() if t.is_floating_point() else t for t in inputs)
    stats = ops.token_stats(hidden, head, ids)
    expected = full_log_softmax(hidden, head)[torch.arange(TOKENS), ids]
    assert stats.logprob.dtype == torch.float32
    torch.testing.assert_close(stats.logprob.double(), expected, atol=1e-5, rtol=1e-5)


def test_log_probs_over_a_large_vocabulary() -> None:
    """150 thousand terms in fp32: the sum must not lose those that come late."""
    generator = torch.Generator().manual_seed(5)
    hidden, head = (
        torch.randn(4, 8, generator=generator),
        torch.randn(151_936, 8, generator=generator),
    )
    stats = ops.token_stats(2 * hidden, head, torch.arange(4))
    expected = full_log_softmax(2 * hidden, head)[torch.arange(4), torch.arange(4)]
    torch.testing.assert_close(stats.logprob.double(), expected, atol=5e-6, rtol=0)


def test_never_a_tokens_by_vocabulary_tensor(inputs, monkeypatch) -> None:
    """Forward and backward of every chunked op see at most `chunk` rows of logits."""
    hidden, head, ids = inputs
    rows: list[int] = []
    whole = logprob.logits.definition

    def watched(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return whole(hidden, head)

    monkeypatch.setattr(logprob.logits, "definition", watched)
    ops.token_stats(hidden.requires_grad_(), head, ids, chunk=5).logprob.sum().backward()
    ops.top_k(hidden, head, 3, chunk=5)
    ops.acceptance(hidden, hidden, head, chunk=5)
    assert max(rows) == 5
    assert sum(rows) == 5 * TOKENS  # stats twice (forward, backward), top-k, and p and q
    assert logprob.chunk_tokens(151_936) * 151_936 * 4 <= 64 * 2**20


def test_no_tokens() -> None:
    hidden, head = torch.zeros(0, 4), torch.zeros(9, 4)
    assert ops.token_stats(hidden, head, torch.zeros(0, dtype=torch.long)).logprob.shape == (0,)
    assert ops.top_k(hidden, head, 3).ids.shape == (0, 3)
    assert ops.acceptance(hidden, hidden, head).shape == (0,)
