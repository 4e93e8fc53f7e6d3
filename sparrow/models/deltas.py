"""Weight deltas: what leads from one version of a model's weights to a later one, as bytes.

Between two RL steps few 16-bit values change. For every tensor that did, a delta has the new
values, absolute, and where they are: as gaps between positions (a byte each), as a mask (a bit an
element), or as all values, whichever is smallest; compressed with zstd.

    magic, length of the header | header (JSON: `DeltaHeader`) | chunks | blake2b of all before

**Whole or not at all.** A delta is checked before a value is written: its hash, sizes, positions,
and that it was made from the weights there are. `digest` names weights by a sum over their bits,
each weighted by its place; so the digest after a delta follows from the changed values alone, on
the device that has them. If it is not the one that the delta states, the old values are put back.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import zstandard
from numba import njit
from torch import Tensor

from sparrow.schema.base import Record, from_dict, to_dict

MAGIC = b"sparrow-delta-1\n"
HASH_BYTES = 16
LEVEL = 3  # of zstd
SPARSE = 0.02  # share of changed values below which gaps are smallest without a try
BLOCK = 2**22  # bytes that are decompressed at once
CHUNK = 2**24  # elements whose digest is computed at once on a device
ESCAPE = 255  # a gap byte: so many more, and it goes on
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}  # by bytes of an element
_LENGTH = struct.Struct("<I")
_MASK64 = 2**64 - 1
Places = Literal["gaps", "mask", "all"]
U64 = np.uint64


class TensorDelta(Record):
    """A tensor that changed: how its places are written, and the sizes of its two chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    places: Places
    changed: int  # values
    place_bytes: int  # compressed
    value_bytes: int


