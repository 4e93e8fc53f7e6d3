"""Shared parts of the numba kernels: numpy views of tensors, threads, and vectors of float32.

Threads: the caller, and helpers that live as long as the process. Numba's own parallel loops are
not used: their default layer aborts the process when two Python threads enter it at once, as a
server and a trainer in one process do.

Vectors are thin names for LLVM's portable vector operations.

LLVM maps them to whatever the machine has: NEON, AVX2, AVX-512. Left to itself it vectorises plain
loops too, but such a loop has no room for a prefetch between two loads, nor for sums that stay in
registers from one row to the next.

Indices are flat whatever the shape of the array, and nothing checks them. numba's cache on disk
does not notice a change in this file: after one, touch the files of the kernels that use it.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model
from torch import Tensor

Array = np.ndarray[Any, Any]

# Lanes of one vector register: 8 with AVX2 (and enough with AVX-512, which has more registers).
LANES = 8 if llvm.get_host_cpu_features().get("avx2") else 4
CACHE_LINE = 64  # bytes
# Chunks per thread: enough that a thread which loses its core for a while delays little.
_CHUNKS = 4


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for calls from Python: without the GIL, and kept on disk for later processes."""
    compiled = njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # no folder that numba may write to: compile in every process
        compiled.enable_caching()
    return compiled


def inline(*fastmath: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: compile into the code of the kernels that call it, with these fast-math flags.

    A function that is called instead is compiled twice, alone and with the kernel, and optimised
    differently. The process that compiles a kernel and those that load it from disk then run
    different copies, whose sums round differently.
    """
    flags = set(fastmath) if fastmath else False
    return njit(nogil=True, forceinline=True, error_model="numpy", fastmath=flags)


def integers(tensor: Tensor, dtype: type[np.integer[Any]] = np.int64) -> Array:
    """Integers of any dtype as a contiguous array of the dtype that kernels take."""
    return np.ascontiguousarray(tensor.numpy(), dtype=dtype)


def floats(tensor: Tensor) -> Array:
    """Floats as a numpy array; bf16, which numpy lacks, as its 16 bits."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def share(work: Callable[[int, int], object], items: int, *, most: int | None = None) -> None:
    """Call work(first, last) over disjoint ranges that cover 0..items, on several threads.

    At most `most` threads take part (default and upper bound: torch.get_num_threads()), the
    caller among them; `work` must release the GIL to gain from it. A helper that has not begun
    when the work is done is called off, so concurrent calls never wait for each other's helpers.
    """
    threads = torch.get_num_threads() if most is None else min(most, torch.get_num_threads())
    grain = max(1, items // (_CHUNKS * threads)) if threads > 1 else max(1, items)
    starts = deque(range(0, items, grain))

    def drain() -> None:
        while starts:
            try:
                first = starts.popleft()
            except IndexError:  # another thread took the last one
                return
            work(first, min(first + grain, items))

    helpers = [_pool().submit(drain) for _ in range(min(threads, len(starts)) - 1)]
    drain()
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="sparrow-ops")


# A forked child inherits the pool object but not its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


@inline()
def ordered(bits: np.int32) -> np.int32:
    """The bits of a float as an integer of the same order; its own inverse.

    LLVM vectorises a maximum of integers, but not one of floats, for the sake of NaN. Here NaN is
    the largest, so that it shows in the result.
    """
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


class Vector(types.Type):
    """The numba type of a vector of float32."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, _vector(ir.FloatType(), kind.lanes))


def _vector(element: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _address(context: Any, builder: Any, signature: Any, args: Any, to: ir.Type) -> Any:
    """Pointer to args[0][args[1]]: flat, no bounds and no negative indices."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), to.as_pointer())


@intrinsic(prefer_literal=True)
def load(_: Any, array: Any, index: Any, lanes: Any) -> Any:
    """`lanes` consecutive float32, or bfloat16 (kept as uint16) widened to float32."""
    count = lanes.literal_value

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floats, words = _vector(ir.FloatType(), count), _vector(ir.IntType(32), count)
        if array.dtype == types.float32:
            return builder.load(_address(context, builder, signature, args, floats), align=4)
        halves = _vector(ir.IntType(16), count)
        bits = builder.load(_address(context, builder, signature, args, halves), align=2)
        wide = builder.shl(builder.zext(bits, words), words([16] * count))
        return builder.bitcast(wide, floats)

    return Vector(count)(array, types.intp, lanes), lower


@intrinsic(prefer_literal=True)
def splat(_: Any, array: Any, index: Any, lanes: Any) -> Any:
    """array[index] in every lane."""
    count = lanes.literal_value

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_address(context, builder, signature, args, ir.FloatType()))
        empty = ir.Constant(_vector(ir.FloatType(), count), ir.Undefined)
        first = builder.insert_element(empty, value, ir.IntType(32)(0))
        everywhere = _vector(ir.IntType(32), count)([0] * count)
        return builder.shuffle_vector(first, empty, everywhere)

    return Vector(count)(array, types.intp, lanes), lower


@intrinsic(prefer_literal=True)
def zeros(_: Any, lanes: Any) -> Any:
    count = lanes.literal_value

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _vector(ir.FloatType(), count)([0.0] * count)

    return Vector(count)(lanes), lower


@intrinsic
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, in one rounding where the machine can."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(product, args[2], flags=("contract",))

    return a(a, b, c), lower


@intrinsic
def store(_: Any, array: Any, index: Any, vector: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> None:
        to = _vector(ir.FloatType(), vector.lanes)
        builder.store(args[2], _address(context, builder, signature, args, to), align=4)

    return types.void(array, types.intp, vector), lower


@intrinsic
def store_sums(_: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """array[index : index + 4] = the sums over the lanes of four vectors."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> None:
        def pick(x: Any, y: Any, lanes: range) -> Any:
            return builder.shuffle_vector(x, y, _vector(ir.IntType(32), len(lanes))(list(lanes)))

        def halve(x: Any, lanes: int) -> Any:
            return builder.fadd(pick(x, x, range(lanes)), pick(x, x, range(lanes, 2 * lanes)))

        def add_pairs(x: Any, y: Any) -> Any:
            return builder.fadd(pick(x, y, range(0, 8, 2)), pick(x, y, range(1, 8, 2)))

        a, b, c, d = (x if x.type.count == 4 else halve(x, 4) for x in args[2:])
        sums = add_pairs(add_pairs(a, b), add_pairs(c, d))
        to = _vector(ir.FloatType(), 4)
        builder.store(sums, _address(context, builder, signature, args, to), align=4)

    return types.void(array, types.intp, a, b, c, d), lower


@intrinsic(prefer_literal=True)
def prefetch(_: Any, array: Any, index: Any, count: Any) -> Any:
    """Ask for the cache lines of array[index : index + count]; any address will do.

    Into the second-level cache: a first-level miss would take one of the few slots that the
    loads need too.
    """
    lines = -(-count.literal_value * array.dtype.bitwidth // (8 * CACHE_LINE))

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> None:
        byte, flag = ir.IntType(8), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), flag, flag, flag])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        start = _address(context, builder, signature, args, byte)
        for line in range(lines):
            address = builder.gep(start, [ir.IntType(64)(line * CACHE_LINE)])
            builder.call(fetch, [address, flag(0), flag(2), flag(1)])  # read, second cache, data

    return types.void(array, types.intp, count), lower
