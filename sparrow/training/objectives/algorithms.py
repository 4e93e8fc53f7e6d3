"""Algorithms: advantage, surrogate, aggregate and corrections of a training run.

| name        | advantage        | clip       | aggregate               | also                     |
|-------------|------------------|------------|-------------------------|--------------------------|
| grpo        | grpo             | 0.2 / 0.2  | token-mean              |                          |
| dr-grpo     | mean-centred     | 0.2 / 0.2  | seq-mean-token-sum-norm |                          |
| dapo        | grpo             | 0.2 / 0.28 | token-mean              | dynamic, overlong        |
| rloo        | rloo             | 0.2 / 0.2  | token-mean              |                          |
| remax       | remax            | 0.2 / 0.2  | token-mean              | a greedy answer a prompt |
| reinforce++ | batch-normalised | 0.2 / 0.2  | token-mean              |                          |

GRPO as first published uses seq-mean-token-mean; here the mean is over tokens, as in Sparrow's
objective. All use PPO's clip, also those published with -A log pi: at one update per rollout the
gradient is the same, and with several it stays bounded. Names are those of the functions in the
modules beside this one, with hyphens. module:function names a user's function.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, ValidationError, create_model

from sparrow.functions import resolve
from sparrow.schema.base import problems
from sparrow.schema.train import AlgorithmConfig, Choice
from sparrow.training.objectives import advantages, corrections, surrogates
from sparrow.training.objectives.advantages import Advantage, Rewards
from sparrow.training.objectives.corrections import Correction, combine
from sparrow.training.objectives.surrogates import Aggregate, Objective, Surrogate, Terms


def named_functions(module: ModuleType, *names: str) -> dict[str, Callable[..., Any]]:
    """A module's functions with these positional parameters, by name with hyphens."""

    def fits(function: object) -> bool:
        if not inspect.isfunction(function) or function.__module__ != module.__name__:
            return False
        parameters = inspect.signature(function).parameters.values()
        return names == tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)

    public = {name: item for name, item in vars(module).items() if not name.startswith("_")}
    return {name.replace("_", "-"): item for name, item in public.items() if fits(item)}


