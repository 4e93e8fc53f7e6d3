"""Weight deltas: exact, small, whole or not at all."""

import random
import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparrow.models import deltas
from sparrow.models.deltas import Delta, digest, smallest

Weights = dict[str, Tensor]


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (40, 70), "b": (3000,), "norm": (7,)}
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def changed(base: Weights, share: float, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in base.items():
        where = torch.rand(tensor.shape, generator=generator) < share
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        new[name] = torch.where(where, noise, tensor)
    return new


def equal(first: Weights, second: Weights) -> bool:
    pairs = [(first[name], second[name]) for name in first]
    return all(torch.equal(deltas._bits(a), deltas._bits(b)) for a, b in pairs)


def copies(base: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in base.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 1.0])
def test_a_delta_leads_exactly_to_the_new_version(dtype: torch.dtype, share: float) -> None:
    base = weights(0, dtype)
    new = changed(base, share, 1)
    new["norm"][0], new["norm"][1] = float("nan"), -0.0  # bits count, not values
    delta = Delta.decode(Delta.between(base, new, base_version=3, version=4).encode())
    assert (delta.base_version, delta.version) == (3, 4)
    for packed in (delta, Delta.decode(smallest(delta, new)), Delta.whole(new, version=4)):
        own = copies(base)
        assert packed.apply(own) == digest(new) == packed.digest
        assert equal(own, new)


def test_few_changes_take_few_bytes() -> None:
    base = {"w": torch.randn(1000, 1000).bfloat16()}
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(10**6, generator=generator)[:4000]
    new = copies(base)
    new["w"].view(-1)[places] *= 1.01
    delta = Delta.between(base, new, base_version=0, version=1)
    assert len(delta.encode()) < 4 * delta.changed + 500


@given(st.lists(st.integers(0, 4000), min_size=1, unique=True).map(sorted))
def test_gaps_of_any_size(positions: list[int]) -> None:
    coded = deltas._gap_bytes(np.array(positions))
    assert deltas._from_gaps(coded).tolist() == positions


def test_merged_deltas_do_what_each_after_the_other_does() -> None:
    versions = [weights(0)]
    for seed, share in enumerate((0.01, 0.3, 0.02)):
        versions.append(changed(versions[-1], share, seed))
    pairs = enumerate(pairwise(versions))
    steps = [Delta.between(*pair, base_version=n, version=n + 1) for n, pair in pairs]
    merged = Delta.decode(steps[0].then(steps[1]).then(steps[2]).encode())
    own = copies(versions[0])
    merged.apply(own)
    assert equal(own, versions[3])
    assert merged.changed < sum(step.changed for step in steps)
    own = copies(versions[2])
    Delta.whole(versions[0], version=0).then(steps[0]).apply(own)
    assert equal(own, versions[1])
    with pytest.raises(ValueError, match="does not follow"):
        steps[0].then(steps[2])


def test_wrong_order_and_repetition_are_refused() -> None:
    base = weights(0)
    new = changed(base, 0.05, 1)
    delta, own = Delta.between(base, new, base_version=0, version=1), copies(base)
    delta.apply(own)
    with pytest.raises(ValueError, match="made from version 0"):
        delta.apply(own)
    assert equal(own, new)


def test_what_does_not_lead_where_it_states_changes_nothing() -> None:
    base = weights(0)
    delta = Delta.between(base, changed(base, 0.05, 1), base_version=0, version=1)
    lies = Delta(
        base_version=0,
        version=1,
        base_digest=delta.base_digest,
        digest=delta.digest ^ 1,
        changes=delta.changes,
    )
    own = copies(base)
    for wrong in (lies, Delta.decode(lies.encode())):
        with pytest.raises(ValueError, match="nothing is changed"):
            wrong.apply(own)
    whole = Delta.whole(changed(base, 0.5, 2), version=2)
    with pytest.raises(ValueError, match="nothing is changed"):
        Delta(base_version=-1, version=2, base_digest=0, digest=5, changes=whole.changes).apply(own)
    mixed = {**delta.changes, "b": whole.changes["b"]}
    for changes, version in ((mixed, 0), (delta.changes | {"norm": whole.changes["norm"]}, -1)):
        with pytest.raises(ValueError, match="all values"):
            replace(delta, base_version=version, changes=changes).apply(own)
    other = {**base, "a": base["a"].float()}
    with pytest.raises(ValueError, match="float32"):
        delta.apply(other)
    with pytest.raises(ValueError, match="differ in tensors"):
        delta.apply({"a": base["a"]})
    assert equal(own, base)


def test_damaged_bytes_are_refused() -> None:
    base = weights(0)
    data = Delta.between(base, changed(base, 0.05, 1), base_version=0, version=1).encode()
    draw = random.Random(0)
    for _ in range(300):
        place = draw.randrange(len(data))
        bad = [
            data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :],
            data[:place],
            data[:place] + data[place + 1 :],
            data + b"x",
        ]
        for one in bad:
            with pytest.raises(ValueError, match="delta"):
                Delta.decode(one)


def test_strange_bytes_with_a_right_hash_are_refused() -> None:
    """Those of a liar: every header that is another one, and chunks that do not fit."""
    base = weights(0)
    data = Delta.between(base, changed(base, 0.05, 1), base_version=0, version=1).encode()
    start = len(deltas.MAGIC) + 4
    (length,) = struct.unpack("<I", data[start - 4 : start])
    draw = random.Random(1)
    for _ in range(500):
        body = bytearray(data[: -deltas.HASH_BYTES])
        for _ in range(draw.randrange(1, 4)):
            body[draw.randrange(start, start + length + 200)] = draw.randrange(256)
        own = copies(base)
        try:
            Delta.decode(bytes(body) + deltas._hash(bytes(body))).apply(own)
        except ValueError:
            assert equal(own, base)


def test_the_digest_is_that_of_bits_names_and_places() -> None:
    base = weights(0)
    seen = {digest(base)}
    for name in base:
        for place in (0, base[name].numel() - 1):
            other = copies(base)
            deltas._bits(other[name])[place] ^= 1
            seen.add(digest(other))
    swapped = copies(base)
    swapped["b"][:2] = base["b"][:2].flip(0)
    seen |= {digest(swapped), digest({"c" if n == "a" else n: t for n, t in base.items()})}
    assert len(seen) == 9
    by_device = sum(
        int((deltas._values(b) * deltas._weights(torch.arange(len(b)), deltas._seed(n))).sum())
        for n, b in ((name, deltas._bits(tensor)) for name, tensor in base.items())
    )
    assert by_device % 2**64 == digest(base)
