"""Functions by what a configuration says of them: a name or an import path, and settings.

Settings are a function's keyword-only parameters. What does not fit is told at the start of a run,
with what would: an unknown name or setting, a value of the wrong kind, a setting that is missing.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a text"),
}


def functions_of(module: ModuleType, *names: str) -> dict[str, Callable[..., Any]]:
    """A module's own functions whose positional parameters are these, by name with hyphens."""

    def fits(function: object) -> bool:
        if not inspect.isfunction(function) or function.__module__ != module.__name__:
            return False
        parameters = inspect.signature(function).parameters.values()
        return names == tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)

    public = {name: found for name, found in vars(module).items() if not name.startswith("_")}
    return {name.replace("_", "-"): found for name, found in public.items() if fits(found)}


def find_function(
    text: str, known: Mapping[str, Callable[..., Any]], what: str
) -> Callable[..., Any]:
    """The known function of this name, or what module:function names."""
    module, colon, name = text.partition(":")
    if not colon:
        if text not in known:
            allowed = f"{', '.join(known)}, or module:function"
            raise ValueError(f"{what}: got {text!r}, allowed: {allowed}")
        return known[text]
    found = getattr(_module(module, f"{what} {text!r}"), name, None)
    if found is None:
        raise ValueError(f"{what} {text!r}: the module {module!r} has no {name!r}")
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"{what} {text!r}: got a {kind}, allowed: a function")
    return found


def bind(
    function: Callable[..., Any], settings: Mapping[str, object], what: str
) -> Callable[..., Any]:
    """The function with its settings, each checked."""
    known = keyword_only(function, what)
    for name, value in settings.items():
        if name not in known:
            allowed = ", ".join(known) or "no settings"
            raise ValueError(f"{what}: got the setting {name!r}, allowed: {allowed}")
        _check_kind(value, known[name].annotation, f"{what}: {name}")
    missing = [n for n, p in known.items() if p.default is p.empty and n not in settings]
    if missing:
        raise ValueError(f"{what}: needs the settings {', '.join(missing)}, which have no default")
    return partial(function, **settings) if settings else function


def keyword_only(function: Callable[..., Any], what: str) -> dict[str, inspect.Parameter]:
    """Parameters that can be given by name alone."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
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


def _module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module of anybody's, which runs when imported
        fault = f"{type(error).__name__}: {error}"
        raise ValueError(f"{what}: cannot import {name!r} ({fault})") from error


def _check_kind(value: object, annotation: Any, what: str) -> None:
    """Refuse a value that the annotation rules out. Other annotations than KINDS allow anything."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    kinds = [part for part in text.split(" | ") if part != "None"]
    if not kinds or any(kind not in KINDS for kind in kinds):
        return
    types = tuple(each for kind in kinds for each in KINDS[kind][0])
    if type(value) not in types and not (value is None and "None" in text):
        allowed = " or ".join(KINDS[kind][1] for kind in kinds)
        raise ValueError(f"{what}: got {value!r}, allowed: {allowed}")
