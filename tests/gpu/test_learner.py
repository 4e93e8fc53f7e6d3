"""The trainer on a GPU: 16-bit compute against float32, recomputing, compiling, and the engine."""

import numpy as np
import pytest
import torch
from support.loud import loud

from sparrow import ops
from sparrow.engine import Engine
from sparrow.schema.episode import TrainSample
from sparrow.schema.sampling import OutputOptions, SamplingParams
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RateConfig
from sparrow.sparse.rule import Rule
from sparrow.training.learner import Learner
from sparrow.training.objectives.surrogates import Objective, gspo, ppo, token_mean
from sparrow.training.policy import Policy

LENGTHS = (700, 33, 257, 1024)


def samples(vocabulary: int) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    found = []
    for number, length in enumerate(LENGTHS):
        mask = np.arange(length) >= length // 4 + 1
        level = np.where(mask, -np.log(vocabulary), 0).astype(np.float32)
        ids = rng.integers(vocabulary, size=length, dtype=np.int32)
        found.append(
            TrainSample(
                ids=ids,
                loss_mask=mask,
                rollout_logprob=level,
                old_logprob=level,
                advantage=(-1.0) ** number,
            )
        )
    return found


def gradients(learner: Learner, objective: Objective) -> dict[str, torch.Tensor]:
    batch = samples(learner.policy.model.spec.vocabulary)
    weights = [np.ones(one.learnt, np.float32) for one in batch]
    learner._gradients(batch, weights, objective, None)
    found = {name: p.grad.clone() for name, p in learner.policy.named_parameters()}
    learner.optimiser.zero_grad()
    return found


def learner(dtype: torch.dtype, **how: bool) -> Learner:
    policy = Policy(loud(torch.float32, max_positions=2048), dtype=dtype, **how)
    return Learner(policy, RateConfig(rate=1e-4), steps=10, tokens=1100)


PLAIN = Objective(surrogate=ppo, aggregate=token_mean)


@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"compiled": True}], ids=str)
def test_gradients_in_16_bits_point_where_those_in_float32_do(how: dict[str, bool]) -> None:
    """Weights and gradients stay float32; directions agree, also recomputed and compiled."""
    exact, found = gradients(learner(torch.float32), PLAIN), None
    found = gradients(learner(torch.bfloat16, **how), PLAIN)
    for name, wanted in exact.items():
        assert found[name].dtype == torch.float32
        likeness = torch.nn.functional.cosine_similarity(found[name].ravel(), wanted.ravel(), dim=0)
        assert likeness > 0.98, name


def test_recomputing_gives_the_same_gradients() -> None:
    """Up to the order in which the flash kernel adds up gradients, which differs by run."""
    plain, again = (
        gradients(learner(torch.bfloat16, recompute=how), PLAIN) for how in (False, True)
    )
    for name, wanted in plain.items():
        likeness = torch.nn.functional.cosine_similarity(again[name].ravel(), wanted.ravel(), dim=0)
        assert likeness > 0.999, name


def test_sequence_ratios_run_on_the_device() -> None:
    found = gradients(learner(torch.bfloat16), Objective(surrogate=gspo, aggregate=token_mean))
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_log_prob_gradients_with_16_bit_factors() -> None:
    """The error against float64 is at most twice that of plain torch in bf16."""
    torch.manual_seed(0)
    hidden, head = torch.randn(300, 256, device="cuda"), torch.randn(1009, 256, device="cuda") / 8
    ids, back = torch.randint(1009, (300,), device="cuda"), torch.randn(300, device="cuda")

    def run(dtype: torch.dtype, ours: bool) -> list[torch.Tensor]:
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (hidden, head)]
        if ours:
            logprob = ops.token_stats(leaves[0], leaves[1], ids, chunk=128).logprob
        else:
            logprob = (leaves[0] @ leaves[1].T).log_softmax(1).gather(1, ids[:, None]).squeeze(1)
        logprob.backward(back.to(logprob.dtype))
        return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]

    exact, plain = run(torch.float64, False), run(torch.bfloat16, False)
    for wanted, far, near in zip(exact, plain, run(torch.bfloat16, True), strict=True):
        assert (near - wanted).norm() <= 2 * (far - wanted).norm()


@pytest.mark.parametrize("budget", [None, 128])
def test_the_trainer_reads_what_the_engine_drew(budget: int | None) -> None:
    """Dense: the same log-probs up to rounding, acceptance near 1; sparse: clearly less."""
    model = loud(torch.bfloat16, max_positions=2048)
    schedule = None if budget is None else Schedule.fixed(budget, dense_layers=())
    rule = None if schedule is None else Rule(dense_layers=frozenset())
    engine = Engine(model, rule=rule, max_context=1024, max_running=8)
    params = SamplingParams(n=4, max_tokens=600, seed=1, ignore_eos=True)
    options = OutputOptions(hidden_states=True, training=True)
    prompt = list(range(5, 45))
    done = engine.generate([prompt], params, schedule=schedule, options=options)
    own = Learner(
        Policy(loud(torch.float32, max_positions=2048), dtype=torch.bfloat16),
        RateConfig(),
        steps=1,
        tokens=4096,
    )
    batch = [
        TrainSample(
            ids=np.concatenate([one.prompt_ids, one.token_ids]),
            loss_mask=np.arange(len(prompt) + len(one.token_ids)) >= len(prompt),
            rollout_logprob=np.concatenate([np.zeros(len(prompt), np.float32), one.logprobs]),
            advantage=1.0,
        )
        for one in done
    ]
    found = own.score(batch, [one.hidden for one in done])
    alpha = np.concatenate([one.alpha for one in found if one.alpha is not None])
    apart = np.concatenate(
        [np.abs(r.logprob - one.logprobs) for r, one in zip(found, done, strict=True)]
    )
    if budget is None:
        assert np.quantile(alpha, 0.05) > 0.9
        assert np.median(apart) < 0.05
    else:
        assert np.quantile(alpha, 0.05) < 0.9