class DeltaHeader(Record):
    """What a delta leads from and to; digests are hexadecimal."""

    base_version: int
    version: int
    base_digest: str
    digest: str
    tensors: tuple[TensorDelta, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """Changed values of a tensor: flat positions in rising order, None: all; and their bits."""

    dtype: str
    shape: tuple[int, ...]
    positions: np.ndarray | None
    bits: np.ndarray

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Changes by tensor, from one version to another."""

    base_version: int
    version: int
    base_digest: int
    digest: int
    changes: Mapping[str, Change]

    @classmethod
    def between(
        cls,
        base: Mapping[str, Tensor],
        new: Mapping[str, Tensor],
        *,
        base_version: int,
        version: int,
        base_digest: int | None = None,
    ) -> "Delta":
        """The delta of two versions, on any device; base_digest: if it is known."""
        if base.keys() != new.keys():
            raise ValueError(f"versions differ in tensors: {sorted(base.keys() ^ new.keys())[:3]}")
        before = digest(base) if base_digest is None else base_digest
        after, changes = before, {}
        for name, tensor in new.items():
            old_N, new_N = _bits(base[name]), _bits(tensor)
            if base[name].dtype != tensor.dtype or base[name].shape != tensor.shape:
                raise ValueError(f"{name} has another shape or dtype than its base")
            places_K = _changed_places(old_N, new_N)
            if not len(places_K):
                continue
            after += _moved(name, places_K, old_N[places_K], new_N[places_K])
            changes[name] = Change(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                positions=places_K.cpu().numpy(),
                bits=_numpy(new_N[places_K]),
            )
        return cls(
            base_version=base_version,
            version=version,
            base_digest=before,
            digest=after & _MASK64,
            changes=changes,
        )

    @classmethod
    def whole(cls, weights: Mapping[str, Tensor], *, version: int) -> "Delta":
        """All values of a version; it can be applied to any weights of these shapes."""
        changes = {
            name: Change(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                positions=None,
                bits=_numpy(_bits(tensor)),
            )
            for name, tensor in weights.items()
        }
        ahead = digest(weights)
        return cls(base_version=-1, version=version, base_digest=0, digest=ahead, changes=changes)

    @property
    def is_whole(self) -> bool:
        return self.base_version < 0

    @property
    def changed(self) -> int:
        """Values that it writes."""
        return sum(len(change.bits) for change in self.changes.values())

    # Merging.

    def then(self, later: "Delta") -> "Delta":
        """The delta that does both: of a position that both change, the later value."""
        if (later.base_version, later.base_digest) != (self.version, self.digest):
            raise ValueError(
                f"a delta from version {later.base_version} does not follow one to "
                f"{self.version}, or their digests differ"
            )
        merged = dict(self.changes)
        for name, change in later.changes.items():
            merged[name] = _merged(merged[name], change) if name in merged else change
        return Delta(
            base_version=self.base_version,
            version=later.version,
            base_digest=self.base_digest,
            digest=later.digest,
            changes=merged,
        )

    # Bytes.

    def encode(self) -> bytes:
        """The bytes of the delta."""
        compressor = zstandard.ZstdCompressor(level=LEVEL)
        tensors, chunks = [], []
        for name, change in self.changes.items():
            places, place_chunk, value_chunk = _encoded(change, compressor)
            chunks += [place_chunk, value_chunk]
            tensors.append(
                TensorDelta(
                    name=name,
                    dtype=change.dtype,
                    shape=change.shape,
                    places=places,
                    changed=len(change.bits),
                    place_bytes=len(place_chunk),
                    value_bytes=len(value_chunk),
                )
            )
        header = DeltaHeader(
            base_version=self.base_version,
            version=self.version,
            base_digest=f"{self.base_digest:016x}",
            digest=f"{self.digest:016x}",
            tensors=tuple(tensors),
        )
        text = json.dumps(to_dict(header)).encode()
        data = b"".join([MAGIC, _LENGTH.pack(len(text)), text, *chunks])
        return data + _hash(data)

    @classmethod
    def decode(cls, data: bytes) -> "Delta":
        """Read a delta; ValueError if anything of it is damaged."""
        body, own = memoryview(data)[:-HASH_BYTES], bytes(data[-HASH_BYTES:])
        start = len(MAGIC) + _LENGTH.size
        if len(data) < start + HASH_BYTES or bytes(body[: len(MAGIC)]) != MAGIC:
            raise ValueError("not a weight delta")
        if _hash(body) != own:
            raise ValueError("a weight delta is damaged or cut off")
        (length,) = _LENGTH.unpack(body[len(MAGIC) : start])
        try:
            header = from_dict(DeltaHeader, json.loads(bytes(body[start : start + length])))
            changes = _decoded(header, body[start + length :])
        except (KeyError, TypeError, OverflowError, RecursionError, zstandard.ZstdError) as error:
            raise ValueError(f"a weight delta cannot be read: {error}") from error
        return cls(
            base_version=header.base_version,
            version=header.version,
            base_digest=int(header.base_digest, 16),
            digest=int(header.digest, 16),
            changes=changes,
        )

    # Weights.

    def apply(self, weights: Mapping[str, Tensor], *, known: int | None = None) -> int:
        """Write it into weights, in place, and return their new digest; whole or not at all.

        known: the digest of the weights as they are; None: computed, if it is needed. Besides the
        weights it takes memory for the changed values alone, of a whole version for one tensor.
        """
        self._check(weights)
        if self.is_whole:
            return self._write_whole(weights)
        before = digest(weights) if known is None else known
        if before != self.base_digest:
            raise ValueError(
                f"the delta was made from version {self.base_version} (digest "
                f"{self.base_digest:016x}), the weights are {before:016x}"
            )
        kept, after = {}, self.base_digest
        for name, change in self.changes.items():
            flat_N = _bits(weights[name])
            places_K, new_K = _on(flat_N, change)
            kept[name] = (places_K, flat_N[places_K])
            after += _moved(name, places_K, kept[name][1], new_K)
            flat_N[places_K] = new_K
        if after & _MASK64 != self.digest:
            for name, (places_K, old_K) in kept.items():
                _bits(weights[name])[places_K] = old_K
            raise ValueError("the delta does not lead to the weights it states; nothing is changed")
        return self.digest

    def _write_whole(self, weights: Mapping[str, Tensor]) -> int:
        """Whole versions are checked on the way in: there is no copy of what they replace."""
        total = 0
        for name, change in self.changes.items():
            total += _sum(name, torch.from_numpy(change.bits.view(f"i{change.bits.itemsize}")))
        if total & _MASK64 != self.digest:
            raise ValueError("the version does not have the digest it states; nothing is changed")
        for name, change in self.changes.items():
            _bits(weights[name]).copy_(_on(_bits(weights[name]), change)[1])
        return self.digest

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        unknown = sorted(self.changes.keys() - weights.keys())
        missing = sorted(weights.keys() - self.changes.keys()) if self.is_whole else []
        if unknown or missing:
            raise ValueError(
                f"the model and the delta differ in tensors: {[*unknown, *missing][:3]}"
            )
        for name, change in self.changes.items():
            found = (str(weights[name].dtype).removeprefix("torch."), tuple(weights[name].shape))
            if found != (change.dtype, change.shape):
                stated = f"{change.dtype} {change.shape}"
                raise ValueError(f"{name} is {found[0]} {found[1]}, in the delta {stated}")
            if not weights[name].is_contiguous():
                raise ValueError(f"{name} is not contiguous")
            if (change.positions is None) != self.is_whole:
                raise ValueError(f"{name}: a whole version has all values, a delta has positions")


def smallest(delta: Delta, weights: Mapping[str, Tensor]) -> bytes:
    """The bytes of a delta, or of the whole version that it leads to, where these are fewer."""
    encoded = delta.encode()
    if len(encoded) < sum(tensor.nbytes for tensor in weights.values()) // 2:
        return encoded  # compressing 16-bit weights saves a third at most
    whole = Delta.whole(weights, version=delta.version).encode()
    return min(encoded, whole, key=len)


# Changes.


def _changed_places(old_N: Tensor, new_N: Tensor) -> Tensor:
    """Positions of values that differ; on a CPU by numpy, as torch's nonzero is slow there."""
    if new_N.is_cuda:
        return (old_N != new_N).nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(old_N.numpy() != new_N.numpy()))


