"""The state of a run as two files, without pickle: tensors, and what they are part of.

    state.safetensors    every tensor, by its place in the state
    state.json           the structure around them

In state.json lists, numbers, text, true, false and null stand for themselves; an object has one
key, which says what it is: {"tensor": name}, {"tuple": [...]} or {"dict": [[key, value], ...]}.
The safetensors file is written here: the library's writer holds a copy of all tensors in host
memory, and reports a full disk without its errno.
"""

import json
import struct
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparrow.files import parse_json, sync

STRUCTURE, TENSORS = "state.json", "state.safetensors"
FILES = (STRUCTURE, TENSORS)
PLAIN = (type(None), bool, int, float, str)
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8  # bytes, of the first tensor in a file

State = dict[str, Any]
Tensors = dict[str, Tensor]


def tensor_bytes(state: State) -> int:
    """Bytes of the tensors in a state; ValueError where something in it cannot be written."""
    _, tensors = _parts(state)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_state(folder: Path, state: State) -> None:
    """Write both files into a folder; a tensor is copied to the host only while it is written.

    Raises ValueError where the state holds what could not be read back, OSError as the disk does.
    """
    structure, tensors = _parts(state)
    with (folder / TENSORS).open("wb") as file:
        _write_tensors(file, tensors)
        sync(file)
    with (folder / STRUCTURE).open("wb") as file:
        file.write(json.dumps(structure).encode())
        sync(file)


def read_state(folder: Path) -> State:
    """The state in a folder, on the CPU; ValueError with the file that is damaged."""
    tensors = _read_tensors(folder / TENSORS)
    try:
        state = _value(parse_json((folder / STRUCTURE).read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{folder / STRUCTURE} is damaged ({_told(error)})") from error
    if not isinstance(state, dict):
        raise ValueError(f"{folder / STRUCTURE} holds {type(state).__name__}, allowed: a dict")
    return state


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# The structure.


def _parts(state: State) -> tuple[Any, Tensors]:
    tensors: Tensors = {}
    return _plain(state, "state", tensors), tensors


def _plain(value: Any, where: str, tensors: Tensors) -> Any:
    """A value for JSON; its tensors are put aside under their places."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) and _is_writable(value):
        assert where not in tensors, f"{where} is there twice"
        tensors[where] = value.detach()
        return {"tensor": where}
    if kind in (dict, OrderedDict):
        keys = [_plain(key, f"the keys of {where}", tensors) for key in value]
        values = [_plain(item, f"{where}[{key!r}]", tensors) for key, item in value.items()]
        return {"dict": list(zip(keys, values, strict=True))}
    if kind in (list, tuple):
        items = [_plain(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind not in PLAIN:
        allowed = "dense tensors, numbers, text, None, and dicts, lists and tuples of them"
        given = f"a {kind.__module__}.{kind.__name__}"
        if isinstance(value, Tensor):
            given += f" of {value.dtype}, {value.layout}"
        raise ValueError(f"{where}: got {given}, allowed: {allowed}")
    return value


def _is_writable(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype in DTYPES and not tensor.is_meta


def _value(plain: Any, tensors: Tensors) -> Any:
    """Inverse of `_plain`."""
    if isinstance(plain, list):
        return [_value(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "tuple":
        return tuple(_value(inner, tensors))
    if kind == "dict":
        return {_value(key, tensors): _value(item, tensors) for key, item in inner}
    raise ValueError(f"got an object of kind {kind!r}, allowed: tensor, tuple, dict")


# Tensors.


def _write_tensors(file: IO[bytes], tensors: Tensors) -> None:
    """The format of safetensors: the header's length, the header, bytes; wide elements first."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _read_tensors(path: Path) -> Tensors:
    """Copies: what safetensors gives is a view of the file, which may be removed or change."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
