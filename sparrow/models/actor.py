"""The folder of an actor's adapter: PEFT's files, the schedule it is for, and its base's digest.

    adapter_config.json, adapter_model.safetensors    as PEFT writes them
    schedule.json                                     the budgets under which it was distilled
    actor.json                                        the base that it belongs to

An adapter of the sparse actor corrects one policy: on another base it is refused.
"""

import hashlib
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from sparrow.files import verify, write_sums
from sparrow.models.decoder import Decoder
from sparrow.models.lora import Adapter
from sparrow.models.weights import hf_views
from sparrow.schema.base import File
from sparrow.schema.run_folder import ACTOR, SCHEDULE
from sparrow.schema.schedule import Schedule

ABOUT = "actor.json"


class ActorFile(File):
    """actor.json."""

    what: ClassVar = "actor adapter"
    version: ClassVar = 1
    made_by: ClassVar = "sparrow distill"

    format: int = 1
    base: str  # digest of the policy's weights
    model: str  # its name


class LoadedActor(NamedTuple):
    """An adapter with the schedule it was distilled for."""

    adapter: Adapter
    schedule: Schedule


def base_digest(model: Decoder) -> str:
    """A digest of a model's weights, rounded to bfloat16: the same in every dtype."""
    text = hashlib.sha256(repr(model.spec).encode())
    for name, view in sorted(hf_views(model).items()):
        rounded = view.to(torch.bfloat16).cpu().contiguous()
        text.update(f"{name} {tuple(view.shape)}".encode())
        text.update(rounded.view(torch.uint8).numpy().tobytes())
    return text.hexdigest()[:32]


def adapter_digest(adapter: Adapter) -> str:
    """A digest of an adapter's matrices in float32."""
    text = hashlib.sha256(f"{adapter.alpha} {adapter.rslora}".encode())
    for name, tensor in sorted(adapter.tensors().items()):
        whole = tensor.detach().float().cpu().contiguous()
        text.update(name.encode() + whole.numpy().tobytes())
    return text.hexdigest()[:16]


def save_actor(
    folder: Path, adapter: Adapter, schedule: Schedule, model: Decoder, *, name: str
) -> Path:
    """Write the folder; model: the policy that the adapter belongs to."""
    adapter.save(folder)
    schedule.save(folder / SCHEDULE)
    ActorFile(base=base_digest(model), model=name).save(folder / ABOUT)
    write_sums(folder, (ABOUT, SCHEDULE))
    return folder


def load_actor(folder: Path, model: Decoder, *, dtype: torch.dtype | None = None) -> LoadedActor:
    """Read the folder for a model; ValueError if the adapter belongs to another base."""
    place = folder / ACTOR if (folder / ACTOR / ABOUT).is_file() else folder  # of a run
    if not place.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if not (place / ABOUT).is_file():
        raise ValueError(
            f"{folder}: no {ABOUT}, so it is no adapter of a sparse actor (`sparrow distill`, or "
            "the folder `actor` of a run with rollout.distill)"
        )
    verify(place, (ABOUT, SCHEDULE))
    about = ActorFile.load(place / ABOUT)
    if about.base != base_digest(model):
        raise ValueError(
            f"{place} belongs to other weights than these: to {about.model} "
            f"({about.base[:12]}, not {base_digest(model)[:12]})"
        )
    adapter = Adapter.load(place, model.spec, dtype=dtype or model.dtype, device=model.device)
    return LoadedActor(adapter, Schedule.load(place / SCHEDULE))
