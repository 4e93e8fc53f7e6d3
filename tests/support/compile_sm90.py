"""What launches would compile on an H200, compiled on any machine: no GPU is needed.

`python -m support.compile_sm90 [case ...]` calls the functions of `CASES` with tensors that have no
memory, compiles every launch they make, and prints one line of JSON for each. It must run without
TRITON_INTERPRET, and so in a process of its own where tests interpret kernels.
"""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import iter_modules
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from sparrow.ops import PageLists, kernels
from sparrow.ops.dispatch import settled_weights
from sparrow.ops.kernels import attend_decode as decode_kernels
from sparrow.ops.kernels import attend_kept as kept_kernels
from sparrow.ops.kernels import attend_prefill as prefill_kernels
from sparrow.ops.kernels import heads as head_kernels
from sparrow.ops.kernels import layers as layer_kernels
from sparrow.ops.kernels import pages as page_kernels
from sparrow.ops.kernels import sampling as sampling_kernels
from sparrow.ops.reference.sampling import Draws
from sparrow.ops.types import Int8Weight, LowRank, RowSlots, RowState
from sparrow.sparse.compile import launch
from sparrow.sparse.flows.flow import Flow, trace
from sparrow.sparse.rule import Rule
from support.flows import LIBRARY, ODD, ON_GPU, make_cache

HOPPER = GPUTarget("cuda", 90, 32)


class Launch(NamedTuple):
    """A kernel and what it was called with, launch options included."""

    kernel: JITFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def compile_launch(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict:
    """Compile what `kernel[grid](*args, **kwargs)` would, for sm_90; its name and what it takes.

    registers are those of a thread, stack the bytes that it spills, shared the bytes of a program.
    """
    source, options = find_task(kernel, args, kwargs)
    compiled = triton.compile(source, target=HOPPER, options=options)
    return {
        "name": f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}",
        "constants": {name: value for name, value in kwargs.items() if name.isupper()},
        "warps": compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        **_resources(compiled.asm["cubin"]),
    }


def find_task(
    kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton compiles for these arguments, types and alignments by its own rules."""
    backend = make_backend(HOPPER)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    packed = kernel._pack_args(backend, dict(options), bound, specialization, options)
    chosen, signature, constants, attributes = packed
    return ASTSource(kernel, signature, constants, attributes), chosen.__dict__


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack as the binary itself declares them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2])}


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches of a with-block, kept instead of run; kernels overlap as they do on the GPU."""
    launches: list[Launch] = []

    def keep(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(kernel, args, kwargs))

    overlapping = patch.object(kernels.overlap, "overlaps", lambda _: True)
    with patch.object(JITFunction, "run", keep), overlapping:
        yield launches


def kernel_modules() -> list[ModuleType]:
    names = (module.name for module in iter_modules(kernels.__path__))
    return [import_module(f"{kernels.__name__}.{name}") for name in names]


def launched_by(module: ModuleType) -> set[str]:
    """The kernels that a module launches: its jit functions f with `f[...]` in the source."""
    names = set(re.findall(r"(\w+)\[", inspect.getsource(module)))
    return {name for name in names if isinstance(getattr(module, name, None), JITFunction)}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ints = partial(empty, dtype=torch.int32)


def select() -> None:
    for pages, mass in ((200, None), (512, None), (2048, 0.9), (32768, None), (32768, 0.9)):
        scores = empty(32, 8, pages, dtype=torch.float32)
        page_kernels.select_pages(scores, ints(32), ints(32), page=16, mass=mass)
    page_kernels.select_pages(scores[..., :512], ints(32), ints(32, 8), page=16)


def attend_decode() -> None:
    lists, wide = PageLists(ints(32, 8, 2048), ints(32, 8)), {"dtype": torch.float32}
    for rows, group, size, width, listed, dtype in (
        (32, 2, 128, 2048, lists, {}),
        (32, 5, 128, 2048, None, {}),
        (32, 5, 64, 2048, lists, {}),
        (32, 2, 256, 2048, None, {}),
        (256, 2, 128, 128, None, {}),  # a row, a program
        (32, 2, 80, 2048, lists, {}),
        (32, 2, 128, 2048, lists, wide),
    ):
        pool, q = empty(1000, 8, 16, size, **dtype), empty(rows, 8 * group, size, **dtype)
        where = ints(rows, width), ints(rows), listed
        decode_kernels.attend_decode(q, pool, pool, *where, scale=1)
    for group, queries in ((2, 9), (4, 9), (8, 9), (5, 17)):
        pool, q = empty(1000, 8, 16, 128), empty(32 * queries, 8 * group, 128)
        where = ints(32, 2048), ints(32 * queries)
        decode_kernels.attend_verify(q, pool, pool, *where, scale=1)


def attend_prefill() -> None:
    for size, group in ((128, 2), (64, 5), (256, 2), (80, 2)):
        q, pool = empty(900, 8 * group, size), empty(1000, 8, 16, size)
        where = ints(4, 200), ints(4), ints(5)
        prefill_kernels.attend_causal_paged(q, pool, pool, *where, scale=1.0)


def attend_kept() -> None:
    for size, group in ((128, 2), (64, 3), (128, 8), (80, 2)):
        given = (empty(900, 8 * group, size), empty(900, 8, size), empty(900, 8, size))
        q, k, v = (x.requires_grad_() for x in given)
        out = kept_kernels.attend_kept(q, k, v, ints(5), ints(8, 4, 900), page=16, scale=1.0)
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))


