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

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from sparrow.functions import resolve
from sparrow.schema.train import AlgorithmConfig, Choice
from sparrow.training.objectives import advantages, corrections, surrogates
from sparrow.training.objectives.advantages import Advantage, Rewards
from sparrow.training.objectives.corrections import Correction, combine
from sparrow.training.objectives.surrogates import Aggregate, Objective, Surrogate, Terms


def functions_of(module: ModuleType, *names: str) -> dict[str, Callable[..., Any]]:
    """A module's own functions whose positional parameters are these, by name with hyphens."""

    def fits(function: object) -> bool:
        if not inspect.isfunction(function) or function.__module__ != module.__name__:
            return False
        parameters = inspect.signature(function).parameters.values()
        return names == tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)

    public = {name: found for name, found in vars(module).items() if not name.startswith("_")}
    return {name.replace("_", "-"): found for name, found in public.items() if fits(found)}


ADVANTAGES = functions_of(advantages, "groups")
SURROGATES = functions_of(surrogates, "terms")
AGGREGATES = functions_of(surrogates, "lengths")
CORRECTIONS = functions_of(corrections, "log_rho_T", "sequence_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm(Objective):
    """An objective, complete: functions with their settings, and what the loop must do for it."""

    advantage: Advantage
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


def algorithm_of(config: AlgorithmConfig, *, max_tokens: int) -> Algorithm:
    """The algorithm of a configuration: its preset, changed by what is not None.

    A surrogate in the configuration replaces the preset's with its settings, so clips that it does
    not give are the function's own. `max_tokens` is the most an answer may have.
    """
    preset = PRESETS[config.name]
    choice = config.surrogate or preset.surrogate
    used = _advantage(config.advantage or preset.advantage)
    own = used in ADVANTAGES.values()
    gspo = config.surrogate is not None and config.surrogate.use == "gspo"
    usual = "seq-mean-token-mean" if gspo else preset.aggregate  # the one that gspo is made for
    return Algorithm(
        advantage=used,
        surrogate=_surrogate(choice),
        aggregate=_aggregate(config.aggregate or usual, max_tokens),
        entropy=config.entropy,
        corrections=tuple(map(_correction, config.corrections)),
        dynamic=preset.dynamic if config.dynamic is None else config.dynamic,
        overlong=_overlong(config, max_tokens),
        # Where remax is used, or anybody's function in its place.
        greedy=used is advantages.remax or (config.name == "remax" and not own),
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


# Functions by what a configuration says of them: a name or an import path, and settings, which are
# a function's keyword-only parameters. What does not fit is told at the start of a run, with what
# would: an unknown name or setting, a value of the wrong kind, a setting that is missing.


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
    """The function with its settings, each checked."""
    known = keyword_only(function, what)
    for name, value in settings.items():
        if name not in known:
            allowed = ", ".join(known) or "no settings"
            raise ValueError(f"{what}: got the setting {name!r}, allowed: {allowed}")
        if (kind := known[name].annotation) is not inspect.Parameter.empty:
            _check_kind(value, kind, f"{what}: {name}")
    missing = [n for n, p in known.items() if p.default is p.empty and n not in settings]
    if missing:
        raise ValueError(f"{what}: needs the settings {', '.join(missing)}, which have no default")
    return partial(function, **settings) if settings else function


def keyword_only(function: Callable[..., Any], what: str) -> dict[str, inspect.Parameter]:
    """Parameters that can be given by name alone."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (TypeError, ValueError, NameError) as error:
        raise ValueError(f"{what}: its parameters cannot be read ({error})") from error
    return {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def try_function(function: Callable[..., Any], what: str, *arguments: object) -> Any:
    """What the function gives for a small example: faults show at the start, not after a rollout.

    It may be anybody's, so any exception can come; it is told with the function's name.
    """
    try:
        return function(*arguments)
    except Exception as error:
        fault = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{what}, tried on a small example: {fault}") from error


def _check_kind(value: object, annotation: Any, what: str) -> None:
    """Refuse a value that the annotation rules out."""
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError as error:
        raise ValueError(f"{what}: got {value!r}, allowed: {error.errors()[0]['msg']}") from None
    except PydanticUserError:  # of a type that has no schema
        return
