"""Codes in E2M1 as numbers of 16 bits, and what scales them, in Triton: by shifts, two codes at a time. Imported only
where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.nn.kernels.quick import COMPILED

# One code of each of two words, of which it is the upper half of a byte. $3: which bytes. The sign goes to the top and
# the other bits to where exponent and mantissa meet; what is then missing is the difference of the exponents' biases, a
# factor. So the subnormal number, 0.5, is right, too.
_WIDEN = """{{
.reg .b32 code, low, factor, zero;
prmt.b32 code, $1, $2, $3;
shr.u32 low, code, {down};
and.b32 low, low, {below};
lop3.b32 code, code, 0x80008000, low, 0xea;
mov.b32 factor, {factor};
mov.b32 zero, 0x80008000;
fma.rn.{kind}x2 $0, code, factor, zero;
}}"""
TO_BF16 = tl.constexpr(_WIDEN.format(kind="bf16", down=6, below="0x01c001c0", factor="0x7e807e80"))
TO_F16 = tl.constexpr(_WIDEN.format(kind="f16", down=3, below="0x0e000e00", factor="0x74007400"))


@triton.jit
def numbers(held, AT: tl.constexpr, dtype: tl.constexpr):
    """What code ``AT``, of four bits, of each of the words ``held`` stands for, in ``dtype`` (bf16, fp16 or fp32),
    exactly; code 0 has the lowest bits."""
    if COMPILED:
        upper = held << 4 if AT % 2 == 0 else held  # once for all even codes
        which: tl.constexpr = 0x4400 + 0x1111 * (AT // 2)
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(TO_BF16, "=r,r,r,r,r", [upper, which], tl.bfloat16, True, 2)
        else:
            return tl.inline_asm_elementwise(TO_F16, "=r,r,r,r,r", [upper, which], tl.float16, True, 2).to(dtype)
    else:
        code = (held >> (4 * AT)) & 15
        half = ((code & 8) << 12 | (code & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True)
        return (half.to(tl.float32) * 16384.0).to(dtype)


@triton.jit
def powers(exponents):
    """2 to the power of ``exponents`` (E8M0: integers from 0 to 254) - 127, in fp32, of which the least is a
    subnormal number."""
    return tl.maximum(exponents << 23, 1 << 22).to(tl.float32, bitcast=True)
