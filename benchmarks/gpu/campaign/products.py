"""Products with weights and adapters: our kernels beside PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from campaign.cells import Setting
from ridgeline.measure.probing.gpu_operators import ROTATE_BYTES
from ridgeline.nn.kernels.products import served_linear
from ridgeline.nn.quant import mxfp4 as mxfp4_codes
from ridgeline.nn.quant.codec import E4M3, layouts
from ridgeline.nn.quant.codes import counters
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.ternary import ZEROS, Ternary, TernaryLinear
from ridgeline.techniques.precision import fp8_linear_torch as float8_linear

GROUP = 128


class Calls(NamedTuple):
    """Our kernel on several sets of operands, so that caches do not hold them; PyTorch's way; what is right."""

    ours: list[Callable[[], Tensor]]
    plain: list[Callable[[], Tensor]]
    right: Callable[[], Tensor]
    others: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})
    """Kernels of other libraries that compute the same here."""


def copies(size: float) -> int:
    return max(1, min(8, int(ROTATE_BYTES // size)))


def randn(setting: Setting, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=setting.kind, dtype=dtype)


def codes(setting: Setting, rows: int, out: int, width: int, bits: int, dtype: torch.dtype) -> Calls:
    device = torch.device(setting.kind)
    group = min(GROUP, width)
    drawn = torch.randint(1 << bits, (out, width), dtype=torch.uint8)
    record = Packed(drawn, torch.rand(out, width // group).half() * 0.01, None, bits, group)
    layers = [PackedLinear(record, device=device) for _ in range(copies(out * width * bits / 8))]
    x = randn(setting, rows, width, dtype=dtype)
    dense = record.dense().to(device)
    weights = [dense.to(dtype) for _ in range(copies(out * width * dtype.itemsize))]
    others = {}
    if bits == 4 and setting.kind == "cuda" and dtype == torch.bfloat16:
        others["torch"] = partial(torch._weight_int4pack_mm, x, *tinygemm(drawn.to(device), record.scale.to(device)))
    return Calls([partial(layer, x) for layer in layers], [partial(F.linear, x, w) for w in weights],
                 lambda: F.linear(x.float(), dense), others)  # fmt: skip


def rows(setting: Setting, rows: int, out: int, width: int) -> Calls:
    """Ours beside PyTorch's. The kernel for several rows is Hopper's."""
    from ridgeline.nn.kernels.skinny import product_of_rows

    weights = [randn(setting, out, width, dtype=torch.bfloat16) for _ in range(copies(2.0 * out * width))]
    x = randn(setting, rows, width, dtype=torch.bfloat16)
    arrived = counters(out, x.device)
    ours = [partial(served_linear, x, w) if rows == 1 else partial(product_of_rows, x, w, arrived) for w in weights]
    return Calls(ours, [partial(F.linear, x, w) for w in weights], lambda: F.linear(x.float(), weights[0].float()))


def adapters(setting: Setting, rows: int, count: int, rank: int) -> Calls:
    """What adapters add to gates and up projections of Llama 3.1 8B, beside a loop over them."""
    from ridgeline.nn.kernels.grouped_lora import add_lora
    from ridgeline.nn.kernels.lora_stack import Stack, cut

    width, outs, device, bf16 = 4096, (14336, 14336), setting.kind, torch.bfloat16
    each = rows // count
    segments = [(i, i * each, (i + 1) * each) for i in range(count)]
    items = torch.tensor(cut(segments, rows), dtype=torch.int32, device=device)
    x, y = (randn(setting, rows, n, dtype=bf16) for n in (width, sum(outs)))
    stacks = [
        Stack(randn(setting, count, 2 * rank, width, dtype=bf16) / 64,
              randn(setting, count, rank, sum(outs), dtype=bf16),
              torch.full((count, 2), rank, dtype=torch.int32, device=device), torch.ones(count, 2, device=device), outs)
        for _ in range(copies(2.0 * count * rank * (2 * width + sum(outs))))
    ]  # fmt: skip

    def ours(stack: Stack, into: Tensor) -> Tensor:
        add_lora(x, into, items, stack)
        return into

    def one_by_one(stack: Stack, dtype: torch.dtype) -> Tensor:
        out = y.to(dtype, copy=True)
        for slot, first, end in segments:
            for a, b, part in zip(stack.a[slot].split(rank), stack.b[slot].split(outs, 1),
                                  out[first:end].split(outs, 1), strict=True):  # fmt: skip
                part += x[first:end].to(dtype) @ a.to(dtype).t() @ b.to(dtype)
        return out

    return Calls([partial(ours, stack, y.clone()) for stack in stacks],
                 [partial(one_by_one, stack, bf16) for stack in stacks],
                 lambda: one_by_one(stacks[0], torch.float32))  # fmt: skip


def float8_rows(setting: Setting, rows: int, out: int, width: int) -> Calls:
    """By codes, beside a cast with PyTorch's product in float8 or with ours: which of them few rows should take."""
    from ridgeline.nn.kernels.lowbit_matmul import float8_product
    from ridgeline.nn.kernels.skinny import product_of_coded_rows

    x = randn(setting, rows, width, dtype=torch.bfloat16)
    held = [layouts(randn(setting, out, width, dtype=torch.bfloat16), E4M3, True, False)
            for _ in range(copies(out * width))]  # fmt: skip
    arrived = counters(out, x.device)
    dense = held[0].rows.float() * held[0].inverse_scale
    weights = [dense.bfloat16() for _ in range(copies(2.0 * out * width))]

    ones, others = cycle(held), cycle(held)  # as above: no cache holds the next

    def cast() -> Tensor:
        a, w = layouts(x, E4M3, True, False), next(ones)
        return float8_linear.product(a.rows, a.inverse_scale, w.rows, w.inverse_scale, x.dtype, fast=True)

    def both() -> Tensor:
        a, w = layouts(x, E4M3, True, False), next(others)
        return product_of_coded_rows(a.rows, a.inverse_scale, w.rows, w.inverse_scale, arrived, x.dtype)

    return Calls([partial(float8_product, x, w.rows, w.inverse_scale, arrived) for w in held],
                 [partial(F.linear, x, w) for w in weights], lambda: F.linear(x.float(), dense),
                 {"cast and torch": cast, "cast and ours": both})  # fmt: skip


def mxfp4(setting: Setting, rows: int, out: int, width: int) -> Calls:
    device = torch.device(setting.kind)
    record = mxfp4_codes.quantized(torch.randn(out, width))
    layers = [PackedLinear(record, device=device) for _ in range(copies(out * width * 17 / 32))]
    x = randn(setting, rows, width, dtype=torch.bfloat16)
    dense = record.dense().to(device)
    weights = [dense.bfloat16() for _ in range(copies(2.0 * out * width))]
    return Calls([partial(layer, x) for layer in layers], [partial(F.linear, x, w) for w in weights],
                 lambda: F.linear(x.float(), dense.float()))  # fmt: skip


def tinygemm(codes: Tensor, scale: Tensor) -> tuple[Tensor, int, Tensor]:
    """What PyTorch's kernel for 4-bit weights reads, which torchao calls too: the codes [out, in] in its tiles, the
    inputs of a group, and scales [out, groups] with offsets [groups, out, 2]. It counts codes from 8, as ours do.

    Not a back end of the engines: products with many rows would need the codes in another form beside this one.
    """
    bytes_ = codes[:, ::2] << 4 | codes[:, 1::2]
    table = torch.stack((scale.bfloat16(), torch.zeros_like(scale, dtype=torch.bfloat16)), -1)
    packed = torch.ops.aten._convert_weight_to_int4pack(bytes_.contiguous(), 8)
    return packed, codes.shape[1] // scale.shape[1], table.transpose(0, 1).contiguous()


def ternary(out: int, width: int) -> Calls:
    drawn = torch.rand(out, width)
    symbols = torch.where(drawn < ZEROS, 0, torch.where(drawn < (1 + ZEROS) / 2, 1, 2)).to(torch.uint8)
    record = Ternary.encode(symbols, -torch.rand(out).half(), torch.rand(out).half())
    layers = [TernaryLinear(record, device=torch.device("cuda")) for _ in range(8)]
    dense = record.dense().cuda()
    weights = [dense.bfloat16() for _ in range(8)]
    x = torch.randn(1, width, dtype=torch.bfloat16, device="cuda")
    return Calls([partial(layer, x) for layer in layers], [partial(F.linear, x, w) for w in weights],
                 lambda: F.linear(x.float(), dense))  # fmt: skip
