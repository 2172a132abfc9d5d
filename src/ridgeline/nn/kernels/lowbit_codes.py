"""Low-bit codes and their scales as floats, in Triton, for CUDA devices: what kernels do with a word of a weight.
Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.nn.kernels.e2m1 import numbers, powers
from ridgeline.nn.kernels.e4m3 import widened

# One code of each of two words, as a pair of 16-bit floats less what stands for zero. $3: which halves of the words,
# $5: how far down, $7: the code's bits, $9: the exponent, $11: 1.0 twice, $13: minus (2^mantissa + zero) twice.
_PAIR = """{{
.reg .b32 t;
prmt.b32 t, $1, $2, $3;
shr.b32 t, t, $5;
lop3.b32 t, t, $7, $9, 0xea;
fma.rn.{0}x2 $0, t, $11, $13;
}}"""
# 8 bits do not fit the mantissa of bf16: the lower seven plus 128, less 128 or 256 by the highest one. $5: -1.0 twice.
_BYTES = """{
.reg .b32 t, u;
prmt.b32 t, $1, $2, $3;
lop3.b32 u, t, 0x00800080, 0x43804380, 0x6a;
lop3.b32 t, t, 0x007f007f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, u, $5, t;
}"""
PAIR_BF16 = tl.constexpr(_PAIR.format("bf16"))
PAIR_F16 = tl.constexpr(_PAIR.format("f16"))
BYTES_BF16 = tl.constexpr(_BYTES)


@triton.jit
def centered(held, center, AT: tl.constexpr, BITS: tl.constexpr, FLOATING: tl.constexpr, CENTERED: tl.constexpr,
              ASSEMBLY: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Code ``AT`` of each of the words, minus ``center`` (broadcastable fp32), in ``dtype``, exactly; of ``FLOATING``
    ones the numbers that they stand for: of bytes in e4m3, of 4 bits in E2M1."""
    MASK: tl.constexpr = (1 << BITS) - 1
    if held.dtype == tl.uint8:
        return widened(held, dtype)
    elif FLOATING:
        return numbers(held, AT, dtype)
    elif ASSEMBLY and (BITS <= 4 or dtype == tl.float16):
        PER_HALF: tl.constexpr = 16 // BITS
        which: tl.constexpr = 0x5410 if AT < PER_HALF else 0x7632
        down: tl.constexpr = BITS * (AT % PER_HALF)
        if dtype == tl.bfloat16:
            minus = (-128.0 - center).to(dtype)
            return tl.inline_asm_elementwise(
                PAIR_BF16, "=r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [held, which, down, MASK * 0x10001, 0x43004300, 0x3F803F80, minus], tl.bfloat16, True, 2,
            )  # fmt: skip
        else:
            minus = (-1024.0 - center).to(dtype)
            return tl.inline_asm_elementwise(
                PAIR_F16, "=r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [held, which, down, MASK * 0x10001, 0x64006400, 0x3C003C00, minus], tl.float16, True, 2,
            )  # fmt: skip
    elif ASSEMBLY and dtype == tl.bfloat16:
        signed = tl.inline_asm_elementwise(
            BYTES_BF16, "=r,r,r,r,r,r,r", [held, 0x4400 + 0x1111 * AT, -0x407F4080], tl.bfloat16, True, 2
        )
        return signed if CENTERED else (signed.to(tl.float32) + (128 - center)).to(dtype)
    else:
        return (((held >> (BITS * AT)) & MASK).to(tl.float32) - center).to(dtype)


@triton.jit
def scales_at(scale, at, rows, there, WHOLE: tl.constexpr):
    """Scales at ``at`` in fp32; those in bytes are exponents (E8M0). ``WHOLE``: they are read as words, of several
    outputs, which are copied ahead as codes are; of fewer bits Triton copies nothing ahead."""
    EACH: tl.constexpr = scale.dtype.element_ty.primitive_bitwidth
    if WHOLE:
        several = tl.load(scale.to(tl.pointer_type(tl.int32)) + at // (32 // EACH), there, other=0)
        held = several >> (rows % (32 // EACH) * EACH)
        if EACH == 8:
            return powers(held & 255)
        else:
            return held.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif EACH == 8:
        return powers(tl.load(scale + at, there, other=0).to(tl.int32))
    else:
        return tl.load(scale + at, there, other=0.0).to(tl.float32)


@triton.jit
def raised(held, AT: tl.constexpr, BITS: tl.constexpr):
    """2^BITS + code ``AT`` of each of the words: the code is moved to the top of a float's mantissa."""
    UP: tl.constexpr = 23 - BITS - BITS * AT
    moved = held << UP if UP >= 0 else held >> -UP
    bits = (moved & (((1 << BITS) - 1) << (23 - BITS))) | ((127 + BITS) << 23)
    return bits.to(tl.float32, bitcast=True)
