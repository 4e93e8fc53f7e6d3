"""Which model and machine a run is planned for, found without weights and without the machine."""

from pathlib import Path
from typing import Literal, NamedTuple

import torch

from sparrow.calibrate.planning.hardware import Hardware, known
from sparrow.engine.memory import host_memory
from sparrow.files import expanded, verify
from sparrow.models.fetch import fetched
from sparrow.models.fetch import known as fetchable
from sparrow.models.sources import locate, shipped, split_revision
from sparrow.models.spec import CONFIG, SHAPES, ModelSpec, read_json, spec_from_hf
from sparrow.schema.base import Record
from sparrow.schema.schedule import Schedule
from sparrow.schema.train import RolloutConfig

ABSENT = "h200"  # the machine that a run for a GPU is planned for where there is none


class TargetMachine(Record):
    """What is planned for."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory: int  # bytes that can be had
    here: bool
    hardware: str | None  # whose step times are known: a name for `Hardware.load`


class Model(NamedTuple):
    """A model without weights."""

    spec: ModelSpec
    source: str


def model_of(name: str) -> Model:
    """A model's shape from its config.json, or by its published name; nothing is downloaded."""
    if expanded(name).is_dir() or name in shipped() or _is_fetched(name):
        return _read(locate(name) / CONFIG)
    if (place := _downloaded(name)) is not None:
        return _read(place)
    repository = split_revision(name)[0]
    short = repository.rpartition("/")[2].lower()
    if short in SHAPES and (name in fetchable() or repository.count("/") == 1):
        return Model(SHAPES[short], f"not at hand, by the published shape {short}")
    raise ValueError(
        f"no model {name!r} at hand, and no published shape of that name: give a folder, one of "
        f"{', '.join((*shipped(), *fetchable()))}, or owner/NAME of {', '.join(SHAPES)}"
    )


def _is_fetched(name: str) -> bool:
    return name in fetchable() and fetched(name) is not None


def _downloaded(name: str) -> Path | None:
    """The config.json of a hub's model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, revision = split_revision(name)
    try:
        found = try_to_load_from_cache(repository, CONFIG, revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _read(file: Path) -> Model:
    verify(file.parent, (CONFIG,))
    return Model(spec_from_hf(read_json(file), str(file)), str(file))


def machine_of(device: str) -> TargetMachine:
    """This machine; where it has no GPU and one is asked for, the one that is known best."""
    if torch.cuda.is_available() and device != "cpu":
        index = torch.device("cuda" if device == "auto" else device).index or 0
        if index >= torch.cuda.device_count():
            raise ValueError(f"device {device!r}: there are {torch.cuda.device_count()} GPUs here")
        name = torch.cuda.get_device_name(index)
        found = next((each for each in known() if each in name.lower()), None)
        free, _ = torch.cuda.mem_get_info(index)
        return TargetMachine(name=name, kind="cuda", memory=free, here=True, hardware=found)
    if device.startswith("cuda"):
        memory = Hardware.load(ABSENT).memory
        return TargetMachine(name=ABSENT, kind="cuda", memory=memory, here=False, hardware=ABSENT)
    return TargetMachine(
        name="this CPU", kind="cpu", memory=host_memory(), here=True, hardware=None
    )


def dtype_of(wanted: str, kind: str) -> torch.dtype:
    """Of the products: 16 bits on a GPU unless told otherwise."""
    if wanted == "auto":
        return torch.bfloat16 if kind == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


def prompt_room(config: RolloutConfig, spec: ModelSpec) -> int:
    """Tokens that a prompt may have."""
    left = spec.max_positions - config.max_tokens
    if left < (config.max_prompt or 1):
        raise ValueError(
            f"rollout.max_tokens {config.max_tokens} and a prompt of {config.max_prompt or 1}: "
            f"allowed are the model's {spec.max_positions} positions for both"
        )
    return config.max_prompt or left


def schedule_notes(schedule: Schedule | None, model: str, longest: int) -> list[str]:
    """What of a schedule may not be what its user thinks."""
    if schedule is None:
        return []
    found, name = list[str](), Path(split_revision(model)[0]).name
    if schedule.model is not None and schedule.model.lower() != name.lower():
        found.append(
            f"schedule {schedule.name} was measured on {schedule.model}, and this is {name}: how "
            "far it strays here nobody has measured; the gate will"
        )
    rows = [schedule.budgets, *(one.budgets for one in schedule.layers)]
    if min(int(row.min()) for row in rows) >= longest:
        found.append(
            f"schedule {schedule.name} keeps all of the at most {longest} tokens: never sparse"
        )
    return found
