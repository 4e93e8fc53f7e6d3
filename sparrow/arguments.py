"""From Python arguments to a checked configuration.

    sparrow.train(model, rows, reward=function, steps=12, optimiser={"rate": 1e-4})

A configuration holds text, numbers and tables only, so that it can be a file. Objects are therefore
replaced by names: a model by its folder, a function or flow by `here:NAME` (registered in this
process), rows and schedules in memory by a file in the cache, named by its content.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from sparrow.files import cache_folder, content_digest
from sparrow.functions import register
from sparrow.progress import is_interactive, progress_callbacks
from sparrow.schema.base import File, Record, problems, to_dict
from sparrow.schema.loading import load_config, merge, merge_settings, shipped_configs
from sparrow.schema.options import list_options
from sparrow.schema.plan import PlanFile
from sparrow.schema.run_folder import TrainResult
from sparrow.schema.schedule import Schedule
from sparrow.schema.surface import Surface
from sparrow.schema.train import TrainConfig

R = TypeVar("R")
Root = TypeVar("Root", bound=Record)
Json = dict[str, Any]

CALLBACKS = {"progress", "report", "callbacks"}
# Settings that take a function, with the names by which configurations resolve them.
FUNCTIONS = {
    "reward": "data.reward",
    "episode": "rollout.episode",
    "advantage": "algorithm.advantage",
    "prompt_filter": "dispatch.prompt_filter",
    "group_filter": "dispatch.group_filter",
    "order": "dispatch.order",
}


def configured(cls: type[Root]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let a function of a configuration also take the settings as arguments.

    A model or surface that is an object is passed on as `loaded`. Without callbacks, a progress bar
    is shown in a notebook and on a terminal.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        own = signature(function)
        parameters = {*own.parameters}

        @wraps(function)
        def verb(*arguments: Any, **settings: Any) -> R:
            options = {name: settings.pop(name) for name in [*settings] if name in parameters}
            name = function.__name__
            base, values = bind(cls, arguments, settings, name)
            if "loaded" in parameters:
                objects = (values.get(key) for key in ("model", "surface"))
                options.setdefault("loaded", next(filter(_is_loaded, objects), None))
            config = _validated(cls, base, values, name)
            bars = CALLBACKS & parameters
            quiet = not bars or (CALLBACKS | {"on_text"}) & {*options} or not is_interactive()
            if quiet:
                return function(config, **options)
            steps = config.run.steps if isinstance(config, TrainConfig) else None
            with progress_callbacks(name, bars, steps) as callbacks:
                return function(config, **callbacks, **options)

        shown = own.replace(parameters=[*_parameters(cls, own)])
        vars(verb).update(__signature__=shown)
        verb.__doc__ = f"{function.__doc__}\n{_settings_help(cls)}"
        return verb

    return decorate


def _positions(cls: type[Record]) -> Sequence[str]:
    """Return the names of positional arguments, in order."""
    positional = [option.name for option in list_options(cls) if option.positional]
    return getattr(cls, "python_arguments", positional)


def _parameters(cls: type[Record], own: Signature) -> Iterator[Parameter]:
    """Yield the parameters of a verb: positional ones, settings by short name, callbacks."""
    options = {option.name: option for option in list_options(cls)}
    first = _positions(cls)
    for name in (*first, *(name for name in options if name not in first)):
        kind = Parameter.POSITIONAL_OR_KEYWORD if name in first else Parameter.KEYWORD_ONLY
        yield Parameter(name, kind, default=options[name].default)
    for name, callback in own.parameters.items():
        if callback.kind is Parameter.KEYWORD_ONLY and name != "loaded":
            yield callback
    yield Parameter("settings", Parameter.VAR_KEYWORD)


def _settings_help(cls: type[Record]) -> str:
    """List the settings of a verb, for the docstring."""
    options = {option.name: option.help for option in list_options(cls)}
    sections = ", ".join(name for name in cls.model_fields if name not in options)
    lines = [f"      {name}: {text}" for name, text in options.items()]
    lines += [f"      {sections}: sections, as dicts"] if sections else []
    return "\n".join(["    Settings, as keyword arguments:\n", *lines, ""])


def bind(
    cls: type[Record], arguments: Sequence[Any], settings: Json, verb: str
) -> tuple[Json, Json]:
    """Return the values of a configuration that was given first, and every setting by its name."""
    if words := [word for word in arguments if isinstance(word, str) and word.startswith("--")]:
        raise TypeError(f"{verb}: got {words[0]!r}, expected a keyword argument such as steps=12")
    base = _base(cls, arguments)
    if base is not None:
        arguments = arguments[1:]
    names = _positions(cls)
    free = [name for name in names if name not in settings and (base is None or name != names[0])]
    takes_several = any(option.positional and option.several for option in list_options(cls))
    if takes_several and len(arguments) > len(free) > 0:
        *first, _ = free
        arguments = [*arguments[: len(first)], arguments[len(first) :]]
    if len(arguments) > len(free):
        taken = ", ".join(free) or "none"
        raise TypeError(f"{verb}: got {len(arguments)} positional arguments, expected {taken}")
    return base or {}, {**dict(zip(free, arguments, strict=False)), **settings}


def _base(cls: type[Record], arguments: Sequence[Any]) -> Json | None:
    """Return the values of a configuration, TOML file or shipped recipe that comes first."""
    first = arguments[0] if arguments else None
    if isinstance(first, cls):
        return first.model_dump(exclude_unset=True)
    if not isinstance(first, str | Path):
        return None
    is_recipe = issubclass(cls, TrainConfig) and str(first) in shipped_configs("train")
    if is_recipe or str(first).endswith(".toml"):
        return load_config(cls, [first]).model_dump(exclude_unset=True)
    return None


def _validated(cls: type[Root], base: Json, values: Json, verb: str) -> Root:
    tables = [_table(cls, name, value, verb) for name, value in values.items()]
    try:
        return cls.model_validate(merge_settings(cls, base, merge(*tables)))
    except ValidationError as error:
        raise ValueError(f"{verb}: {problems(error)}") from None


def _table(cls: type[Record], name: str, value: Any, verb: str) -> Json:
    """Return a setting as a table of the configuration: a short name stands for its dotted key."""
    shortcuts: Mapping[str, str] = getattr(cls, "shortcuts", {})
    is_section = name in cls.model_fields and isinstance(value, Mapping | Record)
    if name not in cls.model_fields and name not in shortcuts:
        near = get_close_matches(name, [*cls.model_fields, *shortcuts], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise TypeError(f"{verb}: no setting {name!r}{hint}")
    keys = [name] if name not in shortcuts or is_section else shortcuts[name].split(".")
    table = as_data(value, keys[-1])
    for key in reversed(keys):
        table = {key: table}
    return table


# Objects to data.


def as_data(value: Any, key: str) -> Any:
    """Return a setting as text, numbers and tables; key: the last part of the setting's name."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if key == "rows":
        from sparrow.tasks.rows import rows_path

        return rows_path(value)
    if isinstance(value, Mapping):
        rows = key == "sets"  # validation.sets: rows by name
        return {name: as_data(v, "rows" if rows else str(name)) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(inner, key) for inner in value]
    if key in FUNCTIONS and callable(value):
        return register(value, FUNCTIONS[key])
    return _object_name(value, key)


