"""Frames over requests that may be lost, repeated or reordered: exactly once, and in order.

Each side numbers its frames and keeps them until the other has acknowledged them; what comes again
is dropped. A body is an acknowledgement, some frames, and a hash of all that:

    acknowledged, number of the first frame, count | lengths | frames | blake2b
"""

import hashlib
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

HASH_BYTES = 16
MOST_BODY = 2**30  # bytes; a group with hidden states of long answers is some hundred MiB
AT_ONCE = 2**25  # bytes of frames in a body, but for a single larger one
_HEAD = struct.Struct(">QQI")
_LENGTH = struct.Struct(">Q")


class FrameBody(NamedTuple):
    """What a request or its response carries. first: number of the first frame."""

    acknowledged: int
    first: int
    frames: tuple[bytes, ...]

    def pack(self) -> bytes:
        lengths = [_LENGTH.pack(len(frame)) for frame in self.frames]
        head = _HEAD.pack(self.acknowledged, self.first, len(self.frames))
        return seal(b"".join([head, *lengths, *self.frames]))

    @classmethod
    def unpack(cls, data: bytes) -> "FrameBody":
        """Read a body; ValueError if it is damaged."""
        plain = unseal(data)
        try:
            acknowledged, first, count = _HEAD.unpack_from(plain)
            start = _HEAD.size + count * _LENGTH.size
            lengths = [n for (n,) in _LENGTH.iter_unpack(plain[_HEAD.size : start])]
        except struct.error as error:
            raise ValueError(f"a body of frames is damaged: {error}") from error
        if len(lengths) != count or start + sum(lengths) != len(plain):
            raise ValueError("a body of frames has another length than it states")
        frames = []
        for length in lengths:
            frames.append(plain[start : start + length])
            start += length
        return cls(acknowledged, first, tuple(frames))


def seal(data: bytes) -> bytes:
    """Append a hash, so that damage on the way is noticed."""
    return data + _hash(data)


def unseal(data: bytes) -> bytes:
    """What was sealed; ValueError if it is damaged."""
    plain = data[:-HASH_BYTES]
    if len(data) < HASH_BYTES or _hash(plain) != data[-HASH_BYTES:]:
        raise ValueError("a message is damaged or cut off")
    return plain


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


class FrameExchange:
    """One side of an exchange; its calls may come from several threads."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()  # not acknowledged yet
        self._first = 1  # number of the first of them
        self._received = 0  # number of the last frame that came
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Frames that the other side has not acknowledged."""
        return len(self._waiting)

    def push(self, frame: bytes) -> None:
        """Add a frame for the other side."""
        with self._lock:
            self._waiting.append(frame)

    def body(self, *, frames: bool = True) -> FrameBody:
        """What to send now; frames: with those that are not acknowledged, as many as fit."""
        with self._lock:
            chosen, size = list[bytes](), 0
            for frame in self._waiting if frames else ():
                size += len(frame)
                if chosen and size > AT_ONCE:
                    break
                chosen.append(frame)
            return FrameBody(self._received, self._first, tuple(chosen))

    def accept(self, body: FrameBody) -> Sequence[bytes]:
        """Take a body of the other side; return the frames that are new, in order."""
        with self._lock:
            done = body.acknowledged - self._first + 1
            if done > len(self._waiting):
                raise ValueError(f"frame {body.acknowledged} is acknowledged, which was not sent")
            for _ in range(done):
                self._waiting.popleft()
            self._first += max(0, done)
            known = self._received - body.first + 1
            if known < 0:
                return ()  # some before these are missing, and will come again
            fresh = body.frames[known:]
            self._received += len(fresh)
            return fresh
