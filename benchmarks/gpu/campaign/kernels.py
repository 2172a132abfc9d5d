"""Each kernel of ours against the roof, beside plain PyTorch's operators, with its error against fp32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from campaign import products
from campaign.cells import Cell, Figures, Setting
from campaign.probe import rates, said
from campaign.products import GROUP, Calls, randn
from ridgeline.graph.graph import Op
from ridgeline.measure.probing.gpu_operators import timed
from ridgeline.nn.kernels import functions
from ridgeline.nn.memory.step_pages import make_pages
from ridgeline.nn.model.attention import alibi_slopes, flash_attention, naive_attention
from ridgeline.nn.model.mask import Mask, ScoreChanges
from ridgeline.nn.model.spans import make_spans, span_attention
from ridgeline.nn.quant.codec import E4M3, encode, layouts, peak_of, scale_for
from ridgeline.nn.quant.quantized_kv import KINDS
from ridgeline.predict.operators.codes import CODES
from ridgeline.spec.lowbit import MANY_ROWS

ERROR = 2e-2
"""Largest relative error of results in bf16 (:func:`error`)."""


def cells(setting: Setting) -> list[Cell]:
    """Norms, activations, loss, optimizer; products with codes; attention over pages; fp8."""
    rows, n, wide, vocabulary = (64, 64, 128, 512) if setting.small else (16384, 4096, 14336, 128256)
    dtype = torch.float32 if setting.small else torch.bfloat16
    size = dtype.itemsize
    name = "fp32" if setting.small else "bf16"
    found: list[tuple[str, Op, Callable[[], Calls]]] = []

    def line(label: str, kind: str, moved: float, make: Callable[..., Calls], *sizes: object) -> None:
        found.append((label, _op(kind, moved, name), partial(make, setting, *sizes)))

    line(f"add and RMS norm, {rows}x{n}", "norm", 4.0 * rows * n * size, _norm, rows, n, dtype)
    line(f"SwiGLU, {rows}x{wide}", "activation", 3.0 * rows * wide * size, _swiglu, rows, wide, dtype)
    line(f"rotary embedding, {rows} rows of {n}", "rope", 2.0 * rows * n * size, _rotary, rows, n, dtype)
    few = rows // 4
    line(f"cross entropy with gradient, {few}x{vocabulary}", "loss", 2.0 * few * vocabulary * size, _entropy, few,
         vocabulary, dtype)  # fmt: skip
    line(f"AdamW of {rows * n}", "optimizer", 30.0 * rows * n, _adamw, rows * n)
    shapes = ((n, n),) if setting.small else ((4096, 4096), (14336, 4096), (4096, 14336))
    for (out, width), bits in product(shapes, (8, 4) if setting.small else (8, 4, 3, 2)):
        for m in (1, 16) if setting.small else (1, 16, 64, 512, 4096):
            held = out * width * bits / 8 + 2 * out * width / GROUP
            op = Op("product", "", "gemm", flops=2.0 * m * out * width, bytes=held + (m * width + m * out) * size,
                    dtype=name, shape=(m, out, width), weight_dtype=f"int{bits}",
                    kernel=_kernel(f"int{bits}", m))  # fmt: skip
            label = f"int{bits} product, {m} rows, {out}x{width}"
            found.append((label, op, partial(products.codes, setting, m, out, width, bits, dtype)))
    if setting.kind == "cuda":
        found += _on_gpus(setting)
    return [
        Cell(label, partial(measured, setting, op, make), partial(said, setting, op), goals={"error": ("<=", ERROR)})
        for label, op, make in found
    ]


def _on_gpus(setting: Setting) -> list[tuple[str, Op, Callable[[], Calls]]]:
    """What only a GPU has kernels for."""
    found: list[tuple[str, Op, Callable[[], Calls]]] = []
    for batch, heads, groups, d, length, kind, new in (
        (1, 32, 8, 128, 8192, "", 1), (64, 32, 8, 128, 4096, "", 1), (16, 64, 8, 128, 8192, "", 1),
        (64, 32, 8, 128, 4096, "int8", 1), (64, 32, 8, 128, 4096, "int4", 1), (64, 32, 8, 128, 4096, "fp8", 1),
        (64, 32, 8, 128, 4096, "", 5), (4, 32, 8, 128, 4096, "", 1024),
    ):  # fmt: skip
        bits = {"": 16, "int8": 8.25, "fp8": 8.25, "int4": 4.5}[kind]
        cached = 2.0 * batch * groups * length * d * bits / 8
        pairs = new * length - new * (new - 1) / 2
        op = Op("attention", "", "attention", flops=4.0 * batch * heads * pairs * d,
                bytes=cached + 4.0 * batch * new * heads * d, dtype="bf16",
                shape=(batch, heads, groups, new, length, d), kv_dtype=kind, causal=new > 1)  # fmt: skip
        label = f"paged attention, {batch} of {length} tokens, {heads}/{groups} heads of {d}"
        label += f", {kind} cache" * bool(kind) + f", {new} new" * (new > 1)
        found.append((label, op, partial(_paged, setting, op)))
    for (shape, cap), backward in product((((4, 32, 32, 2048, 2048, 128), 0.0), ((1, 16, 8, 4096, 4096, 256), 50.0)),
                                          (False, True)):  # fmt: skip
        batch, heads, groups, length, _, d = shape
        op = Op("attention", "", "attention", "backward" if backward else "forward",
                (10.0 if backward else 4.0) * batch * heads * length * (length + 1) / 2 * d,
                (8.0 if backward else 4.0) * batch * length * (heads + groups) * d, "bf16", shape,
                causal=True)  # fmt: skip
        label = f"training attention{' backward' * backward}, {'soft caps' if cap else 'ALiBi'}, "
        label += f"{heads}/{groups} heads of {d}"
        found.append((label, op, partial(_spans, setting, op, cap)))
    for (rows, width), rowwise in product(((16384, 4096), (4096, 14336)), (False, True)):
        moved = (8.0 if rowwise else 6.0) * rows * width
        label = f"fp8 codes, also transposed{', by rows' if rowwise else ''}, {rows}x{width}"
        found.append((label, _op("cast", moved, "bf16"), partial(_float8, setting, rows, width, rowwise)))
    for m, (out, width) in product((1, 8, 64), ((28672, 4096), (4096, 14336), (6144, 4096), (16384, 2048))):
        op = Op("product", "", "gemm", flops=2.0 * m * out * width, bytes=2.0 * (out * width + m * width + m * out),
                dtype="bf16", shape=(m, out, width))  # fmt: skip
        found.append((f"product of {m} row{'s' * (m > 1)}, {out}x{width} bf16", op,
                      partial(products.rows, setting, m, out, width)))  # fmt: skip
    for m, (out, width) in product((2, 8, 16, 64), ((28672, 4096), (4096, 14336))):
        op = Op("product", "", "gemm", flops=2.0 * m * out * width, bytes=out * width + 2.0 * m * (width + out),
                dtype="bf16", shape=(m, out, width), weight_dtype="fp8", kernel=_kernel("fp8", m))  # fmt: skip
        found.append(
            (f"fp8 product, {m} rows, {out}x{width}", op, partial(products.float8_rows, setting, m, out, width))
        )
    for m, adapters in ((1, 1), (8, 8), (64, 16), (512, 1), (2048, 16)):
        out, width, rank = 28672, 4096, 16
        op = _op("copy", 2.0 * (adapters * rank * (2 * width + out) + m * (width + 2 * out)), "bf16")
        label = f"LoRA of rank {rank}, {m} rows of {adapters} adapters, gate and up of 8B"
        found.append((label, op, partial(products.adapters, setting, m, adapters, rank)))
    for m, (out, width) in product((1, 8, 64, 512), ((14336, 4096), (2880, 2880))):
        op = Op("product", "", "gemm", flops=2.0 * m * out * width,
                bytes=out * width * 17 / 32 + 2.0 * m * (width + out), dtype="bf16", shape=(m, out, width),
                weight_dtype="mxfp4", kernel=_kernel("mxfp4", m))  # fmt: skip
        found.append((f"MXFP4 product, {m} rows, {out}x{width}", op, partial(products.mxfp4, setting, m, out, width)))
    ternary = Op("product", "", "gemm", flops=2.0 * 4096 * 4096, bytes=4096 * 4096 * 0.1, dtype="bf16",
                 shape=(1, 4096, 4096))  # fmt: skip
    found.append(("ternary product, 1 row, 4096x4096", ternary, partial(products.ternary, 4096, 4096)))
    loss = Op("loss", "", "gemm", flops=6.0 * 16384 * 128256 * 2048, bytes=6.0 * 128256 * 2048, dtype="bf16",
              shape=(16384, 128256, 3 * 2048))  # fmt: skip
    found.append(("head and loss in chunks, 16384x2048 into 128256", loss, partial(_chunked, 16384, 2048, 128256)))
    return found


def _kernel(codes: str, rows: int) -> str:
    return CODES + codes if rows <= MANY_ROWS else ""


def _op(kind: str, moved: float, dtype: str) -> Op:
    return Op(kind, "", kind, bytes=moved, dtype=dtype)


def error(found: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def measured(setting: Setting, op: Op, make: Callable[[], Calls]) -> Figures:
    """Our kernel and PyTorch's operators, timed in one run."""
    torch.manual_seed(0)
    calls, device = make(), torch.device(setting.kind)
    with torch.no_grad():
        wrong = error(calls.ours[0](), calls.right())
    ours, plain = timed(device, calls.ours), timed(device, calls.plain)
    found = rates(setting, op, ours) | {"plain_seconds": plain, "speedup": plain / ours, "error": wrong}
    for name, call in calls.others.items():
        try:
            with torch.no_grad():
                found[f"{name}_error"] = error(call(), calls.right())
            found[f"{name}_seconds"] = timed(device, [call])
        except Exception as e:  # whatever a library that nobody has tried here may raise
            found[f"{name}_failed"] = f"{type(e).__name__}: {e}".splitlines()[0][:300]
    return found


