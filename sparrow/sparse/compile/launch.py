"""Compiled flows: sources cached by content, and the kernel launches of a rule.

At the end stand the device functions that generated kernels call.

Legend of the dimension letters: sparrow/ops/types.py.
"""

import hashlib
import math
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow import ops
from sparrow.files import cache_folder
from sparrow.functions import run_file
from sparrow.ops.kernels.overlap import overlap_options
from sparrow.ops.kernels.pages import MOST_PAGES, select_pages, warps_of
from sparrow.sparse.compile import kernels
from sparrow.sparse.compile.emit import constants, padded
from sparrow.sparse.flows.flow import Program, check_weights
from sparrow.sparse.flows.tensor import in_order

BLOCK_BYTES = 8192  # of fields that a program of `score` takes at a time
LEAST_BLOCK, MOST_BLOCK = 16, 32
WARP_NUMBERS = 8192  # of a block of fields, for one warp
LOOPS, STAGES = 4, 3
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


class ScoreLaunch(NamedTuple):
    """How `score` is cut: pages at a time and how often, warps that share them, steps in flight."""

    block: int
    loops: int
    warps: int
    stages: int


class Compiled:
    """The kernels of a program for keys of one dtype."""

    def __init__(
        self, program: Program, keys: torch.dtype, launch: ScoreLaunch | None = None
    ) -> None:
        self.program, self.keys = program, keys
        self.launch = launch or launch_for(program, keys)
        self.text = kernels.module(program, keys, block=self.launch.block)
        self.module = _module(self.text)
        self._constants: dict[tuple[str, torch.device], list[Tensor]] = {}

    def append(
        self,
        cache: ops.PageCache,
        layer: int,
        k_TGD: Tensor,
        v_TGD: Tensor,
        slots_T: Tensor,
        *,
        write: bool,
    ) -> None:
        """Write tokens (or find them written), and fill the fields of the pages they finish."""
        if not len(slots_T):
            return
        k_NGPD, v_NGPD = cache.field("k", layer), cache.field("v", layer)
        kv_heads, numbers = k_NGPD.shape[1], self.program.page * padded(self.program.head_size)
        self.module.append[(len(slots_T), kv_heads)](
            *(k_NGPD, v_NGPD, k_TGD, v_TGD, slots_T.contiguous()),
            *self._blocks(cache, layer),
            *self._arrays("summary", k_NGPD.device),
            *(*k_TGD.stride()[:2], *v_TGD.stride()[:2]),
            KV_HEADS=kv_heads,
            WRITE=write,
            **overlap_options(k_NGPD),
            num_warps=max(1, min(8, numbers // 1024)),
        )

    def select(
        self,
        cache: ops.PageCache,
        layer: int,
        q_BHD: Tensor,
        table_BM: Tensor,
        lengths_B: Tensor,
        budgets: Tensor,
        rows_B: Tensor | None,
        *,
        first: int,
        last: int,
    ) -> ops.PageLists:
        """The pages that each row and KV head keeps."""
        rows, width = table_BM.shape
        if width > MOST_PAGES:
            raise ValueError(f"{width} pages of a sequence: kernels choose among {MOST_PAGES}")
        kv_heads = q_BHD.shape[1] // self.program.group
        check_weights(self.program, layers=layer + 1, kv_heads=kv_heads)
        if not rows * width:
            return _lists(q_BHD, rows, kv_heads, width)
        q_BHD = q_BHD if q_BHD.stride(2) == 1 else q_BHD.contiguous()
        lengths_B = lengths_B.contiguous()
        budgets_BG = budgets if budgets.ndim == 2 else budgets[:, None].expand(rows, kv_heads)
        score_BGM = q_BHD.new_empty((rows, kv_heads, width), dtype=torch.float32)
        cuts = [
            q_BHD.new_empty((rows, kv_heads, math.prod(cut.shape), width), dtype=torch.float32)
            for cut in kernels.cuts(self.program)
        ]
        choices = [torch.empty_like(score_BGM) for _ in kernels.choices(self.program)]
        shape = {"KV_HEADS": kv_heads, "FIRST": first, "LAST": last, **overlap_options(q_BHD)}
        staged, arrays = kernels.staged(self.program), self._arrays("score", q_BHD.device)
        launch, states = self.launch, [cache.state(n, layer) for n, _ in self.program.state]
        blocks = triton.cdiv(width, launch.block * launch.loops)
        read = lengths_B if rows_B is None else rows_B  # rows are read for their state only
        self.module.score_pages[(kv_heads, blocks, rows)](
            *(cuts if staged else [score_BGM]),
            *(q_BHD, table_BM, lengths_B, budgets_BG, read),
            *(*self._blocks(cache, layer), *arrays),
            *(*states, layer, width, states[0].shape[2] if states else 0),
            *(*q_BHD.stride()[:2], *table_BM.stride(), *budgets_BG.stride()),
            **shape,
            LOOPS=launch.loops,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
        if not staged:
            chosen, mass = (score_BGM, lengths_B, budgets_BG), self.program.mass
            return select_pages(*chosen, page=cache.page, first=first, last=last, mass=mass)
        lists, size = _lists(score_BGM, rows, kv_heads, width), triton.next_power_of_2(width)
        self.module.choose[(rows, kv_heads)](
            *(*lists, score_BGM, *cuts, *choices, q_BHD, lengths_B, budgets_BG),
            *(*arrays, layer, width),
            *(*q_BHD.stride()[:2], *budgets_BG.stride()),
            **shape,
            MASS=self.program.mass,
            SIZE=size,
            num_warps=warps_of(size),
        )
        return lists

    def _blocks(self, cache: ops.PageCache, layer: int) -> list[Tensor]:
        return [cache.field(name, layer) for name in self.program.blocks(self.keys)]

    def _arrays(self, part: str, device: torch.device) -> list[Tensor]:
        """The constants of the score, or of the summary, on the device."""
        if (part, device) not in self._constants:
            nodes = self.program.nodes if part == "score" else in_order(self.program.summary)
            arrays = [np.frombuffer(node.given[0], np.float32).copy() for node in constants(nodes)]
            self._constants[part, device] = [torch.from_numpy(x).to(device) for x in arrays]
        return self._constants[part, device]


@cache
def compiled(program: Program, keys: torch.dtype) -> Compiled:
    """The kernels of a program, made once."""
    return Compiled(program, keys)


def launch_for(program: Program, keys: torch.dtype) -> ScoreLaunch:
    """About 8 KB of fields for a program, and warps that hold them as float32."""
    pages = BLOCK_BYTES // max(1, program.bytes(keys))
    block = max(LEAST_BLOCK, min(MOST_BLOCK, padded(max(1, pages + 1)) // 2))
    numbers = sum(math.prod(padded(s) for s in item.shape) for item in program.fields)
    warps = max(1, min(4, block * numbers // WARP_NUMBERS))
    return ScoreLaunch(block, LOOPS, warps, STAGES)


def _module(text: str) -> ModuleType:
    """The module of a source, which lies in a file named by its content: Triton reads it there."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    name = f"sparrow_flow_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    path = cache_folder("kernels") / f"{name}.py"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".py", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        Path(file.name).replace(path)
    return run_file(path, name)


def _lists(like: Tensor, rows: int, kv_heads: int, width: int) -> ops.PageLists:
    """Room for lists; without pages all are empty."""
    pages = torch.empty((rows, kv_heads, width), dtype=torch.int32, device=like.device)
    counts = torch.empty((rows, kv_heads), dtype=torch.int32, device=like.device)
    return ops.PageLists(pages=pages, counts=counts if width else counts.zero_())


# Device functions. Exponential and logarithm are the GPU's own instructions (off by a few units in
# the last place); the library's are several times as long. Triton's interpreter knows no
# instructions and takes these.


@triton.jit
def exponential(x: tl.tensor) -> tl.tensor:
    if _INTERPRETED:
        y = tl.exp(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * _LOG2_E], tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def logarithm(x: tl.tensor) -> tl.tensor:
    if _INTERPRETED:
        y = tl.log(x)
    else:
        y = _LN_2 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def nibbles(packed: tl.tensor) -> tl.tuple:
    """The low and the high 4 bits of every byte, n, as bf16 numbers 128 + n.

    Four bytes at a time: the bits become the last ones of 128.0, whose upper byte is 0x43.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high;
        and.b32 low, $4, 0x0F0F0F0F;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0F0F0F0F;
        prmt.b32 $0, low, 0x43434343, 0x4140;
        prmt.b32 $1, low, 0x43434343, 0x4342;
        prmt.b32 $2, high, 0x43434343, 0x4140;
        prmt.b32 $3, high, 0x43434343, 0x4342;
        }
        """,
        "=r,=r,=r,=r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
