"""Loads flows by name: a file, an import path, or the name of a built-in flow.

    flows/mine.py             the flow of a file; flows/mine.py:name where it has several
    package.module:name       an attribute of a module that can be imported
    quest, fine_means(2)      a flow of `sparrow.sparse.flows.library`

Nothing is registered: a file is run as a module, and its flow is the attribute that is a Flow. A
name may be a function that makes one, with constants as arguments. Files and modules run code, so
only a person names them (`load_flow`); what a schedule says of its flow is looked up in the
library alone (`library_flow`, `resolve_flow`).
"""

import ast
import importlib
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from sparrow.functions import HERE, run_file, search_current_folder
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import names_code
from sparrow.sparse.flows import library
from sparrow.sparse.flows.flow import Flow
from sparrow.sparse.flows.tensor import CodeLine, FlowError, did_you_mean

FORMS = "path/to/file.py[:name], module:name, or a built-in flow such as quest or fine_means(2)"
FORCE = (
    "--attention.force=true (generate), --rollout.attention.force=true (train), --force (eval, "
    "calibrate)"
)
LIBRARY = "sparrow.sparse.flows.library"
LONGEST = 200  # characters of a library flow with its arguments


_registered: dict[str, Flow] = {}  # flows of this process, such as one of a notebook cell


def register_flow(flow: Flow) -> str:
    """Return the text by which `load_flow` finds this flow, in this process."""
    _registered[flow.name] = flow
    return f"{HERE}:{flow.name}"


def load_flow(text: str) -> Flow:
    """Load the flow that a user names; runs the file or module that defines it.

    ValueError with what is wrong, FlowError for a broken flow.
    """
    file = re.fullmatch(r"(.+\.py)(?::(.*))?", text, re.DOTALL)
    if file is not None:
        module = _run_file(Path(file[1]).expanduser())
        return _only_flow(module, file[1]) if file[2] is None else _named(module, file[2], file[1])
    if ":" in text:
        name, _, attribute = text.partition(":")
        if name == HERE:
            if attribute not in _registered:
                raise ValueError(f"{text!r} is a flow of another process; name it as {FORMS}")
            return _registered[attribute]
        return _named(_import(name), attribute, name)
    return library_flow(text)


def library_flow(text: str) -> Flow:
    """A flow of the library by its name, with constants as arguments: runs no other code."""
    name, bracket, arguments = text.partition("(")
    text = name.replace("-", "_") + bracket + arguments
    if len(text) > LONGEST:
        raise ValueError(f"{text[:40]!r}... names no flow; a flow is {FORMS}")
    attribute, *_ = _call(text, LIBRARY)
    if attribute not in built_in():
        hint = _hint(library, attribute)
        raise ValueError(f"{LIBRARY} has no flow {attribute!r}{hint} (a flow is {FORMS})")
    return _named(library, text, LIBRARY)


def resolve_flow(schedule: Schedule, named: str | None = None, *, force: bool = False) -> Flow:
    """The flow of a schedule: the one that the user names, else a flow of the library.

    A schedule is data: a file or module that its provenance names is not run. Whether the flow has
    the formula that the schedule was made for is checked by `Rule.of` and `Rule.check`; the flow
    of a file or module, for a schedule that has no digest of its formula, is refused here unless
    forced. A Flow of this process is taken by its name.
    """
    if named is not None:
        flow = load_flow(named)
        is_file = names_code(named) and not named.startswith(f"{HERE}:")
        if schedule.flow_digest is None and is_file and not force:
            raise ValueError(
                f"schedule {schedule.name!r} has no flow_digest, so whether {named} is the flow it "
                f"was made for cannot be checked: add flow_digest {flow.digest} to it if so, plan "
                f"it again with `sparrow plan`, or force it: {FORCE}"
            )
        return flow
    notes = {note.key: note.text for note in schedule.provenance}
    source = notes.get("flow", schedule.flow).rsplit(", program ", 1)[0]
    try:
        flow = library_flow(source)
        if flow.name != schedule.flow:
            raise ValueError(f"{source} is the flow {flow.name!r}")
    except ValueError as error:
        raise ValueError(
            f"schedule {schedule.name!r} is for the flow {schedule.flow!r} ({source[:LONGEST]!r}), "
            f"which is not in the library, and a schedule runs no code: name the flow by --flow or "
            f"attention.flow, as {FORMS}"
        ) from error
    return flow


