"""Divergences: by hand, by plain formulas, and their gradients by autograd."""

import math

import pytest
import torch
from torch import Tensor

from sparrow import ops
from sparrow.ops.reference.divergence import KINDS

KINDS_BY_AUTOGRAD = {
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(1),
    "forward_kl": lambda p, q: (p * (p / q).log()).sum(1),
    "jensen_shannon": lambda p, q: _halves(p, q, (p + q) / 2),
    "total_variation": lambda p, q: (p - q).abs().sum(1) / 2,
    "tail": lambda p, q: ((p - q).abs().sum(1) / 2) ** 2 / 2,
}


def _halves(p: Tensor, q: Tensor, m: Tensor) -> Tensor:
    return ((p * (p / m).log()).sum(1) + (q * (q / m).log()).sum(1)) / 2


def states(tokens: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    p, q = torch.randn(2, tokens, 6, dtype=torch.float64)
    return p, q.requires_grad_(), torch.randn(11, 6, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [None, 3])
def test_values_and_gradients_are_those_of_autograd(kind, chunk) -> None:
    p, q, head = states()
    temperature = torch.linspace(0.5, 1.5, len(p), dtype=torch.float64)
    options = {"kind": kind, "temperature": temperature, "chunk": chunk}
    targets = torch.arange(len(p)) + 2
    found, none = ops.divergence(p, q, head, **options)
    assert none is None
    weight = torch.arange(1.0, 8.0, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found * weight).sum(), q)
    probs = [(x @ head.T / temperature[:, None]).softmax(1) for x in (p, q)]
    wanted = KINDS_BY_AUTOGRAD[kind](*probs)
    torch.testing.assert_close(found, wanted)
    graph = {"retain_graph": True}
    expected = torch.autograd.grad((wanted * weight).sum(), q, **graph)[0]
    torch.testing.assert_close(gradient, expected)
    both, logprob = ops.divergence(p, q, head, **options, targets_T=targets)
    torch.testing.assert_close(both, wanted)
    own = probs[1].gather(1, targets[:, None]).squeeze(1).log()
    torch.testing.assert_close(logprob, own)
    (gradient,) = torch.autograd.grad((both * weight + logprob * weight**2).sum(), q)
    expected = torch.autograd.grad((wanted * weight + own * weight**2).sum(), q)[0]
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("kind", ["reverse_kl", "total_variation"])
def test_compiled_it_is_the_same(kind) -> None:
    p, q, head = (x.float().detach() for x in states())
    results = []
    for choice in ("reference", "compiled"):
        q = q.detach().requires_grad_()
        with ops.using(choice):
            value, logprob = ops.divergence(p, q, head, kind=kind, targets_T=torch.arange(len(p)))
        (value.sum() + 2 * logprob.sum()).backward()
        results.append((value, logprob, q.grad))
    torch.testing.assert_close(*results)


def test_by_hand() -> None:
    """p = (1/2, 1/2) and q = (3/4, 1/4)."""
    head = torch.eye(2, dtype=torch.float64)
    p = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    q = torch.tensor([[0.75, 0.25]], dtype=torch.float64).log()
    wanted = {
        "reverse_kl": 0.75 * math.log(1.5) + 0.25 * math.log(0.5),
        "forward_kl": 0.5 * math.log(2 / 3) + 0.5 * math.log(2),
        "total_variation": 0.25,
        "tail": 0.03125,
    }
    for kind, value in wanted.items():
        assert ops.divergence(p, q, head, kind=kind).value_T.item() == pytest.approx(value)
    alpha = ops.acceptance(p, q, head).item()
    found = ops.divergence(p, q, head, kind="total_variation").value_T
    assert found.item() == pytest.approx(1 - alpha)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_none_and_teachers_get_no_gradient(kind) -> None:
    p, _, head = states()
    p.requires_grad_()
    found = ops.divergence(p, p, head.requires_grad_(), kind=kind).value_T
    assert found.abs().max() < 1e-12
    found.sum().backward()
    assert p.grad.abs().max() < 1e-9
    assert head.grad is None


def test_unknown_kinds_are_refused() -> None:
    p, q, head = states()
    with pytest.raises(ValueError, match="reverse_kl"):
        ops.divergence(p, q, head, kind="wasserstein")
