"""Products in 16 bits that are computed in fp32, on CPUs whose units for them are slower than those for fp32, or
missing: an Intel Xeon without AMX multiplies bf16 at half the rate of fp32, a processor with AVX2 alone at an eighth.

The same products, sums in fp32 and one rounding, as oneDNN has them; so are gradients. Weights are widened a part after
the other. Few rows stay with PyTorch, as they wait for the weight's bytes either way; and so does what is observed
(:func:`~ridgeline.nn.kernels.dispatch.observed`).
"""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from ridgeline.nn.kernels.dispatch import observed

MANY_ROWS = 64
"""Rows from which widening a weight takes less time than products in 16 bits without fast units."""
PART = 1 << 20
"""Numbers of a weight that are widened at once: what is made of them stays in a core's cache."""


@lru_cache(maxsize=1)
def widened() -> frozenset[torch.dtype]:
    """Dtypes of 16 bits whose products in fp32 are faster here (``benchmarks/cpu_products.py``)."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkl.is_available():
        return frozenset()
    has = set(_told("flags").split())
    if not has:  # not known
        return frozenset()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if limit not in ("ALL", "DEFAULT"):  # what oneDNN may use of them
        has -= {flag for flag, names in _ONEDNN.items() if not any(name in limit for name in names)}
    bf16 = "amx_bf16" in has or ("avx512_bf16" in has and maker() != "GenuineIntel")
    fp16 = not has.isdisjoint({"amx_fp16", "avx512_fp16"})
    return frozenset(dtype for dtype, fast in ((torch.bfloat16, bf16), (torch.float16, fp16)) if not fast)


_ONEDNN = {"amx_bf16": ("AMX",), "amx_fp16": ("AMX_FP16",), "avx512_fp16": ("FP16", "AMX", "AVX10"),
           "avx512_bf16": ("BF16", "FP16", "AMX", "AVX10")}  # fmt: skip
"""Linux's flags, and names of oneDNN's instruction sets that include them."""


def maker() -> str:
    """The processor's maker, as Linux names it; elsewhere taken to be Intel."""
    return _told("vendor_id") or "GenuineIntel"


def _told(name: str) -> str:
    """What Linux says of the first processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def to_widen(*given: Tensor) -> list[Tensor] | None:
    """The operands of a product in the 16 bits that it is in, also by autocast, if it is to be computed in fp32; None:
    it is PyTorch's."""
    if not given[0].is_cpu or torch.compiler.is_compiling() or not widened():
        return None
    cast = torch.is_autocast_enabled("cpu")
    low = torch.get_autocast_dtype("cpu") if cast else given[0].dtype
    if low not in widened() or observed():
        return None
    for t in given:
        if not t.is_cpu or type(t) not in (Tensor, nn.Parameter):
            return None
        if t.dtype is not low and not (cast and t.dtype is torch.float32):
            return None
    return [t.to(low) for t in given]


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``F.linear``, x [..., k], weight [n, k] → [..., n], in fp32; None: it is PyTorch's."""
    if not x.is_cpu or weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1] or not weight.numel():
        return None
    if x.numel() < MANY_ROWS * x.shape[-1] or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    given = to_widen(x, weight) if bias is None else to_widen(x, weight, bias)
    if given is None:
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        y: Tensor = _WideLinear.apply(*given)  # type: ignore[no-untyped-call]
        return y
    return wide_product(*given)


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k] in 16 bits times ``weight`` [n, k], plus ``bias`` [n], computed in fp32 → [..., n]. Not recorded."""
    rows, (n, k) = x.reshape(-1, x.shape[-1]).float(), weight.shape
    y = rows.new_empty(len(rows), n, dtype=x.dtype)
    step = max(1, PART // k)
    with torch.autocast("cpu", enabled=False):  # which would round the operands again
        for start in range(0, n, step):
            part = slice(start, start + step)
            wide = weight[part].float().t()
            y[:, part] = rows @ wide if bias is None else torch.addmm(bias[part].float(), rows, wide)
    # Not a view, which no autograd function may return for others to write to; as ``F.linear`` does.
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, [*x.shape[:-1], n])


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_w else None, weight if need_x else None)
        return wide_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), need = ctx.saved_tensors, ctx.needs_input_grad
        rows = d.reshape(-1, d.shape[-1])
        found = (wide_product(d, weight.t()) if need[0] else None,
                 wide_product(rows.t(), x.reshape(-1, x.shape[-1]).t()) if need[1] else None)  # fmt: skip
        return *found, *(rows.sum(0) if wanted else None for wanted in need[2:])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``torch.matmul`` of a [..., m, k] and b [..., k, n] with the same leading sizes, in fp32 where that is faster."""
    if a.dim() == b.dim() > 2 and a.shape[:-2] == b.shape[:-2] and a.shape[-2] >= MANY_ROWS:
        given = to_widen(a, b)
        if given is not None:
            y: Tensor = _WideMatmul.apply(*given)  # type: ignore[no-untyped-call]
            return y
    return torch.matmul(a, b)


class _WideMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with torch.autocast("cpu", enabled=False):
            return torch.matmul(a.float(), b.float()).to(a.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wide, (need_a, need_b) = d.float(), ctx.needs_input_grad
        with torch.autocast("cpu", enabled=False):
            return (torch.matmul(wide, b.float().mT).to(a.dtype) if need_a else None,
                    torch.matmul(a.float().mT, wide).to(b.dtype) if need_b else None)  # fmt: skip


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.mm`` of a [m, k] and b [k, n], not recorded, in fp32 where that is faster."""
    if len(a) >= MANY_ROWS and a.shape[1] and not torch.is_grad_enabled():
        given = to_widen(a, b)
        if given is not None:
            found = wide_product(given[0], given[1].t())
            return found if out is None else out.copy_(found)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, grouped: bool) -> Tensor:
    """PyTorch's ``scaled_dot_product_attention``, whose backward pass in 16 bits is computed in fp32 where that is
    faster. q [B, H, S, D], k and v [B, G, T, D]."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    whole = bias is None or not (bias.requires_grad or bias.dtype is torch.bool)
    given = to_widen(q, k, v) if recorded and whole and q.dim() == 4 and q.shape[-2] >= MANY_ROWS else None
    if given is not None and not (causal and q.shape[-2] != k.shape[-2]):
        low, keys, values = given
        if grouped:
            keys, values = (t.repeat_interleave(max(1, q.shape[1] // t.shape[1]), 1) for t in (keys, values))
        rounded = None if bias is None else bias.to(low.dtype)
        if torch._fused_sdp_choice(low, keys, values, rounded, 0.0, causal) == _FUSED:
            y: Tensor = _WideAttention.apply(low, keys, values, rounded, causal)  # type: ignore[no-untyped-call]
            return y
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=grouped)


_FUSED = SDPBackend.FLASH_ATTENTION.value
"""What PyTorch calls its kernel that :class:`_WideAttention` runs, which checks little itself."""


class _WideAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = attend(q, k, v, 0.0, causal, attn_mask=bias)
        ctx.save_for_backward(q, k, v, out, sums, bias)
        ctx.causal = causal
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, bias = ctx.saved_tensors
        wide = [t.float() for t in (d, q, k, v, out)]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, sums, 0.0, ctx.causal, attn_mask=None if bias is None else bias.float()
        )
        return *(g.to(t.dtype) for g, t in zip(found, (q, k, v), strict=True)), None, None
