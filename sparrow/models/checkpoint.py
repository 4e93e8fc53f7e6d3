"""Models in and out: shipped, a folder, a hub name, fetched, random weights; and saving.

A model is whole or it is not there: everything that can be wrong with the files is found before
memory is taken, and a folder is written beside its place and moved in when complete.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparrow.models.decoder import Decoder
from sparrow.models.fetch import fetch, known
from sparrow.models.shapes import shape
from sparrow.models.spec import ModelSpec, spec_from_hf, spec_to_hf, token_ids
from sparrow.models.weights import (
    check_tensors,
    check_tied_head,
    copy_tensors,
    hf_views,
    initialise,
    stored_tensors,
    write_tensors,
)

SHIPPED = Path(__file__).parent / "shipped"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
# Files that make up a tokenizer and its chat template; copied byte for byte by `save`.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    report: Callable[[str], None] | None = None,
) -> Decoder:
    """Load a model: `tiny` or `small`, which are part of the package, a Hugging Face folder,
    `smollm2-135m`, or a hub name such as Qwen/Qwen3-0.6B.

    dtype "auto" is float32 on a CPU and the checkpoint's own on a GPU. device "auto" is the GPU
    where there is one. Weights are streamed: no second copy of the model is in memory.
    """
    folder = locate(path_or_name, report=report)
    config = read_json(folder / CONFIG)
    spec = _with_generation_eos(spec_from_hf(config, str(folder / CONFIG)), folder)
    model = _empty(spec)
    stored = stored_tensors(folder)
    check_tensors(stored, hf_views(model), folder, tied=spec.tied)

    target = pick_device(device)
    model = _allocate(model, pick_dtype(dtype, target, config), target)
    copy_tensors(stored, hf_views(model))
    if spec.tied:
        check_tied_head(stored, model.head.detach())
    model.source = folder
    return model


def locate(
    path_or_name: str | os.PathLike[str], *, report: Callable[[str], None] | None = None
) -> Path:
    """The folder of a model, fetched or downloaded where need be."""
    folder = Path(path_or_name).expanduser()
    if not os.fspath(path_or_name):
        raise ValueError("no model was named")
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder / CONFIG}: no such file; is this a Hugging Face folder?")
        return folder.resolve()
    name = os.fspath(path_or_name)
    if name in shipped():
        return SHIPPED / name
    if name in known():
        folder = fetch(name, report=report)
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder} is damaged: run sparrow fetch {name} --force")
        return folder
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _download(name)
    raise ValueError(
        f"no model {name!r}: it is no folder, no hub name (owner/name), "
        f"and not one of {', '.join((*shipped(), *known()))}"
    )


def shipped() -> tuple[str, ...]:
    """The names of the models that are part of the package."""
    return tuple(sorted(folder.name for folder in SHIPPED.iterdir() if folder.is_dir()))


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
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        place = Path(scratch) / "model"
        place.mkdir()
        _write_tokenizer(place, tokenizer if tokenizer is not None else model.source)
        _write_json(place / CONFIG, spec_to_hf(model.spec, str(model.dtype).removeprefix("torch.")))
        write_tensors(hf_views(model), place)
        if target.exists():
            target.rmdir()
        os.replace(place, target)
    return target


def load_tokenizer(path_or_name: str | os.PathLike[str]) -> Any:
    """The tokenizer of a model folder or name, by transformers."""
    from transformers import AutoTokenizer

    folder = locate(path_or_name)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES[:2]):
        raise ValueError(f"{folder}: it holds no tokenizer ({' or '.join(TOKENIZER_FILES[:2])})")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: the tokenizer cannot be read: {error}") from error


def pick_device(device: torch.device | str) -> torch.device:
    """A torch device; "auto" is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}: {error}") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch sees no GPU here")
    return target


def pick_dtype(
    dtype: torch.dtype | str, device: torch.device, config: dict[str, Any]
) -> torch.dtype:
    """A torch dtype; "auto" is float32 on a CPU, elsewhere the config's own or bfloat16."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        own = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        dtype = "float32" if device.type == "cpu" else own
    allowed = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in allowed:
        raise ValueError(f"dtype must be auto, {', '.join(allowed)}, got {dtype!r}")
    return allowed[dtype]


def _empty(spec: ModelSpec) -> Decoder:
    """The decoder without memory: names and shapes only."""
    with torch.device("meta"):
        return Decoder(spec)


def _allocate(model: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    return model.to(dtype).to_empty(device=device)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"the hub could not give {name!r} ({type(error).__name__}: {error}). Download the "
            f"model where there is a network and pass its folder, or use "
            f"{', '.join((*shipped(), *known()))}"
        ) from error


def _with_generation_eos(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Generation configs name every id that ends an answer; model configs often only one."""
    file = folder / GENERATION_CONFIG
    eos = token_ids(read_json(file).get("eos_token_id")) if file.is_file() else ()
    try:
        return replace(spec, eos_ids=eos) if eos else spec
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _write_tokenizer(place: Path, tokenizer: Any) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, str | os.PathLike):
        tokenizer.save_pretrained(place)
        return
    source = Path(tokenizer)
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder to take the tokenizer from")
    for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
        if (source / name).is_file():
            shutil.copyfile(source / name, place / name)


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds {type(content).__name__}, not a table of keys")
    return content


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
