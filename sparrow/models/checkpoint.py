"""Models in and out: loading a folder or a name, random weights, and saving.

A model is whole or it is not there: everything that can be wrong with the files is found before
memory is taken, and a folder is written beside its place and moved in when complete.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparrow.files import remove_unfinished, unfinished_path, verify, write_sums
from sparrow.models.decoder import Decoder
from sparrow.models.sources import locate
from sparrow.models.spec import (
    CONFIG,
    GENERATION_CONFIG,
    ModelSpec,
    naming,
    read_json,
    shape,
    spec_from_hf,
    spec_to_hf,
    token_ids,
    write_json,
)
from sparrow.models.tokenizer import tokenizer_names
from sparrow.models.weights import (
    INDEX,
    check_tensors,
    check_tied_head,
    hf_views,
    initialise,
    stored_tensors,
    weight_files,
    write_tensors,
)


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    report: Callable[[str], None] | None = None,
) -> Decoder:
    """Load a model: `tiny`, `small` or `small-rl` of the package, a Hugging Face folder,
    `smollm2-135m`, or a hub name such as Qwen/Qwen3-0.6B.

    dtype "auto" is float32 on a CPU and the checkpoint's own on a GPU. device "auto" is the GPU
    where there is one. Weights are streamed: no second copy of the model is in memory.
    """
    folder = locate(path_or_name, report=report)
    verify(folder, (CONFIG, GENERATION_CONFIG, INDEX))
    config = read_json(folder / CONFIG)
    spec = _with_generation_eos(spec_from_hf(config, str(folder / CONFIG)), folder)
    model = _empty(spec)
    files = weight_files(folder)
    verify(folder, (file.name for file in files))
    stored = stored_tensors(files)
    check_tensors(stored, hf_views(model), folder, tied=spec.tied)

    target = pick_device(device)
    model = _allocate(model, pick_dtype(dtype, target, config), target)
    for name, view in hf_views(model).items():  # one at a time
        view.copy_(stored[name].data[...])
    if spec.tied:
        check_tied_head(stored, model.head.detach())
    model.source = folder
    return model


def random(
    name: str | ModelSpec,
    *,
    seed: int = 0,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    **changes: Any,
) -> Decoder:
    """Random weights in a published shape, or in any spec; `changes` replace fields of it."""
    spec = name if isinstance(name, ModelSpec) else shape(name)
    if "vocabulary" in changes:  # the ids of special tokens mean nothing in another one
        changes = {"eos_ids": (), "bos_id": None, "pad_id": None, **changes}
    target = pick_device(device)
    model = _allocate(_empty(replace(spec, **changes)), pick_dtype(dtype, target, {}), target)
    initialise(model, seed)
    return model


def save(model: Decoder, folder: str | os.PathLike[str], *, tokenizer: Any = None) -> Path:
    """Write a folder that transformers loads with equal logits.

    The tokenizer, with its chat template, is that of the folder the model came from, unless one
    is given (a transformers tokenizer, or another folder). The folder must be new or empty.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; save into a new one")
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(target.parent, target.name)
    unfinished = unfinished_path(target)
    try:
        unfinished.mkdir()
        _write_tokenizer(unfinished, tokenizer if tokenizer is not None else model.source)
        dtype = str(model.dtype).removeprefix("torch.")
        write_json(unfinished / CONFIG, spec_to_hf(model.spec, dtype))
        write_tensors(hf_views(model), unfinished)
        files = (file for file in unfinished.rglob("*") if file.is_file())
        write_sums(unfinished, [str(file.relative_to(unfinished)) for file in files])
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def pick_device(device: torch.device | str) -> torch.device:
    """A torch device; "auto" is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}: {error}") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was requested, but torch sees no GPU")
    return target


def pick_dtype(
    dtype: torch.dtype | str, device: torch.device, config: dict[str, Any]
) -> torch.dtype:
    """A torch dtype; "auto" is float32 on a CPU, elsewhere the config's own or bfloat16."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        stored = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        dtype = "float32" if device.type == "cpu" else stored
    allowed = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in allowed:
        raise ValueError(f"dtype must be auto, {', '.join(allowed)}, got {dtype!r}")
    return allowed[dtype]


def _empty(spec: ModelSpec) -> Decoder:
    """Build a decoder on the meta device: names and shapes only."""
    with torch.device("meta"):
        return Decoder(spec)


def _allocate(model: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    return model.to(dtype).to_empty(device=device)


def _with_generation_eos(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Generation configs name every id that ends an answer; model configs often only one."""
    file = folder / GENERATION_CONFIG
    eos = token_ids(read_json(file).get("eos_token_id")) if file.is_file() else ()
    with naming(file):
        return replace(spec, eos_ids=eos) if eos else spec


def _write_tokenizer(place: Path, tokenizer: Any) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, str | os.PathLike):
        tokenizer.save_pretrained(place)
        return
    source = Path(tokenizer)
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder to take the tokenizer from")
    names = (*tokenizer_names(source), GENERATION_CONFIG)
    verify(source, names)
    for name in (name for name in names if (source / name).is_file()):
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, place / name)