def _merged(first: Change, second: Change) -> Change:
    if second.positions is None:
        return second
    if first.positions is None:
        bits = first.bits.copy()
        bits[second.positions] = second.bits
        return Change(first.dtype, first.shape, None, bits)
    kept = ~np.isin(first.positions, second.positions, assume_unique=True)
    positions = np.concatenate([first.positions[kept], second.positions])
    order = np.argsort(positions, kind="stable")
    bits = np.concatenate([first.bits[kept], second.bits])
    return Change(first.dtype, first.shape, positions[order], bits[order])


def _on(flat_N: Tensor, change: Change) -> tuple[Tensor, Tensor]:
    """Positions and bits on the device of a tensor; of all values no positions."""
    signed = change.bits.view(f"i{change.bits.itemsize}")
    positions = np.empty(0, np.int64) if change.positions is None else change.positions
    device = flat_N.device
    return torch.from_numpy(positions).to(device), torch.from_numpy(signed).to(device)


def _bits(tensor: Tensor) -> Tensor:
    """The values of a tensor as integers, flat; shares its memory if it is contiguous."""
    kind, _ = BITS[tensor.element_size()]
    return tensor.detach().contiguous().view(kind).view(-1)


def _numpy(bits_N: Tensor) -> np.ndarray:
    signed = bits_N.cpu().numpy()
    return signed.view(BITS[signed.itemsize][1])


# Chunks.


def _encoded(change: Change, compressor: zstandard.ZstdCompressor) -> tuple[Places, bytes, bytes]:
    """Places and values of a change, in the fewest bytes."""
    values = compressor.compress(_planes(change.bits))
    if change.positions is None:
        return "all", b"", values
    gaps = compressor.compress(_gap_bytes(change.positions))
    if len(change.bits) < SPARSE * change.elements:
        return "gaps", gaps, values
    mask = np.zeros(change.elements, np.bool_)
    mask[change.positions] = True
    packed = compressor.compress(np.packbits(mask).tobytes())
    return ("gaps", gaps, values) if len(gaps) <= len(packed) else ("mask", packed, values)


def _decoded(header: DeltaHeader, body: memoryview) -> dict[str, Change]:
    stated = sum(part.place_bytes + part.value_bytes for part in header.tensors)
    if stated != len(body) or any(min(p.place_bytes, p.value_bytes) < 0 for p in header.tensors):
        raise ValueError(f"a weight delta has {len(body)} bytes of chunks and states {stated}")
    changes: dict[str, Change] = {}
    for part, places, values in _chunks(header, body):
        if part.name in changes:
            raise ValueError(f"{part.name} is twice in a weight delta")
        changes[part.name] = _change(part, places, values)
    return changes


def _chunks(header: DeltaHeader, body: memoryview) -> Iterator[tuple[TensorDelta, bytes, bytes]]:
    start = 0
    for part in header.tensors:
        middle, end = start + part.place_bytes, start + part.place_bytes + part.value_bytes
        yield part, bytes(body[start:middle]), bytes(body[middle:end])
        start = end


