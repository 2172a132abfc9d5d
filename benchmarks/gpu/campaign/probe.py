"""The device itself: products by dtype, memory, attention and copies, beside what its data sheet says of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from campaign.cells import Cell, Figures, Setting
from ridgeline.graph.graph import Op
from ridgeline.measure.probing.gpu_operators import timed
from ridgeline.nn.quant.codec import E4M3
from ridgeline.predict.operators.kernel import op_time, roof_seconds

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32,
          "int8": torch.int8, "fp8": E4M3}  # fmt: skip


def cells(setting: Setting) -> list[Cell]:
    """Products, copies on the device and over the host's link, attention of a prompt."""
    n, big = (256, 1 << 22) if setting.small else (8192, 1 << 30)
    known = setting.device
    kinds = ("fp32",) if setting.small else [k for k in DTYPES if k in known.peak_flops]
    found = []
    for kind in kinds:
        size = n // 4 if kind == "fp32" and not setting.small else n
        op = Op("product", "", "gemm", flops=2.0 * size**3, bytes=3.0 * size**2 * _width(kind), dtype=kind,
                shape=(size, size, size))  # fmt: skip
        found.append(Cell(f"product {size}^3 {kind}", partial(product, setting, op), partial(said, setting, op)))
    copy = Op("copy", "", "copy", bytes=2.0 * big, dtype="bf16")
    found.append(Cell(f"copy of {big >> 20} MiB", partial(copied, setting, copy), partial(said, setting, copy)))
    if setting.kind == "cuda":
        for name in ("to the device", "to the host"):
            found.append(Cell(f"pinned copy of 256 MiB {name}", partial(moved, name == "to the host"),
                              partial(link_said, setting)))  # fmt: skip
    b, heads, length, d = (1, 2, 128, 64) if setting.small else (4, 32, 4096, 128)
    low = "fp32" if setting.small else "bf16"
    attention = Op("attention", "", "attention", flops=4.0 * b * heads * length**2 * d,
                   bytes=4.0 * b * heads * length * d * _width(low), dtype=low,
                   shape=(b, heads, heads, length, length, d), causal=True)  # fmt: skip
    label = f"attention of {b} prompts of {length}, {heads} heads of {d}"
    found.append(Cell(label, partial(attended, setting, attention), partial(said, setting, attention)))
    return found


def _width(kind: str) -> int:
    return DTYPES[kind].itemsize


def said(setting: Setting, op: Op) -> Figures:
    """What the predictor says of an operator."""
    return {"seconds": op_time(op, setting.device).seconds}


def link_said(setting: Setting) -> Figures:
    """Seconds of 256 MiB over the host's link, by its data sheet."""
    link = setting.device.host_link
    return {} if link is None else {"seconds": link.latency + (256 << 20) / link.bandwidth}


def rates(setting: Setting, op: Op, seconds: float) -> Figures:
    """Seconds with what they are of the data sheet's peaks."""
    found: Figures = {"seconds": seconds, "roof": roof_seconds(op, setting.device) / seconds,
                      "bytes_per_s": op.bytes / seconds}  # fmt: skip
    return found | ({"flops_per_s": op.flops / seconds} if op.flops else {})


def product(setting: Setting, op: Op) -> Figures:
    """A square product with random operands."""
    size, kind, device = op.shape[0], op.dtype, torch.device(setting.kind)
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    call: Callable[[], torch.Tensor]
    if kind == "fp8":
        one = torch.ones((), device=device)
        x, w = a.to(E4M3), b.to(E4M3).t()
        call = partial(torch._scaled_mm, x, w, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    elif kind == "int8":
        call = partial(torch._int_mm, a.char(), b.char().t())
    else:
        call = partial(F.linear, a.to(DTYPES[kind]), b.to(DTYPES[kind]))
    return rates(setting, op, timed(device, [call]))


def copied(setting: Setting, op: Op) -> Figures:
    """A copy within the device's memory."""
    source = torch.randint(0, 9, (int(op.bytes) // 2,), dtype=torch.uint8, device=setting.kind)
    target = torch.empty_like(source)
    return rates(setting, op, timed(torch.device(setting.kind), [partial(target.copy_, source)]))


def moved(back: bool) -> Figures:
    """A copy between pinned host memory and the device."""
    host = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device="cuda")
    source, target = (there, host) if back else (host, there)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(8):
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    seconds = sorted(found)[len(found) // 2]
    return {"seconds": seconds, "bytes_per_s": host.nbytes / seconds}


def attended(setting: Setting, op: Op) -> Figures:
    """Causal attention by PyTorch."""
    b, heads, _, length, _, d = op.shape
    q, k, v = (torch.randn(b, heads, length, d, device=setting.kind, dtype=DTYPES[op.dtype]) for _ in range(3))
    call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    return rates(setting, op, timed(torch.device(setting.kind), [call]))