def built_in(module: ModuleType = library) -> list[str]:
    """The names in the library: flows, and functions that make one without arguments."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}

    def makes_flow(value: Any) -> bool:
        return getattr(value, "__annotations__", {}).get("return") is Flow

    return sorted(n for n, v in public.items() if isinstance(v, Flow) or makes_flow(v))


# Modules.


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no file {path}; a flow is {FORMS}")
    name = f"sparrow_flow_file_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}"
    with _naming_author_line(path.resolve()):
        return run_file(path.resolve(), name)


@contextmanager
def _naming_author_line(path: Path | None) -> Iterator[None]:
    """Turn any exception of an author's file into a ValueError with its innermost line."""
    try:
        yield
    except FlowError:
        raise
    except (Exception, SystemExit) as error:
        lines = traceback.extract_tb(error.__traceback__)
        path = path or Path(lines[-1].filename)
        numbers = [frame.lineno for frame in lines if frame.filename == str(path)]
        if isinstance(error, SyntaxError):
            numbers.append(error.lineno)
        place = CodeLine(str(path), numbers[-1] or 0) if numbers else path
        raise ValueError(f"{place}: {_error_text(error)}") from error


def _error_text(error: BaseException) -> str:
    """An exception with its type; its text may itself be code that fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of an author's class
        return type(error).__name__


def _import(name: str) -> ModuleType:
    search_current_folder()
    try:
        with _naming_author_line(None):
            return importlib.import_module(name)
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}."):
            missing = f"no module {cause.name!r} can be imported; a flow is {FORMS}"
            raise ValueError(missing) from None
        raise


# Attributes.


def _only_flow(module: ModuleType, where: str) -> Flow:
    """The one flow of a file; built-in ones that it imports do not count beside its own."""
    named = {n: v for n, v in vars(module).items() if isinstance(v, Flow) and n[0] != "_"}
    imported = {id(value) for value in vars(library).values()}
    flows = {n: v for n, v in named.items() if id(v) not in imported} or named
    if not flows:
        raise ValueError(f"{where}: no flow in it; give an attribute a Flow(...)")
    if len({id(flow) for flow in flows.values()}) > 1:
        raise ValueError(f"{where}: several flows ({', '.join(flows)}); name one, as {where}:NAME")
    return next(iter(flows.values()))


def _named(module: ModuleType, text: str, where: str) -> Flow:
    name, positional, named = _call(text, where)
    value = getattr(module, name, None)
    if value is None:
        raise ValueError(f"{where} has no flow {name!r}{_hint(module, name)}")
    flow = value
    if callable(value):
        try:
            flow = value(*positional, **named)
        except FlowError:
            raise
        except Exception as error:  # an author's function
            raise ValueError(f"{where}:{text}: {_error_text(error)}") from error
    if not isinstance(flow, Flow):
        raise ValueError(f"{where}:{text} is a {type(flow).__name__}, not a Flow")
    return flow


def _call(text: str, where: str) -> tuple[str, list[Any], dict[str, Any]]:
    """A name, and the arguments of its call if it has any: constants only."""
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, [], {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
            return node.func.id, [ast.literal_eval(argument) for argument in node.args], named
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        pass
    raise ValueError(f"{where}: {text!r} names no flow; a flow is {FORMS}")


def _hint(module: ModuleType, name: str) -> str:
    names = built_in(module)
    return did_you_mean(name, names) or f"; it has {', '.join(names) or 'none'}"