def _change(part: TensorDelta, places: bytes, values: bytes) -> Change:
    dtype = DTYPES[part.dtype]
    elements = int(np.prod(part.shape, dtype=np.int64))
    if min(part.shape, default=1) < 0 or not 0 < part.changed <= elements:
        raise ValueError(f"{part.name}: {part.changed} changed values of {part.shape}")
    bits = _from_planes(_decompressed(values, part.changed * dtype.itemsize), dtype.itemsize)
    positions = None
    if part.places == "gaps":
        positions = _from_gaps(_decompressed(places, part.changed + elements // ESCAPE + 1))
    elif part.places == "mask":
        packed = np.frombuffer(_decompressed(places, -(-elements // 8)), np.uint8)
        positions = np.flatnonzero(np.unpackbits(packed)[:elements])
    count = elements if positions is None else len(positions)
    if not count == len(bits) == part.changed or (
        positions is not None and positions[-1] >= elements
    ):
        raise ValueError(f"{part.name}: places and values of a weight delta do not fit")
    return Change(part.dtype, part.shape, positions, bits)


def _decompressed(data: bytes, most: int) -> bytes:
    """Decompress at most so many bytes, whatever the data say of themselves."""
    reader, found = zstandard.ZstdDecompressor().stream_reader(data), bytearray()
    while part := reader.read(BLOCK):
        found += part
        if len(found) > most:
            raise ValueError("a chunk of a weight delta is too large")
    return bytes(found)


def _gap_bytes(positions: np.ndarray) -> bytes:
    """Unchanged values before each changed one; ESCAPE stands for as many and goes on."""
    gaps = np.diff(positions, prepend=-1) - 1
    more, rest = gaps // ESCAPE, gaps % ESCAPE
    ends = np.cumsum(more + 1) - 1
    coded = np.full(int(ends[-1]) + 1, ESCAPE, np.uint8)
    coded[ends] = rest
    return coded.tobytes()


def _from_gaps(data: bytes) -> np.ndarray:
    coded = np.frombuffer(data, np.uint8)
    ends = coded < ESCAPE
    if not len(coded) or not ends[-1]:
        raise ValueError("the places of a weight delta end within a gap")
    passed = np.cumsum(coded, dtype=np.int64)[ends]
    return passed + np.arange(len(passed))


def _planes(bits: np.ndarray) -> bytes:
    """Bytes of equal weight side by side: exponents compress, low bits do not."""
    return bits.view(np.uint8).reshape(-1, bits.itemsize).T.tobytes()


def _from_planes(data: bytes, size: int) -> np.ndarray:
    if len(data) % size:
        raise ValueError("the values of a weight delta are cut off")
    planes = np.frombuffer(data, np.uint8).reshape(size, -1)
    return planes.T.flatten().view(BITS[size][1])


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


# Digests: the sum over all values of (bits + 1) x weight(tensor, place), modulo 2^64. The weights
# of places are those of the SplitMix64 generator.


def digest(weights: Mapping[str, Tensor]) -> int:
    """The digest of weights by name; equal on every device, and whatever the order."""
    total = 0
    for name, tensor in weights.items():
        total += _sum(name, _bits(tensor))
    return total & _MASK64


def _sum(name: str, bits_N: Tensor) -> int:
    seed = _seed(name)
    if not bits_N.is_cuda:
        return int(_host_sum(_numpy(bits_N), U64(seed)))
    total = 0
    for start in range(0, len(bits_N), CHUNK):
        part = bits_N[start : start + CHUNK]
        places = torch.arange(start, start + len(part), device=part.device)
        total += int((_values(part) * _weights(places, seed)).sum()) & _MASK64
    return total


def _moved(name: str, places_K: Tensor, old_K: Tensor, new_K: Tensor) -> int:
    """What the digest gains where values change."""
    weights_K = _weights(places_K, _seed(name))
    return int(((_values(new_K) - _values(old_K)) * weights_K).sum()) & _MASK64


def _values(bits_K: Tensor) -> Tensor:
    """Bits as numbers from 1 on."""
    mask = 2 ** (8 * bits_K.element_size()) - 1
    return (bits_K.long() & mask) + 1


def _weights(places_K: Tensor, seed: int) -> Tensor:
    x = (places_K + 1) * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """A logical shift to the right."""
    return (x >> count) & (2 ** (64 - count) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@njit(error_model="numpy")
def _host_sum(bits: np.ndarray, seed: np.uint64) -> np.uint64:
    total, x = U64(0), seed
    for value in bits:
        x += U64(0x9E3779B97F4A7C15)
        y = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        y = (y ^ (y >> U64(27))) * U64(0x94D049BB133111EB)
        total += (U64(value) + U64(1)) * (y ^ (y >> U64(31)))
    return total
