"""Frames over a line that loses, repeats, reorders and damages requests and answers."""

import random

import pytest

from sparrow.dataflow.asynchronous import exchange as module
from sparrow.dataflow.asynchronous.exchange import FrameBody, FrameExchange, seal, unseal
from sparrow.dataflow.asynchronous.messages import decode


@pytest.mark.parametrize("seed", range(20))
def test_frames_come_once_and_in_order(seed: int) -> None:
    draw = random.Random(seed)
    sides = FrameExchange(), FrameExchange()
    sent: list[list[bytes]] = [[], []]
    came: list[list[bytes]] = [[], []]
    line: list[tuple[int, bytes]] = []  # bodies on the way, with who gets them

    def turn(chance: float) -> None:
        side = draw.randrange(2)
        if draw.random() < chance:
            frame = draw.randbytes(draw.randrange(30))
            sent[side].append(frame)
            sides[side].push(frame)
        line.append((1 - side, sides[side].body(frames=draw.random() < 0.8).pack()))
        for _ in range(draw.randrange(3)):
            where, data = line[draw.randrange(len(line))]  # late, or again
            came[where] += sides[where].accept(FrameBody.unpack(data))
        del line[:-8]

    for _ in range(300):
        turn(0.4)
    for _ in range(200):
        turn(0.0)
    assert came == [sent[1], sent[0]]
    for _ in range(4):
        for side in (0, 1):
            assert not sides[1 - side].accept(sides[side].body())
    assert not sides[0].waiting
    assert not sides[1].waiting


def test_a_body_has_as_many_frames_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 10)
    own = FrameExchange()
    for size in (30, 4, 4, 4):
        own.push(bytes(size))
    other = FrameExchange()
    sizes = []
    while own.waiting:
        sizes.append([len(frame) for frame in other.accept(own.body())])
        own.accept(other.body())
    assert sizes == [[30], [4, 4], [4]]


def test_damaged_bodies_are_refused() -> None:
    data = FrameBody(3, 4, (b"one", b"", b"three")).pack()
    assert FrameBody.unpack(data) == FrameBody(3, 4, (b"one", b"", b"three"))
    for place in range(len(data)):
        broken = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        for bad in (broken, data[:place]):
            with pytest.raises(ValueError, match="damaged"):
                FrameBody.unpack(bad)
    for inner in (b"", b"\0" * 20 + b"x", b"\0" * 16 + b"\xff" * 4):
        with pytest.raises(ValueError, match=r"damaged|length"):
            FrameBody.unpack(seal(inner))
    with pytest.raises(ValueError, match="damaged"):
        unseal(b"")


def test_an_acknowledgement_of_frames_that_were_not_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="not sent"):
        FrameExchange().accept(FrameBody(1, 1, ()))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"kind": "GroupFailed", "arrays": [["int32", [%d]]], "data": {}}' % 10**30,
        b'{"kind": "WeightsLoaded", "arrays": [], "data": {"version": %d}}' % 10**400,
        b'{"kind": "Opened", "arrays": [], "data": {"header": "", "running": -1}}',
    ],
)
def test_messages_that_no_worker_sends_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="message"):
        decode(text, b"")
