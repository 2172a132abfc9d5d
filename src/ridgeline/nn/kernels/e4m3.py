"""Codes in e4m3 as numbers of 16 bits, in Triton: four at a time by shifts, which every device has. An instruction that
widens them is there from compute capability 8.9 on, to fp16 alone. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.nn.kernels.quick import COMPILED

# The sign stays in place and the other bits move down to where exponent and mantissa meet; what is then missing is the
# difference of the exponents' biases, a factor. So subnormals are right, too; NaN becomes 480.
_WIDEN = """{{
.reg .b32 low, high, part, factor, zero;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 high, $2, 0, 0x3424;
shr.u32 part, low, {down};
and.b32 part, part, {below};
lop3.b32 low, low, 0x80008000, part, 0xea;
shr.u32 part, high, {down};
and.b32 part, part, {below};
lop3.b32 high, high, 0x80008000, part, 0xea;
mov.b32 factor, {factor};
mov.b32 zero, 0x80008000;
fma.rn.{kind}x2 $0, low, factor, zero;
fma.rn.{kind}x2 $1, high, factor, zero;
}}"""
TO_BF16 = tl.constexpr(_WIDEN.format(kind="bf16", down=4, below="0x07f007f0", factor="0x7b807b80"))
TO_F16 = tl.constexpr(_WIDEN.format(kind="f16", down=1, below="0x3f803f80", factor="0x5c005c00"))


@triton.jit
def widened(codes, dtype: tl.constexpr):
    """``codes`` (uint8) in ``dtype`` (bf16, fp16 or fp32), exactly, but for NaN."""
    if COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(TO_BF16, "=r,=r,r", [codes], tl.bfloat16, True, 4)
    elif COMPILED:
        return tl.inline_asm_elementwise(TO_F16, "=r,=r,r", [codes], tl.float16, True, 4).to(dtype)
    else:
        bits = codes.to(tl.int32)
        half = ((bits + (bits & 128)) << 7).to(tl.int16).to(tl.float16, bitcast=True)
        return (half.to(tl.float32) * 256.0).to(dtype)
