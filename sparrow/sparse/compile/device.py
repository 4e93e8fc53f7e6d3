"""Device functions that generated kernels call.

Exponential and logarithm are the GPU's own instructions (off by a few units in the last place);
the library's are several times as long. Triton's interpreter knows no instructions and takes these.
"""

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


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