def _object_name(value: Any, key: str) -> Any:
    """Return the name that stands for an object of this package."""
    if isinstance(value, PlanFile) and key == "schedule":
        value = value.schedule
    if isinstance(value, Schedule):
        return str(_store(value, "schedules", "schedule.json"))
    if isinstance(value, File) and key == "runs":  # a surface or plan, as the folder of a run
        return str(_store(value, "results", f"{value.what}.json").parent)
    if isinstance(value, TrainResult):
        return str(value.model if key in ("model", "name") else value.folder)
    if _is_loaded(value):
        return str(getattr(value, "source", None) or type(value).__name__)
    if type(value).__name__ == "Flow":
        from sparrow.sparse.flows.loading import register_flow

        return register_flow(value)
    return value.model_dump(exclude_unset=True) if isinstance(value, Record) else value


def _is_loaded(value: Any) -> bool:
    """Whether it is a model or a surface, which verbs take as they are."""
    return isinstance(value, Surface) or type(value).__name__ == "Decoder"


def _store(document: File, kind: str, name: str) -> Path:
    """Write a document to a folder of the cache that is named by its content."""
    digest = content_digest(to_dict(document)).removeprefix("sha256:")[:16]
    file = cache_folder(kind) / f"{document.what}-{digest}" / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        document.save(file)
    return file
