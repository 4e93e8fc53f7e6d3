"""Contracts of ops: checks of arguments by parameter names, before any version runs.

A tensor's name ends in its dimension letters (q_BHD; legend: sparrow/ops/types.py). A letter is the
same size in all arguments of a call, and the query heads H are a multiple of the KV heads G. Other
rules are in RULES. Values of tensors are checked only where this needs no device synchronisation.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparrow.ops.types import PageLists

Sizes = Mapping[str, int]
Rule = Callable[[str, Any, Sizes], None]

# Tensors of whole numbers, by name without dimension letters.
INTEGERS = {
    *(
        "at",
        "bits",
        "bounds",
        "budgets",
        "counters",
        "forbidden",
        "ids",
        "lengths",
        "seeds",
        "slots",
    ),
    *("table", "top_k"),
}
_INTEGER_TYPES = (torch.int32, torch.int64)


class Contract:
    """The checks of one op, from the signature of its definition."""

    def __init__(self, definition: Callable[..., Any]) -> None:
        endings = {n: n.rpartition("_")[2] for n in inspect.signature(definition).parameters}
        self._letters = {name: end if end.isupper() else "" for name, end in endings.items()}

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a ValueError that names the argument which breaks the contract."""
        named = dict(zip(self._letters, args, strict=False)) | kwargs
        named = {n: value for n, value in named.items() if n in self._letters and value is not None}
        sizes: dict[str, int] = {}
        for name, value in named.items():
            if self._letters[name]:
                self._check_shape(name, value, sizes)
        if "H" in sizes and sizes["H"] % sizes.get("G", 1):
            heads, kv_heads = sizes["H"], sizes["G"]
            raise ValueError(f"{heads} query heads must be a multiple of {kv_heads} KV heads")
        for name, value in named.items():
            if name in RULES:
                RULES[name](name, value, sizes)

    def _check_shape(self, name: str, tensor: Tensor, sizes: dict[str, int]) -> None:
        """Check a shape against the sizes of its letters; new letters are added."""
        letters, shape = self._letters[name], tensor.shape
        if len(shape) != len(letters):
            raise ValueError(f"{name} must be {[*letters]}, got shape {[*shape]}")
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"{name} is {[*shape]}, expected {letter} = {sizes[letter]}")
        if name.removesuffix(f"_{letters}") in INTEGERS:
            _check_integers(name, tensor)


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _INTEGER_TYPES:
        raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")


def _at_least(least: int, name: str, value: int, _sizes: Sizes) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _share(name: str, value: float, _sizes: Sizes) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}")


def _temperature(name: str, value: float | Tensor, _sizes: Sizes) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ValueError(f"{name} must not require a gradient")
        wrong = not value.is_cuda and not bool((value > 0).all())
    else:
        wrong = not value > 0
    if wrong:
        raise ValueError(f"{name} must be above 0, got {value}")


def _bounds(name: str, edges: Tensor, sizes: Sizes) -> None:
    """Edges of sequences: one more than sequences."""
    _check_integers(name, edges)
    if edges.ndim != 1 or len(edges) != sizes.get("B", len(edges) - 1) + 1:
        raise ValueError(f"{name} must be [B + 1], got {[*edges.shape]} and {dict(sizes)}")


def _budgets(name: str, budgets: Tensor, sizes: Sizes) -> None:
    """One budget per row, or per row and KV head."""
    _check_integers(name, budgets)
    rows, kv_heads = sizes.get("T", sizes.get("B")), sizes["G"]
    if tuple(budgets.shape) not in ((rows,), (rows, kv_heads)):
        raise ValueError(f"{name} must be [{rows}] or [{rows}, {kv_heads}], got {[*budgets.shape]}")


def _lists(name: str, lists: PageLists, sizes: Sizes) -> None:
    rows = sizes["B"], sizes["G"]
    if lists.counts.shape != rows or lists.pages.shape[:2] != rows:
        shapes = [*lists.pages.shape], [*lists.counts.shape]
        raise ValueError(f"{name}: pages and counts must begin with {rows}, got {shapes}")


def _logits(name: str, logits: Tensor, _sizes: Sizes) -> None:
    if not logits.shape[1]:
        raise ValueError(f"{name} must have a vocabulary, got {[*logits.shape]}")


def _token_ids(name: str, ids: Tensor, sizes: Sizes) -> None:
    """Token ids of a vocabulary of V."""
    vocabulary = sizes["V"]
    if ids.numel() and not ids.is_cuda and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"{name} must be in 0..{vocabulary - 1}, got {ids.min()} to {ids.max()}")


def _places(name: str, count: int, sizes: Sizes) -> None:
    """A number of tokens of the vocabulary."""
    if not 1 <= count <= sizes["V"]:
        raise ValueError(f"{name} must be from 1 to the vocabulary {sizes['V']}, got {count}")


RULES: dict[str, Rule] = {
    "page": partial(_at_least, 1),
    "first": partial(_at_least, 0),
    "last": partial(_at_least, 1),  # an unfinished page has no landmark and is always kept
    "chunk": partial(_at_least, 1),
    "mass": _share,
    "temperature": _temperature,
    "bounds": _bounds,
    "budgets": _budgets,
    "lists": _lists,
    "logits_BV": _logits,
    "ids_T": _token_ids,
    "top_k": _places,
}
