"""Log-prob, entropy and acceptance against full log-softmax in double precision."""

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
    temperature_T = torch.linspace(0.5, 2.0, TOKENS)
    stats = ops.token_stats(hidden, head, ids, temperature=temperature_T, chunk=5)
    for token in (0, 17, 36):
        alone = hidden[token, None], head, ids[token, None]
        single = ops.token_stats(*alone, temperature=float(temperature_T[token]))
        torch.testing.assert_close(stats.logprob[token], single.logprob[0])


@pytest.mark.parametrize("chunk", [4, None])
def test_gradients(inputs, chunk) -> None:
    hidden, head, ids = inputs
    hidden = hidden[:6, :4].double().requires_grad_()
    head = head[:9, :4].double().requires_grad_()

    def stats(hidden: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ops.token_stats(hidden, head, ids[:6] % 9, temperature=0.7, chunk=chunk))

    assert torch.autograd.gradcheck(stats, (hidden, head))
    frozen = inputs[0].requires_grad_(), inputs[1]  # costs no gradient memory
    ops.token_stats(*frozen, ids).logprob.sum().backward()
    assert frozen[0].grad is not None
    assert frozen[1].grad is None


def test_acceptance_is_one_minus_total_variation(inputs) -> None:
    hidden, head, _ = inputs
    other = hidden + 0.3 * torch.randn_like(hidden)
    alpha = ops.acceptance(hidden, other, head, temperature=0.8, chunk=6)
    p, q = (full_log_softmax(h, head, 0.8).exp() for h in (hidden, other))
    torch.testing.assert_close(alpha.double(), 1 - (p - q).abs().sum(1) / 2, atol=1e-5, rtol=0)
    assert 0 < alpha.min() < 0.95
    assert torch.equal(alpha, ops.acceptance(other, hidden, head, temperature=0.8, chunk=6))
    torch.testing.assert_close(ops.acceptance(hidden, hidden, head), torch.ones(TOKENS))
    assert ops.acceptance(hidden, hidden, head).max() <= 1
    assert ops.acceptance(50 * hidden, -50 * hidden, head).max() < 1e-6
    other_head = head + 0.2 * torch.randn_like(head)
    alpha = ops.acceptance(hidden, hidden, head, q_head_VC=other_head)
    p, q = (full_log_softmax(hidden, h).exp() for h in (head, other_head))
    torch.testing.assert_close(alpha.double(), torch.minimum(p, q).sum(1), atol=1e-5, rtol=0)


def test_logits_of_bf16_weights_and_sums_over_a_large_vocabulary_are_fp32(inputs) -> None:
    """150 thousand terms in fp32: the sum must not lose those that come late."""
    generator = torch.Generator().manual_seed(5)
    large = [torch.randn(rows, 8, generator=generator) for rows in (4, 151_936)]
    halves = (inputs[0].bfloat16(), inputs[1].bfloat16(), inputs[2])
    for (hidden, head, ids), error in ((halves, 1e-5), ((*large, torch.arange(4)), 5e-6)):
        stats = ops.token_stats(hidden, head, ids)
        expected = full_log_softmax(hidden, head)[torch.arange(len(ids)), ids]
        assert stats.logprob.dtype == torch.float32
        torch.testing.assert_close(stats.logprob.double(), expected, atol=error, rtol=1e-5)


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
    ops.acceptance(hidden, hidden, head, chunk=5)
    assert max(rows) == 5
    assert sum(rows) == 4 * TOKENS  # stats twice (forward, backward), and p and q
    assert logprob.chunk_tokens(151_936) * 151_936 * 4 <= 64 * 2**20


def test_no_tokens() -> None:
    hidden, head = torch.zeros(0, 4), torch.zeros(9, 4)
    assert ops.token_stats(hidden, head, torch.zeros(0, dtype=torch.long)).logprob.shape == (0,)
    assert ops.acceptance(hidden, hidden, head).shape == (0,)
