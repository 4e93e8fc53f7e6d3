"""Algorithms: which advantage, surrogate, aggregate and corrections a training run uses.

| name        | advantage        | clip       | aggregate               | also                     |
|-------------|------------------|------------|-------------------------|--------------------------|
| grpo        | grpo             | 0.2 / 0.2  | token-mean              |                          |
| dr-grpo     | mean-centred     | 0.2 / 0.2  | seq-mean-token-sum-norm |                          |
| dapo        | grpo             | 0.2 / 0.28 | token-mean              | dynamic, overlong        |
| rloo        | rloo             | 0.2 / 0.2  | token-mean              |                          |
| remax       | remax            | 0.2 / 0.2  | token-mean              | a greedy answer a prompt |
| reinforce++ | batch-normalised | 0.2 / 0.2  | token-mean              |                          |

GRPO as first published takes seq-mean-token-mean; here the mean is over tokens, as Sparrow's own
objective has it. All use PPO's clip, also those published with -A log pi: at one update per rollout
the gradient is the same, and with several it stays bounded. Names here are the functions' with
hyphens: a function of the modules beside has its name by being there. module:function names
anybody's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparrow.schema.train import AlgorithmConfig, Choice
from sparrow.train.objectives import advantages, corrections, surrogates
from sparrow.train.objectives.advantages import Advantage, Rewards
from sparrow.train.objectives.corrections import Correction, combine
from sparrow.train.objectives.functions import (
    bind,
    find_function,
    functions_of,
    keyword_only,
    try_function,
)
from sparrow.train.objectives.surrogates import Aggregate, Surrogate, Terms

ADVANTAGES = functions_of(advantages, "groups")
SURROGATES = functions_of(surrogates, "terms")
AGGREGATES = functions_of(surrogates, "lengths")
CORRECTIONS = functions_of(corrections, "log_rho_T", "sequence_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An objective, complete: functions with their settings, and what the loop must do for it."""

    advantage: Advantage
    surrogate: Callable[[Terms], Surrogate]
    aggregate: Aggregate
    corrections: tuple[Correction, ...]
    dynamic: bool  # groups that are all right or all wrong are left out and replaced
    overlong: int  # cushion of the penalty on long answers, in tokens; 0: no penalty
    greedy: bool  # a greedy answer to each prompt is wanted, as baseline


CLIP = Choice(use="ppo", settings={"low": 0.2, "high": 0.2})
CLIP_HIGHER = Choice(use="ppo", settings={"low": 0.2, "high": 0.28})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What an algorithm's name stands for."""

    advantage: str
    surrogate: Choice = CLIP
    aggregate: str = "token-mean"
    dynamic: bool = False
    overlong: bool = False


PRESETS = {
    "grpo": Preset(advantage="grpo"),
    "dr-grpo": Preset(advantage="mean-centred", aggregate="seq-mean-token-sum-norm"),
    "dapo": Preset(advantage="grpo", surrogate=CLIP_HIGHER, dynamic=True, overlong=True),
    "rloo": Preset(advantage="rloo"),
    "remax": Preset(advantage="remax"),
    "reinforce++": Preset(advantage="batch-normalised"),
}


def algorithm_of(
    config: AlgorithmConfig,
    *,
    max_tokens: int,
    advantage: Advantage | None = None,
    surrogate: Callable[[Terms], Surrogate] | None = None,
    corrections: Sequence[Correction] | None = None,
) -> Algorithm:
    """The algorithm of a configuration: its preset, changed by what is not None.

    A surrogate in the configuration replaces the preset's with its settings, so clips that it does
    not give are the function's own. `max_tokens` is the most an answer may have. Functions that are
    passed in win over the configuration, and are taken as they are.
    """
    preset = PRESETS[config.name]
    choice = config.surrogate or preset.surrogate
    used = advantage or _advantage(config.advantage or preset.advantage)
    return Algorithm(
        advantage=used,
        surrogate=surrogate or _surrogate(choice),
        aggregate=_aggregate(_aggregate_name(config, surrogate is None), max_tokens),
        corrections=tuple(
            map(_correction, config.corrections) if corrections is None else corrections
        ),
        dynamic=preset.dynamic if config.dynamic is None else config.dynamic,
        overlong=_overlong(config, max_tokens),
        greedy=_wants_greedy(used, config.name),
    )


def _advantage(text: str) -> Advantage:
    what = f"algorithm.advantage {text!r}"
    found = bind(find_function(text, ADVANTAGES, "algorithm.advantage"), {}, what)
    result = try_function(found, what, [Rewards(np.array([0.0, 1.0]), 0.0)])
    if len(result) != 1 or np.shape(result[0]) != (2,):
        raise ValueError(f"{what}: got {result!r}, allowed: a list of an array per group")
    return found


def _surrogate(choice: Choice) -> Callable[[Terms], Surrogate]:
    what = f"algorithm.surrogate {choice.use!r}"
    function = find_function(choice.use, SURROGATES, "algorithm.surrogate")
    found = bind(function, choice.settings, what)
    example_T = torch.tensor([-1.0, -0.5, -0.25])
    terms = Terms(example_T, example_T, example_T, torch.ones(3), torch.tensor([0, 0, 1]))
    result = try_function(found, what, terms)
    if not isinstance(result, Surrogate) or any(each.shape != (3,) for each in result):
        raise ValueError(f"{what}: got {result!r}, allowed: a Surrogate with a value per token")
    return found


def _correction(choice: Choice) -> Correction:
    what = f"algorithm.corrections {choice.use!r}"
    function = find_function(choice.use, CORRECTIONS, "algorithm.corrections")
    found = bind(function, choice.settings, what)
    example = torch.tensor([0.0, 0.25, -0.25]), torch.tensor([0, 0, 1])
    try_function(lambda *given: combine([found], *given), what, *example)
    return found


def _aggregate_name(config: AlgorithmConfig, named: bool) -> str:
    """As configured, or as the preset has it; gspo by name brings the aggregate it is made for."""
    if config.aggregate is not None:
        return config.aggregate
    if named and config.surrogate is not None and config.surrogate.use == "gspo":
        return "seq-mean-token-mean"
    return PRESETS[config.name].aggregate


def _aggregate(text: str, max_tokens: int) -> Aggregate:
    """With `longest`, where it has such a setting, as the most tokens of an answer."""
    what = f"algorithm.aggregate {text!r}"
    function = find_function(text, AGGREGATES, "algorithm.aggregate")
    settings = {"longest": max_tokens} if "longest" in keyword_only(function, what) else {}
    found = bind(function, settings, what)
    result: Any = try_function(found, what, np.array([1, 2]))
    if np.shape(result) != (2,):
        raise ValueError(f"{what}: got {result!r}, allowed: a coefficient per sequence")
    return found


def _overlong(config: AlgorithmConfig, max_tokens: int) -> int:
    """The cushion: unless given, a fifth of the answer, as 4096 of 20480 tokens in the paper."""
    if config.overlong is None:
        return max(1, max_tokens // 5) if PRESETS[config.name].overlong else 0
    if config.overlong > max_tokens:
        allowed = f"0 to rollout.max_tokens, {max_tokens}"
        raise ValueError(f"algorithm.overlong: got {config.overlong}, allowed: {allowed}")
    return config.overlong


def _wants_greedy(advantage: Advantage, name: str) -> bool:
    """Where remax is used, or anybody's function in its place."""
    ours = advantage in ADVANTAGES.values()
    return advantage is advantages.remax or (name == "remax" and not ours)
