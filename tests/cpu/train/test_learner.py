"""The learner: dense log-probs, the gradient by hand, micro-batches, faults, its state."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.samples import batch, plain_logprobs, sample, small_model
from support.sharded import copied, evenly, ones, ready, states_of

from sparrow import models, ops
from sparrow.schema.episode import TrainSample
from sparrow.schema.train import RateConfig
from sparrow.training.learner import Learner
from sparrow.training.objectives.surrogates import Objective, ppo, reference_kl, token_mean
from sparrow.training.policy import Policy

PPO = Objective(surrogate=ppo, aggregate=token_mean)


def learner(
    model: models.Decoder | None = None, *, tokens: int = 10_000, rate: float = 1e-3, **policy: Any
) -> Learner:
    made = Policy(model or small_model(), **policy)
    return Learner(made, RateConfig(rate=rate, clip=1e9), steps=10, tokens=tokens)


def gradients(own: Learner, samples: Sequence[TrainSample], objective: Objective = PPO) -> Any:
    """What an update sees, before the optimiser's step."""
    own._gradients(samples, ones(samples), objective, None)
    found = {
        name: p.grad.clone() for name, p in own.policy.named_parameters() if p.grad is not None
    }
    own.optimiser.zero_grad()
    return found


def test_read_is_the_definition() -> None:
    own, samples = learner(), batch()
    for one, found in zip(samples, own.score(samples), strict=True):
        expected = plain_logprobs(own.policy.model, one).detach()
        torch.testing.assert_close(torch.from_numpy(found.logprob), expected, atol=2e-5, rtol=1e-5)
        assert found.alpha is None
        assert (found.entropy >= 0).all()


def test_acceptance_of_the_watched_alone() -> None:
    """Of an actor with other weights by the definition; of the policy itself 1."""
    own, samples, other = learner(), batch(4), small_model(seed=9)
    mine, theirs = (states_of(m, samples[n]) for m, n in ((own.policy.model, 1), (other, 3)))
    found = own.score(samples, [None, mine, None, theirs])
    assert found[0].alpha is None
    assert found[2].alpha is None
    np.testing.assert_allclose(found[1].alpha, 1, atol=1e-5)
    head = own.policy.model.head.detach()
    dense = torch.tensor(states_of(own.policy.model, samples[3]))
    exact = ops.acceptance(dense, torch.tensor(theirs), head)
    np.testing.assert_allclose(found[3].alpha, exact.numpy(), atol=1e-5)
    assert found[3].alpha.mean() < 0.9


def test_the_gradient_is_the_policy_gradient() -> None:
    """At pi = pi_old the clipped surrogate's gradient is that of -A log pi, token by token."""
    own = learner()
    samples = ready(batch())
    tokens = sum(one.learnt for one in samples)
    loss = torch.stack(
        [-one.advantage * plain_logprobs(own.policy.model, one).sum() for one in samples]
    ).sum()
    expected = torch.autograd.grad(loss / tokens, list(own.policy.parameters()))
    found = gradients(own, samples)
    for wanted, (name, got) in zip(expected, found.items(), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-4, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
def test_another_dtype_computes_and_float32_is_kept(recompute: bool) -> None:
    """float64 stands for the GPU's 16 bits, which are unusable on some CPUs."""
    exact = learner(dtype=torch.float64, recompute=recompute)
    plain = learner()
    samples = ready(batch())
    for one, other in zip(plain.score(samples), exact.score(samples), strict=True):
        np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
    expected, found = gradients(plain, samples), gradients(exact, samples)
    for name, wanted in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], wanted, atol=1e-4, rtol=1e-3, msg=name)
    exact.update(samples, ones(samples), PPO)
    assert exact.policy.model.dtype == torch.float32


def test_neither_the_cut_nor_recomputing_changes_the_gradient() -> None:
    """Recomputing gives the same bits; weights of tokens scale theirs."""
    whole = learner()
    samples = ready(batch())
    expected = gradients(whole, samples)
    for tokens, recompute in ((1, False), (60, False), (1, True), (60, True)):
        found = gradients(learner(tokens=tokens, recompute=recompute), samples)
        for name, wanted in expected.items():
            torch.testing.assert_close(found[name], wanted, atol=1e-5, rtol=1e-4, msg=name)
    again = gradients(learner(recompute=True), samples)
    assert all(torch.equal(again[name], wanted) for name, wanted in expected.items())
    whole._gradients(samples, [2 * w for w in ones(samples)], PPO, None)
    for name, weight in whole.policy.named_parameters():
        torch.testing.assert_close(weight.grad, 2 * expected[name], msg=name)


