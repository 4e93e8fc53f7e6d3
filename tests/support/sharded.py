"""What a learner does on ranks and alone: the same functions, to be compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from sparrow.models import Decoder
from sparrow.models.attention import Packed
from sparrow.schema.episode import TrainSample
from sparrow.schema.train import RateConfig
from sparrow.training.learner import Learner
from sparrow.training.objectives.surrogates import Objective, Surrogate, Terms, ppo, token_mean
from sparrow.training.policy import Policy, full_tensor, shard
from sparrow.training.world import World
from support.samples import batch, sample, small_model

PPO = Objective(surrogate=ppo, aggregate=token_mean)
CLIP = 0.05  # far below the norm of any gradient here
# tokens of a micro-batch, samples: one batch a rank; several; uneven ones; a rank without samples
CASES = {"whole": (10_000, 7), "cut": (60, 7), "uneven": (1, 3), "alone": (10_000, 1)}
Arrays = dict[str, torch.Tensor]


def learner(
    world: World, *, tokens: int = 60, seed: int = 0, clip: float = 1e9, **policy: Any
) -> Learner:
    made = Policy(small_model(seed), **policy)
    if world.size > 1:
        made = shard(made)
    return Learner(made, RateConfig(rate=1e-3, clip=clip), steps=10, tokens=tokens, world=world)


def ready(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """With what the initial policy, in one process, says of them as pi_old."""
    found = learner(World(), tokens=1).score(samples)
    done = []
    for one, read in zip(samples, found, strict=True):
        old = np.zeros(len(one), np.float32)
        old[one.loss_mask] = read.logprob
        done.append(one.replace(old_logprob=old))
    return done


def ones(samples: Sequence[TrainSample]) -> list[np.ndarray]:
    return [np.ones(one.learnt, np.float32) for one in samples]


def states_of(model: Decoder, one: TrainSample) -> np.ndarray:
    ids = torch.from_numpy(one.ids.astype(np.int64))
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), Packed(bounds=torch.tensor([0, len(ids)])))
    return hidden[torch.from_numpy(np.flatnonzero(one.loss_mask)) - 1].numpy()


def everything(world: World, folder: Path) -> dict[str, Any]:
    """All scenarios one after the other: starting processes takes longer than any of them."""
    found = {
        "read": reading(world),
        "gradients": {
            (name, recompute): gradients(world, tokens, count, recompute)
            for name, (tokens, count) in CASES.items()
            for recompute in (False, True)
        },
        "updates": updates(world),
        "skipped": skipping(world),
        "no signal": without_signal(world),
        "kl": regularised(world),
        "moved": {name: moved(world, tokens, count) for name, (tokens, count) in CASES.items()},
        "state": stating(world),
        "restored": resumable(world, torch.load(folder / "alone.pt", weights_only=False)),
    }
    if world.size > 1:
        found |= {
            "rounding": rounding(world),
            "failing": failing(world),
            "meeting": meeting(world),  # the last: the second rank ends
        }
    return found


def reading(world: World) -> list[tuple[np.ndarray, ...]]:
    """Log-probs, entropies and alphas; actor states lie on one rank alone, by turns."""
    samples, other = batch(), small_model(seed=9)
    watched = {number: turn % world.size for turn, number in enumerate((1, 3, 4))}
    actors = [
        states_of(other, one) if watched.get(number) == world.rank else None
        for number, one in enumerate(samples)
    ]
    told: list[tuple[int, int]] = []
    own = learner(world)
    found = own.score(samples, actors, on_batch=lambda *done: told.append(done))
    assert told[-1][0] == told[-1][1]
    assert world.size == 1 or told[-1][1] < len(samples)
    return [tuple(one) for one in found]


def gradients(world: World, tokens: int, count: int, recompute: bool) -> Arrays:
    own = learner(world, tokens=tokens, recompute=recompute)
    samples = ready(batch(count))
    sums = own._gradients(samples, ones(samples), PPO, None)
    found = {
        name: full_tensor(weight.grad).clone()
        for name, weight in own.policy.model.named_parameters()
        if weight.grad is not None
    }
    return found | {name: torch.tensor(value) for name, value in sums.items()}


def updates(world: World) -> dict[str, Any]:
    own = learner(world, clip=CLIP)
    samples = ready(batch())
    stats = [own.update(samples, ones(samples), PPO) for _ in range(3)]
    return {"stats": stats, "weights": own.trained()}


def skipping(world: World) -> dict[str, Any]:
    """One token of one sample is no number: on two ranks one of them alone sees it."""
    own = learner(world)
    samples = ready(batch())
    own.update(samples, ones(samples), PPO)
    before = {name: weight.clone() for name, weight in own.trained().items()}
    bad = ones(samples)
    bad[2][0] = float("nan")
    stats = [own.update(samples, bad, PPO), own.update(samples, bad, replace(PPO, surrogate=far))]
    same = all(torch.equal(before[name], weight) for name, weight in own.trained().items())
    after = own.update(samples, ones(samples), PPO)
    return {"skipped": [one.skipped for one in stats], "same": same, "after": after.skipped}


def without_signal(world: World) -> dict[str, bool]:
    """Whether an update without any advantage leaves the weights, after one with."""
    own = learner(world)
    samples = ready(batch())
    own.update(samples, ones(samples), PPO)
    before = {name: weight.clone() for name, weight in own.trained().items()}
    stats = own.update([one.replace(advantage=0.0) for one in samples], ones(samples), PPO)
    same = all(torch.equal(before[name], weight) for name, weight in own.trained().items())
    return {"no signal": stats.no_signal, "same": same}


def regularised(world: World) -> dict[str, Any]:
    """An update with a KL term; the reference model is whole on every rank."""
    own, samples = learner(world), ready(batch())
    reference = Policy(small_model(seed=9).requires_grad_(False))
    references = [one.logprob for one in own.score(samples, policy=reference)]
    stats = own.update(samples, ones(samples), replace(PPO, kl=0.5), references=references)
    return {"references": references, "kl": stats.kl_reference, "gradient": stats.gradient}


def evenly(samples: Sequence[TrainSample]) -> list[float]:
    """Weights of a mean over all their tokens."""
    return [1 / sum(one.learnt for one in samples)] * len(samples)


def moved(world: World, tokens: int, count: int) -> list[float]:
    """KL(new || old) before and after an update."""
    own, samples = learner(world, tokens=tokens), ready(batch(count))
    old = own.snapshot(samples, evenly(samples))
    still = own.kl(old)
    own.update(samples, ones(samples), PPO)
    return [still, own.kl(old)]


def far(terms: Terms) -> Surrogate:
    """Losses of +inf and of -inf."""
    found = ppo(terms)
    return Surrogate(found.loss_T * float("inf"), found.clipped_T)


def stating(world: World) -> dict[str, Any]:
    """The state after an update, and the weights after another."""
    own = learner(world)
    samples = ready(batch())
    own.update(samples, ones(samples), PPO)
    state = copied(own.state())
    own.update(samples, ones(samples), PPO)
    return {"state": state, "weights": own.trained()}


def resumable(world: World, state: dict[str, Any]) -> dict[str, Any]:
    """A learner with other weights takes up a state, tells it again, and updates once."""
    own = learner(world, seed=5)
    own.restore(state)
    again = copied(own.state())
    samples = ready(batch())
    own.update(samples, ones(samples), PPO)
    return {"state": again, "weights": own.trained(), "taken": own.taken}


def copied(state: Any) -> Any:
    """The same in memory of its own: a learner's state may be its weights themselves."""
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def rounding(world: World) -> dict[str, Any]:
    """In 16 bits shards round as one process does; the weights stay float32 whatever was done."""
    samples = [sample(30 + rank, 9, seed=rank) for rank in range(world.size)]
    sharded = learner(world, tokens=1, dtype=torch.bfloat16)
    found = sharded.score(samples)
    alone = learner(World(), tokens=1, dtype=torch.bfloat16).score(samples)
    kinds = {str(weight.dtype) for weight in sharded.trained().values()}
    equal = [np.array_equal(a.logprob, b.logprob) for a, b in zip(found, alone, strict=True)]
    return {"equal": equal, "kinds": kinds}


def failing(world: World) -> dict[str, str]:
    """What each rank hears when one fails: the second in its work, then the first in its."""

    def break_second() -> None:
        if world.rank == 1:
            raise OSError("the dog ate it")

    def break_first() -> None:
        raise ValueError("no space")

    return {
        "second": heard(lambda: world.on_all_ranks(break_second)),
        "first": heard(lambda: world.on_first_rank(break_first)),
        "shared": heard(lambda: world.on_first_rank(break_first, (ValueError,))),
        "none": heard(lambda: world.on_first_rank(lambda: world.rank + 7)),
    }


def meeting(world: World) -> dict[str, str]:
    """What the first rank hears when the second is late, and when it has ended."""
    group = distributed.new_group(backend="gloo")
    if world.rank == 1:
        distributed.recv(torch.zeros(1), 0)  # it has waited long enough
        return {}
    impatient = replace(world, group=group, deadline=timedelta(seconds=1))
    late = heard(lambda: impatient.all_gather(1))
    distributed.send(torch.zeros(1), 1)
    return {"late": late, "ended": heard(lambda: world.all_gather(1))}


def heard(work: Callable[[], Any]) -> str:
    try:
        return f"no error: {work()}"
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
