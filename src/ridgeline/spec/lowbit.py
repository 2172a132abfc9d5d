"""Storage of low-bit weights in memory and in checkpoints: one place for loading and predicting.

Sizes in bytes. The form in memory depends on the available kernels (see :mod:`ridgeline.nn.quant.packed_linear`).
"""

from __future__ import annotations

from typing import Literal

from ridgeline.spec.device import DTYPE_BYTES

FEW_ROWS = 64
"""Rows up to which kernels on quantized weights beat dequantizing first, on a CPU with matrix units."""
GEMM_ROWS = (1, 2, 3, 4, 8, 16, FEW_ROWS, 128)
"""Numbers of rows at which ``ridgeline probe`` times products that wait for their weights, as far as each kind's
kernel for few rows goes."""
LANES = 32
"""Inputs that the CPU kernels take at a time: groups with one scale have a multiple of them."""
TILE = 32
"""Outputs whose codes the CPU kernels read together: the last tile of a weight is filled up."""
SHAPE_BYTES = 16
"""Of ``weight_shape``, two int64 beside every packed weight of a checkpoint."""

MANY_ROWS = 128
"""Most rows that GPU kernels multiply by codes; of more the weight is expanded first, and multiplied by PyTorch."""
FLOAT8_ROWS = 8
"""Most rows that are multiplied in 16 bits by weights in float8 codes where a GPU multiplies float8, too. A kernel that
waits for the codes does so in one launch, and there is no cast of the inputs; of more rows that is cuBLAS's work."""
STRIPES = (64, 32, 16)
"""Words of a row that GPU kernels take at a time: code i of word j is input i · stripe + j of a block."""
_LONGEST_STRIPE = {2: 32, 4: 64, 8: 32}
"""By bits: what is fastest on an H100, with one row and with many."""

Form = Literal["nibbles", "bytes", "words", "stripes"]
"""How a layer holds a weight [out, in]: nibbles: two codes a byte; bytes: int8; words: the bits as stored; stripes:
codes of 2, 4 or 8 bits in words, inputs in the order of the GPU kernels."""


def held(out: int, width: int, bits: int, group_size: int, device: str = "cpu", fast: bool = True) -> Form:
    """The form in which a weight [out, width] is held on ``device`` (cpu or cuda); ``group_size`` 0: whole rows."""
    group = group_size or width
    if fast and device == "cpu" and (group % LANES == 0 or group == width):
        return "bytes" if bits > 4 else "nibbles"
    if fast and device == "cuda" and striped(width, bits, group):
        return "stripes"
    return "words"


def wide_bits(bits: int) -> int:
    """Bits in which GPU kernels hold a code: those of which a word has whole ones."""
    return next(wide for wide in (2, 4, 8) if bits <= wide)


def striped(width: int, bits: int, group: int) -> int:
    """The stripe of a weight with ``width`` inputs: the longest that fills blocks, else the shortest, whose last block
    is filled up; 0: groups have no whole stripes."""
    wide = wide_bits(bits)
    fitting = [s for s in STRIPES if group % s == 0 and s <= _LONGEST_STRIPE[wide]]
    even = [s for s in fitting if width * wide % (32 * s) == 0]
    return (even or fitting[-1:] or [0])[0]


def held_bytes(
    out: int, width: int, bits: int, group_size: int, symmetric: bool, device: str = "cpu", fast: bool = True
) -> int:
    """Bytes of that form, 16-bit scales and zero points included; on a CPU with our compiled kernels."""
    form, groups = held(out, width, bits, group_size, device, fast), width // (group_size or width)
    if form == "words":
        return word_bytes(out, width, bits) + out * groups * (2 if symmetric else 3)
    if form == "stripes":
        stripe, wide = striped(width, bits, group_size or width), wide_bits(bits)
        row = 4 * stripe * -(-width * wide // (32 * stripe))
        return out * (row + groups * (2 if symmetric else 3))
    row = 4 * -(-width // (4 if form == "bytes" else 8))  # four inputs side by side, two codes a byte
    return -(-out // TILE) * TILE * (row + groups * (2 if symmetric else 4))


def word_bytes(rows: int, n: int, bits: int) -> int:
    """Bytes of ``rows`` rows of ``n`` codes packed into whole 32-bit words."""
    return 4 * rows * -(-n * bits // 32)


def checkpoint_bytes(out: int, width: int, bits: int, group_size: int, symmetric: bool) -> int:
    """Bytes of the tensors that stand for a weight [out, width] in a compressed-tensors checkpoint."""
    groups = width // (group_size or width)
    zeros = 0 if symmetric else word_bytes(groups, out, bits)  # packed along the outputs
    return word_bytes(out, width, bits) + 2 * out * groups + zeros + SHAPE_BYTES


def bits_per_weight(width: int, bits: int, group_size: int, symmetric: bool) -> float:
    """Stored bits of one weight: its code, and its share of the 16-bit scale and of the zero point."""
    return bits + (16 + (0 if symmetric else bits)) / (group_size or width)


_KV_GROUP = 64
"""Values along the head dimension that share a scale in a 4-bit cache (arXiv:2303.06865, section 4)."""


def kv_group(head_dim: int) -> int:
    """The largest divisor of ``head_dim`` up to 64."""
    return next(g for g in range(min(_KV_GROUP, head_dim), 0, -1) if head_dim % g == 0)


def kv_bytes(dtype: str, head_dim: int) -> float:
    """Stored bytes of one key or value element with its share of scales: see :mod:`ridgeline.nn.quant.quantized_kv`."""
    if dtype == "int4":
        return 0.5 + 4 / kv_group(head_dim)
    return 1 + 2 / head_dim if dtype == "int8" else DTYPE_BYTES[dtype]
