"""Functions of the user, named by text: a configuration holds text alone, so it can be a file.

module:function            imported; the current folder is searched too
path/to/file.py:function   the file is run as a module
here:function@digest       registered in this process, such as one of a notebook cell; the digest
                           of its source tells a resumed run whether it is still the same
"""

import contextlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

HERE = "here"
FORMS = "module:function or path/to/file.py:function"

_registered: dict[tuple[str, str], Callable[..., Any]] = {}  # by setting and name


def register(function: Callable[..., Any], setting: str) -> str:
    """Return the text by which `resolve` finds this function for the setting, in this process."""
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    text = f"{HERE}:{name}@{_digest(function)}"
    _registered[setting, text] = function
    return text


def _digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function's source, or of its bytecode: a lambda has no lines of its own.

    Values that it takes from outside, such as globals, are not part of it.
    """
    code = getattr(function, "__code__", None)
    source = repr(type(function)) if code is None else repr(_bytecode(code))
    if getattr(function, "__name__", "") != "<lambda>":
        with contextlib.suppress(OSError, TypeError):
            source = inspect.getsource(type(function) if code is None else function)
    return sha256(source.encode()).hexdigest()[:8]


def _bytecode(value: Any) -> Any:
    """Return a code object, or a constant of one, as data whose repr is the same everywhere."""
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [_bytecode(constant) for constant in value.co_consts]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def resolve(text: str, setting: str) -> Callable[..., Any]:
    """Return the function that a setting names. Raises ValueError with the setting's name."""
    if (setting, text) in _registered:
        return _registered[setting, text]
    place, _, name = text.rpartition(":")
    if place == HERE:
        raise ValueError(
            f"{setting}: {text!r} was defined in another Python process; pass the function "
            f"again, or write it to a file and name that, as {FORMS}"
        )
    if not (place and name.isidentifier()):
        raise ValueError(f"{setting}: expected {FORMS}, got {text!r}")
    function = getattr(_import(place, f"{setting} {text!r}"), name, None)
    if function is None:
        raise ValueError(f"{setting} {text!r}: {place!r} has no {name!r}")
    if not callable(function):
        raise ValueError(f"{setting} {text!r}: expected a function, got {type(function).__name__}")
    return function


def run_file(path: Path, name: str) -> ModuleType:
    """Run a Python file as the module of this name, registered in sys.modules.

    From its source: kept bytecode is told apart by size and seconds, and a file may change faster.
    """
    loader = SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    linecache.cache.pop(str(path), None)
    exec(loader.source_to_code(path.read_bytes(), str(path)), module.__dict__)
    return module


def search_current_folder() -> None:
    """Let imports find modules of the current folder: the installed command does not."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _import(place: str, where: str) -> ModuleType:
    """Import a module, or run a file; whatever its code raises becomes a ValueError."""
    search_current_folder()
    path = Path(place).expanduser().resolve()
    if place.endswith(".py") and not path.is_file():
        raise ValueError(f"{where}: no file {path}")
    try:
        if place.endswith(".py"):
            return run_file(path, f"sparrow_user_{path.stem}")
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a user's module runs when it is imported
        fault = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where}: cannot import {place!r} ({fault})") from error
