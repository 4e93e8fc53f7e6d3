"""Weights by their Hugging Face names: views of a decoder, and tensors in safetensors files.

`hf_views` is the one place that knows both layouts. Loading checks every name, shape and dtype
from the files' headers before any memory is taken, then streams tensor by tensor into the views.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparrow.models.decoder import Decoder, DecoderLayer
from sparrow.models.spec import FileKeys, naming, read_json, write_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SHARD_BYTES = 4 * 2**30
_FLOATS = {"F16", "BF16", "F32", "F64"}


def fingerprint(model: Decoder) -> str:
    """A name for the weights, dtype included."""
    text = hashlib.sha256(repr(model.spec).encode())
    for name, view in sorted(hf_views(model).items()):
        text.update(f"{name} {tuple(view.shape)} {view.dtype}".encode())
        text.update(view.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()[:16]


def hf_views(model: Decoder) -> dict[str, Tensor]:
    """Every weight under its Hugging Face name, sharing memory with the decoder's own."""
    views = {EMBEDDING: model.embed.weight}
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        views |= {f"model.layers.{index}.{name}": view for name, view in _layer_views(layer)}
    views["model.norm.weight"] = model.norm.weight
    if model.lm_head is not None:
        views[HEAD] = model.lm_head.weight
    return {name: view.detach() for name, view in views.items()}


def _layer_views(layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    attention, mlp = layer.attention, layer.mlp
    yield "input_layernorm.weight", layer.attention_norm.weight
    yield "post_attention_layernorm.weight", layer.mlp_norm.weight
    for kind in ("weight", "bias"):
        fused = getattr(attention.qkv, kind)
        if fused is not None:
            parts = fused.split(attention.spec.qkv_sizes)
            for name, part in zip("qkv", parts, strict=True):
                yield f"self_attn.{name}_proj.{kind}", part
    if attention.q_norm is not None and attention.k_norm is not None:
        yield "self_attn.q_norm.weight", attention.q_norm.weight
        yield "self_attn.k_norm.weight", attention.k_norm.weight
    yield "self_attn.o_proj.weight", attention.out.weight
    gate, up = mlp.gate_up.weight.chunk(2)
    yield "mlp.gate_proj.weight", gate
    yield "mlp.up_proj.weight", up
    yield "mlp.down_proj.weight", mlp.down.weight


def with_weights(model: Decoder, weights: Mapping[str, Tensor]) -> Decoder:
    """A model of the same shape and source with other tensors, by the decoder's own names."""
    made = _without_weights(model)
    made.load_state_dict(weights, assign=True)
    return made


def with_hf_weights(model: Decoder, weights: Mapping[str, Tensor]) -> Decoder:
    """A model of the same shape, source and dtype in host memory, with weights of `hf_views`."""
    made = _without_weights(model).to(model.dtype).to_empty(device="cpu")
    for name, view in hf_views(made).items():
        view.copy_(weights[name])
    return made


def _without_weights(model: Decoder) -> Decoder:
    with torch.device("meta"):
        made = Decoder(model.spec)
    made.source = model.source
    return made


class _Index(FileKeys):
    """model.safetensors.index.json: by tensor the file that has it, in the same folder."""

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\\x00]+\.safetensors$")]]


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, of which nothing but the header has been read."""

    file: Path
    data: Any  # its shape, its dtype, and by [...] itself


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of safetensors files, read from their headers alone."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            handle = safe_open(file, framework="pt")
            tensors = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a whole safetensors file: {error}") from error
        for name, data in tensors.items():
            if name in stored:
                raise ValueError(f"{file}: tensor {name} also stands in {stored[name].file.name}")
            stored[name] = StoredTensor(file, data)
    return stored


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, all of which are there."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / WEIGHTS).is_file():
            expected = f"{WEIGHTS} or {INDEX}"
            raise ValueError(f"{folder / WEIGHTS}: no such file (only safetensors: {expected})")
        return [folder / WEIGHTS]
    if (folder / WEIGHTS).exists():
        raise ValueError(f"{folder}: holds both {WEIGHTS} and {INDEX}; which one counts?")
    with naming(index):
        names = _Index.model_validate(read_json(index)).weight_map.values()
    files = [folder / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file}: no such file")
    return files


def check_tensors(
    stored: Mapping[str, StoredTensor], views: Mapping[str, Tensor], folder: Path, *, tied: bool
) -> None:
    """Names, shapes and dtypes of the files fit the model, or a ValueError says which does not."""
    missing = sorted(views.keys() - stored.keys())
    if missing:
        raise ValueError(f"{folder}: {_some(missing)} missing in the safetensors files")
    for name, view in views.items():
        file, data = stored[name]
        shape, expected = data.get_shape(), [*view.shape]
        if shape != expected:
            raise ValueError(
                f"{file}: tensor {name} has shape {shape}, the config asks for {expected}"
            )
        if (dtype := data.get_dtype()) not in _FLOATS:
            raise ValueError(f"{file}: tensor {name} has dtype {dtype}, not a float")
    # A tied head's copy (see `check_tied_head`) and rope tables of old checkpoints are no news.
    unused = sorted(
        name
        for name in stored.keys() - views.keys()
        if not (tied and name == HEAD) and not name.endswith("rotary_emb.inv_freq")
    )
    if unused:
        file = stored[unused[0]].file
        raise ValueError(f"{file}: {_some(unused)} not known to the model; is config.json its own?")


def check_tied_head(stored: Mapping[str, StoredTensor], embedding: Tensor) -> None:
    """A tied model may store its head again, but not another one."""
    if (head := stored.get(HEAD)) is None:
        return
    if not torch.equal(head.data[...].to(embedding), embedding):
        raise ValueError(
            f"{head.file}: tensor {HEAD} differs from the embedding, but the config ties the two"
        )


def write_tensors(views: Mapping[str, Tensor], folder: Path) -> None:
    """Write safetensors files of at most SHARD_BYTES, with an index where there are several."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        views,
        get_storage_size=lambda view: view.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        save_tensors({name: views[name] for name in names}, folder / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file; where it cannot be written, an OSError as for any file."""
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error


def _some(names: list[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:3])})"


def initialise(model: Decoder, seed: int) -> None:
    """Random weights as a new model has them: normal matrices of std 0.02, unit norms."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for name, view in hf_views(model).items():
            if name.endswith("norm.weight"):
                view.fill_(1.0)
            elif name.endswith(".bias"):
                view.zero_()
            else:
                view.normal_(std=0.02, generator=generator)