def bits() -> None:
    for pages in (200, 4096):
        page_kernels.page_bits(ints(900, 8, pages), ints(900, 8), pages=pages)


def store() -> None:
    pool, tokens = empty(1000, 8, 16, 128), empty(32, 8, 128)
    page_kernels.write_pages(pool, pool, tokens, tokens, ints(32))


def heads() -> None:
    angles = empty(32, 64, dtype=torch.float32)
    for norm in (empty(128), None):
        qkv, options = empty(32, 32 * 128), {"kv_heads": 8, "eps": 1e-6}
        head_kernels.split_heads(qkv, angles, angles, norm, norm, **options)


def linear() -> None:
    """Qwen3-1.7B's products, in 16 and 8 bits; few rows are cut along the depth too."""
    module = layer_kernels

    def eight_bits(outputs: int, inputs: int) -> Int8Weight:
        return Int8Weight.empty_like(empty(outputs, inputs))

    with settled_weights():
        for rows, weight in product((1, 32), (empty, eight_bits)):
            x, norm = empty(rows, 2048), empty(2048)
            module.norm_linear(x, norm, weight(4096, 2048), empty(4096), eps=1e-6)
            module.norm_linear(x, norm, weight(4096, 2048), eps=1e-6)
            module.norm_gated(x, norm, weight(2 * 6144, 2048), eps=1e-6)
            module.linear_add(empty(rows, 6144), weight(2048, 6144), x)
            module.logits(x, weight(151_936, 2048))
    module.gate(empty(288, 2 * 6144))


def updates() -> None:
    """The same products with adapters of rows."""

    def of(tokens: int, depth: int, *parts: int) -> LowRank:
        a_RI, b_EQ = empty(len(parts) * 4 * 16, depth), empty(sum(parts), 4 * 16)
        rows = RowSlots(slots_T=ints(tokens, dtype=torch.int64), count=4)
        return LowRank(a_RI=a_RI, b_EQ=b_EQ, parts=parts, rows=rows)

    module = layer_kernels
    with settled_weights():
        for rows in (1, 32, 64):
            x, norm = empty(rows, 2048), {"eps": 1e-6, "norm_C": empty(2048)}
            qkv, gate_up = (2048, 1024, 1024), (6144, 6144)
            for bias in (empty(4096), None):
                given = {"weight_EC": empty(4096, 2048), "bias_E": bias} | norm
                module.norm_linear(x, update=of(rows, 2048, *qkv), **given)
            given = {"weight_FC": empty(2 * 6144, 2048)} | norm
            module.norm_gated(x, update=of(rows, 2048, *gate_up), **given)
            wide, down = empty(rows, 6144), empty(2048, 6144)
            module.linear_add(wide, down, x, update=of(rows, 6144, 2048))


def rows() -> None:
    whole = ints(48, dtype=torch.int64)
    state = RowState(whole, whole, whole, whole, empty(48, dtype=torch.float32), ints(48, 2048))
    sampling_kernels.step_inputs(ints(32), state, page=16, width=2048)
    floats = empty(32, dtype=torch.float32)
    draws = Draws(whole[:32], floats, floats, empty(32, dtype=torch.bool))
    for advance in (False, True):
        sampling_kernels.step_outputs(ints(32), draws, state, advance=advance)


def sample() -> None:
    whole, floats = ints(32, dtype=torch.int64), empty(32, dtype=torch.float32)
    sampling_kernels.sample(empty(32, 151_936, dtype=torch.float32), whole, whole, floats)


def flows() -> None:
    """The generated kernels of every flow, in the library and not."""
    for flow in (*LIBRARY, *ODD, *ON_GPU):
        if flow.name != "learned":  # made for two layers of two KV heads
            flow_kernels(flow, size=128, group=2)
    flow_kernels(LIBRARY[6], size=64, group=5)


def flow_kernels(flow: Flow, *, size: int, group: int) -> None:
    shape = {"layers": 1, "kv_heads": 8, "slots": 48, "width": 2048, "device": "meta"}
    cache = make_cache(Rule(flow=flow), 16, size, 1000, torch.bfloat16, **shape)
    made = launch.Compiled(trace(flow, 16, size, group), torch.bfloat16)
    tokens, whole = empty(32, 8, size), ints(32, dtype=torch.int64)
    for write in (True, False):
        made.append(cache, 0, tokens, tokens, whole, write=write)
    queries = empty(32, 8 * group, size)
    given = (queries, ints(32, 2048), whole, ints(32, 8), whole)
    made.select(cache, 0, *given, first=1, last=2)


EVERY = (
    *(select, attend_decode, attend_prefill, attend_kept, bits, store, heads, linear, updates),
    *(rows, sample, flows),
)
CASES: dict[str, Callable[[], None]] = {case.__name__: case for case in EVERY}


def main(cases: list[str]) -> None:
    kernel_modules()  # imports them
    for case in cases or CASES:
        with recording() as launches:
            CASES[case]()
        for each in launches:
            print(json.dumps(compile_launch(*each)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
