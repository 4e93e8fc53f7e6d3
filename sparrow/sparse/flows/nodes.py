"""What a traced flow is made of: operations with their shapes, and the author's line of each.

A value belongs to one sequence and one KV head. It has an inner shape of whole numbers, and it is
either one value for the whole sequence or, `paged`, one for every finished page: the page axis is
not part of the shape, so a formula reads as it stands for one page.
"""

import linecache
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

_ROOM = __name__.rpartition(".")[0]
_FILES = ("nodes", "tensor", "functions", "tracing", "flow", "formats")
_MACHINERY = {f"{_ROOM}.{name}" for name in _FILES}


class FlowError(ValueError):
    """A flow that cannot run: what is wrong, on which line, and what would be right."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the author's file."""

    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        where = f"{self.file}:{self.line}"
        return f"{where}: `{text}`" if text else where


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation of a program: how its value comes from others.

    op        its name; `inputs` are the values it takes, `given` what else defines it
    shape     the inner shape of its value; paged: whether every page has its own
    boolean   whether it is a condition instead of a number
    """

    op: str
    inputs: tuple["Node", ...]
    shape: tuple[int, ...]
    paged: bool
    given: tuple[Any, ...] = ()
    boolean: bool = False
    place: Place | None = field(default=None, repr=False)


def here() -> Place:
    """The innermost line outside the machinery: the author's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_authors(frame):
        frame = frame.f_back
    assert frame is not None
    return Place(frame.f_code.co_filename, frame.f_lineno)


def is_authors(frame: FrameType) -> bool:
    """Whether a frame is outside the machinery; by module, as generated code has no file.

    What an author calls of torch or numpy is not the author's either.
    """
    module = frame.f_globals.get("__name__", "")
    return module not in _MACHINERY and module.split(".")[0] not in ("torch", "numpy")


def fail(message: str, place: Place | None = None) -> FlowError:
    """The error to raise for a mistake on the author's line."""
    return FlowError(f"{place or here()}: {message}")


def in_order(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node that the roots depend on, inputs first, each once."""
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(each, False) for each in reversed(node.inputs)]


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The common shape of these, aligned at their ends; None where they do not fit."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            return None
        result.append(wide.pop() if wide else 1)
    return tuple(result)
