"""Messages between the process that learns and its workers, and how they travel.

    Open, StartGroup, AbortGroup, LoadWeights, EvaluateStep                           to a worker
    Opened, GroupEnded, GroupFailed, WeightsLoaded, EvaluationEnded, WorkerFailed     from it
    Join, Joined                                     of a worker on another machine, before these

A message is a frame: two lengths, a JSON object, and the bytes of its arrays. Nothing is unpickled;
what arrives is checked as the record that it says it is.
"""

import json
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from sparrow.schema.base import Record, from_dict
from sparrow.schema.episode import Group
from sparrow.schema.evaluation import Evaluation
from sparrow.schema.schedule import Schedule
from sparrow.schema.types import FolderName, InFlight

Role = Literal["rollout", "evaluation"]
_LENGTHS = struct.Struct(">IQ")
LENGTHS_BYTES = _LENGTHS.size
MOST_BYTES = 2**34  # of a frame
_DTYPES = ("bool", "int16", "int32", "float32")
_ARRAY = "$array"  # key of an array's number in the JSON object


Number = Annotated[int, Field(ge=0, lt=2**53)]


class Open(Record):
    """Open the rollout side of a run. config: the run's configuration as JSON."""

    role: Role
    config: str
    path: tuple[str, ...]  # where its code is: sys.path
    threads: int | None  # of a CPU; None: as they are
    remote: bool = False  # on another machine: its weights come as deltas, and have digests
    own_decoding: bool = False  # that of this configuration, not that of each prompt


class StartGroup(Record):
    """Answer a prompt. version: of the weights when it was leased; it seeds the draws."""

    lease: int
    position: int
    version: int
    watched: int
    schedule: Schedule | None


class AbortGroup(Record):
    """Stop answering a prompt."""

    lease: int


class LoadWeights(Record):
    """Load weights from a safetensors file, or a delta, between two steps of the engine."""

    version: int
    file: str  # "": on another machine, which fetches them
    in_flight: InFlight
    delta: bool = False  # or a whole version, of sparrow.models.deltas


class EvaluateStep(Record):
    """Answer the held-out rows after a step, with weights from a file; "": those it opened with."""

    step: int
    file: str
    schedule: Schedule | None


class Opened(Record):
    """The worker is ready. header: its backend in one line."""

    header: str
    isolation: str | None  # of its verifiers
    running: Number = 1  # samples that it decodes at once
    dtype: str = ""
    attention: str = ""  # its own; "": that of each prompt
    digest: str = ""  # of its weights, on another machine
    model: str = ""  # `model_identity`, on another machine


class GroupEnded(Record):
    """A group with its rewards; verdicts since the message before, by kind."""

    lease: Number
    group: Group
    verdicts: dict[str, Number]
    fault: str


class GroupFailed(Record):
    """The episode of a prompt raised, or returned no valid trajectories."""

    lease: int
    reason: str


class WeightsLoaded(Record):
    """Tokens sampled from now on have this version; tokens: of samples under way."""

    version: Number
    seconds: float
    tokens: Number
    digest: str = ""  # on another machine


class EvaluationEnded(Record):
    """The held-out accuracy after a step."""

    step: int
    evaluation: Evaluation


class WorkerFailed(Record):
    """Why the worker ends; fatal: another one would end too."""

    reason: str
    fatal: bool


class Join(Record):
    """The first request of a worker on another machine."""

    name: FolderName
    sparrow: str  # version of the package, which must be that of the run


class Joined(Record):
    """The answer. name: with a number, if it was in use. files: settings whose files it fetches."""

    session: str
    name: str
    config: str  # as JSON
    files: tuple[str, ...]
    model: str = ""  # `model_identity` of the run's


MESSAGES: dict[str, type[Record]] = {
    kind.__name__: kind
    for kind in (
        *(Open, StartGroup, AbortGroup, LoadWeights, EvaluateStep),
        *(Opened, GroupEnded, GroupFailed, WeightsLoaded, EvaluationEnded, WorkerFailed),
    )
}


def encode(message: Record) -> bytes:
    """Return the frame of a message."""
    arrays: list[np.ndarray] = []
    data = _to_json(message, arrays)
    header = {
        "kind": type(message).__name__,
        "arrays": [[str(array.dtype), array.shape] for array in arrays],
        "data": data,
    }
    text = json.dumps(header).encode()
    blobs = [np.ascontiguousarray(array).tobytes() for array in arrays]
    return b"".join([_LENGTHS.pack(len(text), sum(map(len, blobs))), text, *blobs])


def frame_lengths(lengths: bytes) -> tuple[int, int]:
    """Lengths of the two parts that follow; ValueError if they are too large."""
    text, blob = _LENGTHS.unpack(lengths)
    if text + blob > MOST_BYTES:
        raise ValueError(f"a message of {text + blob} bytes; at most {MOST_BYTES} are allowed")
    return text, blob


def decode(text: bytes, blob: bytes) -> Record:
    """Make a message of the two parts of a frame; ValueError if it is none."""
    try:
        header = json.loads(text)
        kind, arrays = MESSAGES[header["kind"]], _arrays(header["arrays"], blob)
        return from_dict(kind, _from_json(header["data"], arrays))
    except (LookupError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a message of a worker: {error}") from error


def decode_frame(frame: bytes) -> Record:
    """Make a message of a whole frame; ValueError if it is none."""
    if len(frame) < LENGTHS_BYTES:
        raise ValueError("not a message of a worker: it is cut off")
    text, blob = frame_lengths(frame[:LENGTHS_BYTES])
    if LENGTHS_BYTES + text + blob != len(frame):
        raise ValueError("not a message of a worker: it has another length than it states")
    middle = LENGTHS_BYTES + text
    return decode(frame[LENGTHS_BYTES:middle], frame[middle:])


def send(connection: socket.socket, message: Record) -> None:
    connection.sendall(encode(message))


def receive(connection: socket.socket) -> Record:
    """Wait for a message; EOFError if the other side has gone."""
    text, blob = frame_lengths(_read(connection, LENGTHS_BYTES))
    return decode(_read(connection, text), _read(connection, blob))


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 2**20))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return bytes(parts)


def _to_json(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, Record):
        names = type(value).model_fields
        return {name: _to_json(getattr(value, name), arrays) for name in names}
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, Mapping):
        return {key: _to_json(item, arrays) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_to_json(item, arrays) for item in value]
    return value


def _from_json(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: _from_json(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item, arrays) for item in value]
    return value


def _arrays(described: Iterable[tuple[str, list[int]]], blob: bytes) -> list[np.ndarray]:
    arrays, start = [], 0
    for name, shape in described:
        if name not in _DTYPES:
            raise ValueError(f"an array of dtype {name!r:.20}")
        dtype = np.dtype(name)
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(blob, dtype, count, start).reshape(shape)
        arrays.append(array)
        start += array.nbytes
    if start != len(blob):
        raise ValueError(f"{len(blob)} bytes of arrays, {start} described")
    return arrays