def test_an_update_makes_good_answers_likelier() -> None:
    own = learner(rate=1e-3)
    samples = ready([sample(30, 10, advantage=1.0), sample(25, 9, advantage=-1.0)])
    before = [one.logprob.sum() for one in own.score(samples)]
    stats = own.update(samples, ones(samples), PPO)
    good, bad = (one.logprob.sum() for one in own.score(samples))
    assert (good > before[0], bad < before[1]) == (True, True)
    assert (stats.kl, stats.clipped) == (pytest.approx(0, abs=1e-6), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kl_of_an_update_is_exact(dtype: torch.dtype) -> None:
    """KL(new || old) of whole distributions, over tokens; 0 while nothing has moved."""
    own, samples = learner(tokens=60, dtype=dtype), ready(batch())
    old = own.snapshot(samples, evenly(samples))
    assert own.kl(old) == 0
    before = [torch.tensor(states_of(own.policy.model, one)) for one in samples]
    head = own.policy.model.head.detach().clone()
    own.update(samples, ones(samples), PPO)
    found, total = own.kl(old), 0.0
    for hidden, one in zip(before, samples, strict=True):
        q = (hidden @ head.T).log_softmax(1)
        new = torch.tensor(states_of(own.policy.model, one))
        p = (new @ own.policy.model.head.detach().T).log_softmax(1)
        total += float((p.exp() * (p - q)).sum())
    wanted = total / sum(one.learnt for one in samples)
    assert found == pytest.approx(wanted, rel=1e-4 if dtype == torch.float32 else 0.2)
    weights = own.trained()
    assert own.kl(own.snapshot(samples[:2], [1.0, 1.0])) == 0
    double = own.kl(old._replace(weights=[2 * weight for weight in old.weights]))
    assert double == pytest.approx(2 * found)
    for name, weight in own.trained().items():
        assert torch.equal(weight, weights[name]), name


def test_a_restored_learner_goes_on_bit_for_bit() -> None:
    own = learner()
    samples = ready(batch(4))
    own.update(samples, ones(samples), PPO)
    state = copied(own.state())
    other = learner(small_model(seed=5))
    other.restore(state)
    for each in (own, other):
        each.update(samples, ones(samples), PPO)
    assert other.taken == own.taken == 2
    for name, weight in own.trained().items():
        assert torch.equal(other.trained()[name], weight), name


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="old_logprob"):
        learner().update(batch(2), ones(batch(2)), PPO)
    with pytest.raises(ValueError, match="float32"):
        Policy(small_model().to(torch.bfloat16))


def test_an_entropy_bonus_raises_entropy() -> None:
    own = learner(rate=3e-3)
    samples = ready([sample(30, 5, advantage=0.0)])
    before = own.score(samples)[0].entropy.mean()
    own.update(samples, ones(samples), replace(PPO, entropy=1.0))
    assert own.score(samples)[0].entropy.mean() > before


def test_momentum_alone_moves_no_weight() -> None:
    """After an update with a gradient, one whose every advantage is 0 takes no optimiser step."""
    own = learner()
    samples = ready(batch(4))
    assert not own.update(samples, ones(samples), PPO).no_signal
    state = copied(own.state())
    stats = own.update([one.replace(advantage=0.0) for one in samples], ones(samples), PPO)
    assert (stats.no_signal, stats.skipped, stats.gradient) == (True, False, 0.0)
    after = own.state()
    for name, weight in state["weights"].items():
        assert torch.equal(after["weights"][name], weight), name
    for number, moments in state["moments"].items():
        for name, value in moments.items():
            assert torch.equal(after["moments"][number][name], value), name
    assert own.taken == 2  # the rate's schedule counts steps of the run


def test_the_gradient_of_the_kl_term() -> None:
    """Without advantages the gradient is that of the coefficient times the mean over tokens."""
    own, other = learner(), small_model(seed=9).requires_grad_(False)
    samples = [one.replace(advantage=0.0) for one in ready(batch(4))]
    references = [one.logprob for one in own.score(samples, policy=Policy(other))]
    for one, found in zip(samples, references, strict=True):
        expected = plain_logprobs(other, one)
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=2e-5, rtol=1e-5)
    parts = [
        reference_kl(plain_logprobs(own.policy.model, one), torch.from_numpy(found))
        for one, found in zip(samples, references, strict=True)
    ]
    mean = torch.cat(parts).mean()
    expected = torch.autograd.grad(0.7 * mean, list(own.policy.parameters()))
    objective = replace(PPO, kl=0.7)
    own._gradients(samples, ones(samples), objective, references)
    for wanted, (name, weight) in zip(expected, own.policy.named_parameters(), strict=True):
        torch.testing.assert_close(weight.grad, wanted, atol=2e-5, rtol=2e-4, msg=name)
    own.optimiser.zero_grad()
    stats = own.update(samples, ones(samples), objective, references=references)
    assert stats.kl_reference == pytest.approx(mean.item(), rel=1e-4)
    assert not stats.no_signal
    after = own.update(samples, ones(samples), objective, references=references)
    assert after.kl_reference is not None
    assert after.kl_reference < stats.kl_reference
    with pytest.raises(ValueError, match="reference"):
        own.update(samples, ones(samples), objective)