def _norm(setting: Setting, rows: int, n: int, dtype: torch.dtype) -> Calls:
    sets = [(randn(setting, rows, n, dtype=dtype), randn(setting, rows, n, dtype=dtype)) for _ in range(2)]
    w = randn(setting, n, dtype=dtype)
    x, u = sets[0]
    return Calls(
        [partial(lambda a, b: functions.add_norm(a, b, w, None, 1e-5, False, dtype)[1], a, b) for a, b in sets],
        [partial(lambda a, b: F.rms_norm(a + b, (n,), w, 1e-5), a, b) for a, b in sets],
        lambda: F.rms_norm((x.float() + u.float()), (n,), w.float(), 1e-5),
    )


def _swiglu(setting: Setting, rows: int, n: int, dtype: torch.dtype) -> Calls:
    x = randn(setting, rows, 2 * n, dtype=dtype)

    def plain(t: Tensor) -> Tensor:
        return F.silu(t[:, :n]) * t[:, n:]

    return Calls([lambda: functions.bias_activation(x, None, "silu")], [lambda: plain(x)], lambda: plain(x.float()))


def _rotary(setting: Setting, rows: int, n: int, dtype: torch.dtype) -> Calls:
    d = 128 if n >= 128 else 32
    x = randn(setting, rows, n, dtype=dtype)
    angle = torch.rand(rows, d // 2, device=setting.kind)
    cosine = torch.cat([angle.cos()] * 2, 1)[:, None].to(dtype)
    sine = torch.cat([-angle.sin(), angle.sin()], 1)[:, None].to(dtype)

    def plain(t: Tensor) -> Tensor:
        heads = t.view(rows, -1, d)
        turned = torch.cat([heads[..., d // 2 :], heads[..., : d // 2]], -1)
        return (heads * cosine.to(t.dtype) + turned * sine.to(t.dtype)).view(rows, n)

    right = plain(x.float())
    scratch = x.clone()
    first = [True]

    def ours() -> Tensor:  # in place: the first call is checked
        if first[0]:
            first[0] = False
            return functions.rotate_(x.clone(), cosine, sine, n // d, d)
        return functions.rotate_(scratch, cosine, sine, n // d, d)

    def liger(function: Any) -> Tensor:  # of queries and keys apart, which it first copies
        q, k = x.view(rows, -1, d).transpose(0, 1)[None].chunk(2, 1)
        tables = (cosine[None, :, 0], torch.cat([angle.sin()] * 2, 1)[None].to(dtype))
        turned = torch.cat(function.apply(q, k, *tables), 1)
        return turned[0].transpose(0, 1).reshape(rows, n)

    others = {}
    if importlib.util.find_spec("liger_kernel") is not None and setting.kind == "cuda":
        from liger_kernel.ops import LigerRopeFunction

        others["liger"] = partial(liger, LigerRopeFunction)
    return Calls([ours], [lambda: plain(x)], lambda: right, others)


def _entropy(setting: Setting, rows: int, vocabulary: int, dtype: torch.dtype) -> Calls:
    x = randn(setting, rows, vocabulary, dtype=dtype)
    labels = torch.randint(0, vocabulary, (rows,), device=setting.kind)
    right = F.cross_entropy(x.float(), labels, reduction="sum")

    def plain() -> Tensor:
        given = x.detach().requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(given.float(), labels, reduction="sum")
            return torch.autograd.grad(loss, given)[0]

    # Overwrites its logits by their gradient: later calls read that, which takes as long.
    return Calls([lambda: functions.loss_and_gradient(x, labels, True)], [plain], lambda: right)


def _adamw(setting: Setting, n: int) -> Calls:
    p, g, m, v = (randn(setting, n, dtype=torch.float32) for _ in range(4))
    v, low = v.abs_(), torch.empty(n, dtype=torch.bfloat16, device=setting.kind)
    plain = torch.nn.Parameter(p.clone())
    plain.grad = g
    optimizer = torch.optim.AdamW([plain], lr=1e-3, weight_decay=0.1, fused=True, capturable=setting.kind == "cuda")
    m1, v1 = 0.9 * m.double() + 0.1 * g.double(), 0.999 * v.double() + 0.001 * g.double() ** 2
    step = 7
    right = p.double() * (1 - 1e-4) - 1e-3 / (1 - 0.9**step) * m1 / (v1.sqrt() / (1 - 0.999**step) ** 0.5 + 1e-8)

    def ours() -> Tensor:
        functions.adamw_(low, p, g, m, v, 1e-3, 0.9, 0.999, 1e-8, 0.1, step)
        return p

    def theirs() -> Tensor:
        optimizer.step()
        return plain

    return Calls([ours], [theirs], lambda: right)


def _float8(setting: Setting, rows: int, width: int, rowwise: bool) -> Calls:
    sets = [randn(setting, rows, width, dtype=torch.bfloat16) for _ in range(2)]
    first = [True]

    def ours(x: Tensor) -> Tensor:  # the first call is checked
        codes = layouts(x, E4M3, rowwise)
        assert codes.transposed is not None
        if first[0]:
            first[0] = False
            return codes.transposed.float().mul_(codes.transposed_inverse_scale).t()
        return codes.rows

    def plain(x: Tensor) -> Tensor:
        scales = [scale_for(x.abs().amax(dim, True), E4M3) if rowwise else scale_for(peak_of(x), E4M3)
                   for dim in ((1, 0) if rowwise else (0,))]  # fmt: skip
        encode(x, scales[0], E4M3)
        return encode(x, scales[-1], E4M3).t().contiguous()

    def right() -> Tensor:  # by PyTorch's operators on the CPU
        codes = layouts(sets[0].cpu(), E4M3, rowwise)
        assert codes.transposed is not None
        return codes.transposed.float().mul_(codes.transposed_inverse_scale).t().to(setting.kind)

    return Calls([partial(ours, x) for x in sets], [partial(plain, x) for x in sets], right)


def _paged(setting: Setting, op: Op) -> Calls:
    from ridgeline.nn.kernels.paged_attention import paged_attention

    batch, heads, groups, new, length, d = op.shape
    device, kind, blocks = torch.device(setting.kind), op.kv_dtype, length // 16
    k, v = (torch.randn(1, groups, batch * length, d, device=device, dtype=torch.bfloat16) for _ in range(2))
    stores: list[Any] = []
    for held in (k, v):
        if kind:
            codes = KINDS[kind](tuple(held.shape), device)
            codes.write(torch.arange(batch * length, device=device), held)
            stores.append(codes)
        else:
            stores.append(held)
    order = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    pages = make_pages(order, lengths, [new] * batch, 16, heads // groups, d, kind)
    q = torch.randn(batch * new, heads, d, device=device, dtype=torch.bfloat16)
    slots = (order.long()[:, :, None] * 16 + torch.arange(16, device=device)).view(batch, length)

    def plain(wide: torch.dtype) -> Tensor:
        read = [s if isinstance(s, Tensor) else s.read(slice(0, batch * length), torch.bfloat16) for s in stores]
        keys, values = (t[0][:, slots].transpose(0, 1).to(wide) for t in read)  # [batch, groups, length, d]
        query = q.view(batch, new, heads, d).transpose(1, 2).to(wide)
        at = torch.arange(length, device=device)
        seen = at <= at[-new:, None]
        out = F.scaled_dot_product_attention(query, keys, values, seen, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch * new, heads, d)

    return Calls([lambda: paged_attention(q, stores[0], stores[1], pages, 0)], [lambda: plain(torch.bfloat16)],
                 lambda: plain(torch.float32))  # fmt: skip


def _spans(setting: Setting, op: Op, cap: float, dtype: torch.dtype = torch.bfloat16) -> Calls:
    """Beside PyTorch's with scores or their bias in memory; of the backward pass, the gradient of queries."""
    batch, heads, groups, length, _, d = op.shape
    device = torch.device(setting.kind)
    changes = ScoreChanges(cap, None, None) if cap else ScoreChanges(None, alibi_slopes(heads), None)
    given = [randn(setting, batch, length, n, d, dtype=dtype).transpose(1, 2) for n in (heads, groups, groups)]
    grad = torch.randn_like(given[0])
    spans = make_spans(batch, length, None, True, 0, device)
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    bias = torch.zeros(length, length, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min / 2)
    masked = Mask(bias, False, changes=changes, kept={})

    def call(wide: torch.dtype, attend: Callable[..., Tensor]) -> Callable[[], Tensor]:
        q, k, v = (t.detach().to(wide).requires_grad_() for t in given)
        if op.direction == "forward":
            return lambda: attend(q.detach(), k.detach(), v.detach())
        with torch.enable_grad():
            out = attend(q, k, v)
        return lambda: torch.autograd.grad(out, [q, k, v], grad.to(wide), retain_graph=True)[0]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return span_attention(q, k, v, spans, changes)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = naive_attention if cap else flash_attention
        return attend(q, k, v, masked)

    def right() -> Tensor:
        return call(torch.float32, lambda q, k, v: naive_attention(q, k, v, Mask(bias, False, changes=changes)))()

    return Calls([call(dtype, ours)], [call(dtype, plain)], right)


def _chunked(rows: int, hidden: int, vocabulary: int) -> Calls:
    head = torch.randn(vocabulary, hidden, device="cuda").mul_(hidden**-0.5).requires_grad_()
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), device="cuda")

    def ours() -> Tensor:
        with torch.enable_grad():
            loss = functions.linear_loss(x, head, None, labels, 4096, torch.bfloat16)
            return torch.autograd.grad(loss, [x, head])[0]

    def plain() -> Tensor:
        with torch.enable_grad():
            loss = F.cross_entropy(F.linear(x, head.bfloat16()).float(), labels, reduction="sum")
            return torch.autograd.grad(loss, [x, head])[0]

    return Calls([ours], [plain], plain)