ADVANTAGES = named_functions(advantages, "groups")
SURROGATES = named_functions(surrogates, "terms")
AGGREGATES = named_functions(surrogates, "lengths")
CORRECTIONS = named_functions(corrections, "log_rho_T", "sequence_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm(Objective):
    """An objective with its advantage and corrections, and what the loop must do for it."""

    advantage: Advantage
    corrections: tuple[Correction, ...]
    dynamic: bool  # dynamic sampling: groups all right or all wrong are replaced
    overlong: int  # cushion of the penalty on long answers, in tokens; 0: no penalty
    greedy: bool  # a greedy answer to each prompt is the baseline


STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)  # of settings
CLIP = Choice(use="ppo", settings={"low": 0.2, "high": 0.2})
CLIP_HIGHER = Choice(use="ppo", settings={"low": 0.2, "high": 0.28})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The defaults of an algorithm."""

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


def make_algorithm(config: AlgorithmConfig, *, max_tokens: int) -> Algorithm:
    """Make the algorithm of a configuration: its preset, changed by settings that are not None.

    A surrogate in the configuration replaces the preset's together with its settings, so missing
    ones have the function's defaults. max_tokens: of an answer.
    """
    preset = PRESETS[config.name]
    choice = config.surrogate or preset.surrogate
    advantage = _advantage(config.advantage or preset.advantage)
    built_in = advantage in ADVANTAGES.values()
    gspo = config.surrogate is not None and config.surrogate.use == "gspo"
    default = "seq-mean-token-mean" if gspo else preset.aggregate  # gspo needs this one
    return Algorithm(
        advantage=advantage,
        surrogate=_surrogate(choice),
        aggregate=_aggregate(config.aggregate or default, max_tokens),
        entropy=config.entropy,
        kl=config.kl,
        corrections=tuple(map(_correction, config.corrections)),
        dynamic=preset.dynamic if config.dynamic is None else config.dynamic,
        overlong=_overlong(config, max_tokens),
        # For remax, or a user's function in its place.
        greedy=advantage is advantages.remax or (config.name == "remax" and not built_in),
    )


def _advantage(text: str) -> Advantage:
    what = f"algorithm.advantage {text!r}"
    advantage = bind(find_function(text, ADVANTAGES, "algorithm.advantage"), {}, what)
    result = try_function(advantage, what, [Rewards(np.array([0.0, 1.0]), 0.0)])
    arrays = result if isinstance(result, list | tuple | np.ndarray) else ()
    if [np.shape(array) for array in arrays] != [(2,)]:
        raise ValueError(f"{what}: expected a list with an array per group, got {result!r}")
    return advantage


def _surrogate(choice: Choice) -> Callable[[Terms], Surrogate]:
    what = f"algorithm.surrogate {choice.use!r}"
    function = find_function(choice.use, SURROGATES, "algorithm.surrogate")
    surrogate = bind(function, choice.settings, what)
    example_T = torch.tensor([-1.0, -0.5, -0.25])
    terms = Terms(example_T, example_T, example_T, torch.ones(3), torch.tensor([0, 0, 1]))
    result = try_function(surrogate, what, terms)
    if not isinstance(result, Surrogate) or any(values_T.shape != (3,) for values_T in result):
        raise ValueError(f"{what}: expected a Surrogate with a value per token, got {result!r}")
    return surrogate


def _correction(choice: Choice) -> Correction:
    what = f"algorithm.corrections {choice.use!r}"
    function = find_function(choice.use, CORRECTIONS, "algorithm.corrections")
    correction = bind(function, choice.settings, what)
    example = torch.tensor([0.0, 0.25, -0.25]), torch.tensor([0, 0, 1])
    try_function(lambda *arguments: combine([correction], *arguments), what, *example)
    return correction


def _aggregate(text: str, max_tokens: int) -> Aggregate:
    """The aggregate; a setting `longest` is the most tokens of an answer."""
    what = f"algorithm.aggregate {text!r}"
    function = find_function(text, AGGREGATES, "algorithm.aggregate")
    settings = {"longest": max_tokens} if "longest" in keyword_only(function, what) else {}
    aggregate = bind(function, settings, what)
    result: Any = try_function(aggregate, what, np.array([1, 2]))
    if np.shape(result) != (2,):
        raise ValueError(f"{what}: expected a coefficient per sequence, got {result!r}")
    return aggregate


def _overlong(config: AlgorithmConfig, max_tokens: int) -> int:
    """The cushion; by default a fifth of the answer, as 4096 of 20480 tokens in the paper."""
    if config.overlong is None:
        return max(1, max_tokens // 5) if PRESETS[config.name].overlong else 0
    if config.overlong > max_tokens:
        raise ValueError(
            f"algorithm.overlong: expected at most rollout.max_tokens ({max_tokens}), got "
            f"{config.overlong}"
        )
    return config.overlong


# Functions by name or import path, with settings, which are their keyword-only parameters. Unknown
# names and settings, values of a wrong type and missing settings are errors at the start of a run.


def find_function(
    text: str, known: Mapping[str, Callable[..., Any]], what: str
) -> Callable[..., Any]:
    """Return the built-in function of this name, or the user's function that a text names."""
    if ":" in text:
        return resolve(text, what)
    if text not in known:
        allowed = ", ".join([*known, "module:function"])
        raise ValueError(f"{what}: got {text!r}, allowed: {allowed}")
    return known[text]


def bind(
    function: Callable[..., Any], settings: Mapping[str, object], what: str
) -> Callable[..., Any]:
    """Bind checked settings to a function."""
    known = keyword_only(function, what)
    kinds = [Any if p.annotation is p.empty else p.annotation for p in known.values()]
    defaults = [... if p.default is p.empty else p.default for p in known.values()]
    fields: Any = dict(zip(known, zip(kinds, defaults, strict=True), strict=True))
    try:
        create_model("Settings", __config__=STRICT, **fields).model_validate(settings)
    except ValidationError as error:
        expected = ", ".join(known) or "none"
        raise ValueError(f"{what}: {problems(error)}; its settings: {expected}") from None
    return partial(function, **settings) if settings else function


def keyword_only(function: Callable[..., Any], what: str) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a function."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (TypeError, ValueError, NameError) as error:
        raise ValueError(f"{what}: its parameters cannot be read ({error})") from error
    return {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def try_function(function: Callable[..., Any], what: str, *arguments: object) -> Any:
    """Call a function on a small example, so that faults show before the first rollout.

    It may be user code that raises anything; the error names the function.
    """
    try:
        return function(*arguments)
    except Exception as error:
        fault = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{what}, tried on a small example: {fault}") from error
