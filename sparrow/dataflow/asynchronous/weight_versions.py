"""The latest weight versions of a run, as deltas for workers on other machines.

A worker says which version it has, with its digest and dtype, and gets what leads from there to the
one it asks for: a delta, or the whole version, whichever is smaller.
"""

import threading
from collections.abc import Mapping

import torch

from sparrow.dataflow.asynchronous.exchange import seal
from sparrow.dataflow.asynchronous.workers import WeightsFile, read_weights
from sparrow.models.deltas import DTYPES, Delta, digest, smallest

Kept = Mapping[int, Mapping[str, torch.Tensor]]
KEPT = 4  # versions, in host memory: a worker that is further behind gets a whole one


class VersionGone(Exception):
    """The version is not kept any more; there is a newer one."""


class WeightVersions:
    """Weights by version; what was computed for one worker is kept for the others."""

    def __init__(self) -> None:
        self._weights: dict[int, Mapping[str, torch.Tensor]] = {}  # replaced, never changed
        self._digests: dict[tuple[int, str], int] = {}
        self._encoded: dict[tuple[int, int, str], bytes] = {}  # by base, version and dtype
        self._computing = threading.Lock()

    def publish(self, file: WeightsFile) -> None:
        """Add a version; the oldest goes. It waits for nobody."""
        weights = {**self._weights, file.version: dict(read_weights(file.path))}
        self._weights = {version: weights[version] for version in sorted(weights)[-KEPT:]}

    def encoded(self, version: int, *, have: int, known: str, dtype: str) -> bytes:
        """What leads to a version, sealed; empty if the worker has it.

        known: the digest of what it has. The same question has the same answer, byte for byte.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r:.20}")
        with self._computing:
            kept = self._weights
            if version not in kept:
                raise VersionGone(f"version {version} is not kept any more")
            self._digests = {key: n for key, n in self._digests.items() if key[0] in kept}
            self._encoded = {key: data for key, data in self._encoded.items() if key[1] in kept}
            base = have if known and known == self._digest(kept, have, dtype) else -1
            if base == version:
                return b""
            key = (base, version, dtype)
            if key not in self._encoded:
                self._encoded[key] = seal(self._encode(kept, *key))
            return self._encoded[key]

    def _encode(self, kept: Kept, base: int, version: int, dtype: str) -> bytes:
        weights = _cast(kept[version], dtype)
        if base < 0:
            return Delta.whole(weights, version=version).encode()
        versions = {"base_version": base, "version": version}
        old, known = _cast(kept[base], dtype), self._digests[base, dtype]
        delta = Delta.between(old, weights, **versions, base_digest=known)
        self._digests[version, dtype] = delta.digest
        return smallest(delta, weights)

    def _digest(self, kept: Kept, version: int, dtype: str) -> str:
        """The digest of a version; "" if it is not kept."""
        if version not in kept:
            return ""
        if (version, dtype) not in self._digests:
            self._digests[version, dtype] = digest(_cast(kept[version], dtype))
        return f"{self._digests[version, dtype]:016x}"


def _cast(weights: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Weights in the dtype of a worker."""
    return {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}
