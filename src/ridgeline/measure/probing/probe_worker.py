"""The measurements of ``ridgeline probe``: each kind of graph operator, timed on the torch twin's own code.

Every kind is timed at a tiny size (its latency) and at sizes of real training (its rate). FLOPs and bytes are counted
as in :mod:`ridgeline.graph`. Inputs rotate through more memory than the caches hold, as in a real step.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.jobs.job import ProbeOptions, Progress, RankContext
from ridgeline.measure.environment import spare_core
from ridgeline.measure.probing.cache_size import cache_bytes
from ridgeline.measure.probing.disk import folder_rate
from ridgeline.measure.probing.gpu_backends import Sizes, backend_rows
from ridgeline.measure.probing.gpu_operators import operator_rows
from ridgeline.measure.probing.probe_serving import serving_costs
from ridgeline.measure.probing.probe_timer import CACHE_BYTES, Timer, Work, affine, rate, steady
from ridgeline.measure.probing.references import reference_decode, reference_step
from ridgeline.nn.kernels.products import choose_products, linear
from ridgeline.nn.kernels.widened import matmul, widened
from ridgeline.nn.model.attention import BACKENDS
from ridgeline.nn.model.loss import token_loss
from ridgeline.nn.model.mask import Mask
from ridgeline.nn.model.mlp import gated
from ridgeline.nn.model.norm import RMSNorm
from ridgeline.nn.model.rotary import rotate
from ridgeline.nn.quant import bcq, nf4
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.quantized import dequantize, quantize
from ridgeline.paths import cache_dir
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.lowbit import FEW_ROWS, GEMM_ROWS
from ridgeline.spec.ring import RING_BYTES

SMALL = (704, 256)
"""Outputs and inputs of a small model's product: large ones are faster, but small models live below them."""

SHARDED = (32, 384, 768, 1024)
"""Widths of the linears whose gathers and reductions are timed: 8 kB to 8 MB of parameters a group."""

TOO_LONG = 0.3
"""Seconds that the forward and the backward of one product may take, beyond the small ones."""


def probe_rank(e: None, options: ProbeOptions, here: RankContext) -> dict[str, Any]:
    """Measure everything on this rank while the other ranks do the same; returns plain data."""
    budget = 0.015 if options.quick else 0.08
    device, ranks, report = here.device, here.ranks, here.report
    timer = Timer(device, budget, ranks)
    if options.serving:
        return {"serving": _serving(timer, device, options.quick, report)}
    peaks: dict[str, float] = {}
    inference = options.inference
    rates = _operators(timer, device, peaks, report, inference)
    report({"stage": "memory"})
    bandwidth = _bandwidth(timer, device)
    if inference and ranks == 1 and device.type == "cpu":
        rates.update(_ring_copies(timer))
    report({"stage": "a reference step"})
    reference = reference_step(timer, device, 6 if options.quick else 12)
    rounds = 2 if options.quick else 4
    decoding = reference_decode(device, rounds) if inference and ranks == 1 and device.type == "cpu" else {}
    rows: list[dict[str, Any]] = []
    backends: list[dict[str, Any]] = []
    if device.type == "cuda" and ranks == 1:
        rows += operator_rows(device, lambda stage: report({"stage": stage}), options.quick)
    if ranks > 1:
        report({"stage": "collectives"})
        rates.update(_collectives(timer, device, ranks, SHARDED[:-1] if options.quick else SHARDED))
    disk = None
    if ranks == 1:
        report({"stage": "disk"})
        disk = folder_rate(cache_dir(), "disk of Ridgeline's cache").model_dump()
    if device.type == "cuda" and ranks == 1:  # last: a library may leave the device in a state without return
        backends += backend_rows(device, Sizes(), lambda stage: report({"stage": stage}))
    return {
        "rates": rates,
        "rows": rows,
        "backends": backends,
        "disk": disk,
        "cache_bytes": cache_bytes() if device.type == "cpu" and ranks == 1 else 0,
        "peak_flops": peaks,
        "memory_bandwidth": bandwidth,
        "reference_step_s": reference,
        "reference_decode_s": decoding,
        "memory_bytes": _memory(device),
        "launch_latency": min(r["latency"] for r in rates.values() if r["latency"] > 0),
        "kind": "gpu" if device.type == "cuda" else "cpu",
        "units": _units(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "torch": torch.__version__,
    }


def _serving(timer: Timer, device: torch.device, quick: bool, report: Progress) -> dict[str, Any]:
    """What serving costs in a process that leaves a core to HTTP."""
    with spare_core():
        rates = _operators(timer, device, {}, report)
        report({"stage": "engine and server"})
        return {"rates": rates, **serving_costs(device, quick)}


def _operators(
    timer: Timer, device: torch.device, peaks: dict[str, float], report: Progress, inference: bool = True
) -> dict[str, dict[str, Any]]:
    """Rates of all operators, or of those of training; ``peaks`` gets the fastest product of each dtype."""
    rates: dict[str, dict[str, Any]] = {}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name, dtype in dtypes.items():
        report({"stage": f"matrix products {name}"})
        rates.update(_gemm(timer, device, name, dtype, peaks, inference))
    if device.type == "cpu" and inference:
        report({"stage": "products with few rows or quantized weights"})
        rates.update(_low(timer, dtypes))
    for name, dtype in dtypes.items():
        report({"stage": f"operators {name}"})
        rates.update(_kinds(timer, device, name, dtype, inference))
    report({"stage": "optimizer"})
    rates.update(_update(timer, device))
    return rates


def _gemm(
    timer: Timer, device: torch.device, name: str, dtype: torch.dtype, peaks: dict[str, float], inference: bool
) -> dict[str, dict[str, Any]]:
    """``inference``: also without autograd, where those products are computed in another way."""
    shapes = [(8, 8, 8), (512, 128, 128), (1024, 256, 256), (1024, 704, 256), (1024, 256, 704), (1024, 2048, 256),
              (1024, 1024, 1024)]  # fmt: skip
    forward: list[tuple[float, float, float]] = []
    backward: list[tuple[float, float, float]] = []
    bare: list[tuple[float, float, float]] = []
    best = took = 0.0
    for m, n, k in shapes:
        w = _linear(device, dtype, name, m, n, k)
        if len(forward) > 2 and timer.any_rank(took * w.flops > TOO_LONG):
            break  # emulated (bf16 on many CPUs): larger products are no faster, and take minutes
        f, b = timer.work(w)
        took = (f + b) / w.flops
        forward.append((w.flops, 0.0, f))
        backward.append((w.flops, 0.0, b / 2))
        if inference and device.type == "cpu" and dtype in widened():
            bare.append((w.flops, 0.0, timer.inference(w)))
        best = max(best, w.flops / f, 2 * w.flops / b)
    peaks[name] = best
    # Fit on training-sized products only: the largest shows the peak, but small models live below it.
    fitted = slice(len(shapes) - 1)
    rates = {f"gemm.forward.{name}": rate(forward[fitted]), f"gemm.backward.{name}": rate(backward[fitted])}
    return rates | ({f"gemm.inference.{name}": rate(bare[fitted])} if bare else {})


def _linear(device: torch.device, dtype: torch.dtype, name: str, m: int, n: int, k: int) -> Work:
    def make() -> tuple[Tensor, ...]:
        return (
            torch.randn(m, k, device=device, dtype=dtype, requires_grad=True),
            torch.randn(n, k, device=device, dtype=dtype, requires_grad=True),
        )

    return Work("gemm", name, make, linear, flops=2.0 * m * n * k)


def _low(timer: Timer, dtypes: dict[str, torch.dtype]) -> dict[str, dict[str, Any]]:
    """Forward products that wait for weights, plain ones and codes; and of codes those with many rows."""
    rates: dict[str, dict[str, Any]] = {}
    makers: dict[str, Callable[[int, int], nn.Module]] = {
        name: functools.partial(_plain, dtype) for name, dtype in dtypes.items()
    }
    makers["int4"] = lambda out, width: PackedLinear(_codes(out, width, 4, 64))
    makers["int8"] = lambda out, width: PackedLinear(_codes(out, width, 8, width))
    with torch.inference_mode():
        for name, make in makers.items():
            dtype = dtypes.get(name, torch.float32)
            few = max(GEMM_ROWS) if name in dtypes else FEW_ROWS
            least = _layers(timer, [make(64, 64)], dtype, 1)[2]
            square, wide, deep = (_copies(make(*shape)) for shape in ((1024, 1024), (4096, 1024), (1024, 4096)))
            for rows in (m for m in GEMM_ROWS if m <= few):
                sizes, calls = zip(*(_calls(x, dtype, rows)[1:] for x in (square, wide, deep)), strict=True)
                less, up, down = zip(sizes, timer.medians(list(calls)), strict=True)
                more = ((2 * up[0] + down[0]) / 3, (2 * up[1] + down[1]) / 3)  # as many as in a layer
                rates[f"gemm_rows{rows}.{name}"] = affine(least, less, more)
            if name not in dtypes:
                rates.update(_expanding(timer, [make(*SMALL)], name, few + 1, least))
    return rates


def _expanding(timer: Timer, layer: list[nn.Module], name: str, few: int, latency: float) -> dict[str, dict[str, Any]]:
    """Products with enough rows that weights are dequantized first: times at two row counts separate the two parts."""
    (less, _, fast), (more, _, slow) = (_layers(timer, layer, torch.float32, rows) for rows in (few, 1024))
    speed = (more - less) / max(slow - fast, 0.1 * slow)
    codes = math.prod(SMALL) * DTYPE_BYTES[name]
    expand = max(fast - latency - less / speed, 0.1 * fast)
    return {f"expand.{name}": rate([(0, 0, latency), (0, codes, latency + expand)]),
            f"gemm_many.{name}": {**rate([(0, 0, latency), (more, 0, slow)]), "flop_rate": speed}}  # fmt: skip


def _plain(dtype: torch.dtype, out: int, width: int) -> nn.Linear:
    layer = nn.Linear(width, out, bias=False, dtype=dtype)
    choose_products(layer)
    return layer


def _codes(out: int, width: int, bits: int, group: int) -> Packed:
    codes = torch.randint(1 << bits, (out, width), dtype=torch.int32).to(torch.uint8)
    return Packed(codes, torch.rand(out, width // group).half(), None, bits, group)


def _copies(layer: nn.Module) -> list[nn.Module]:
    """Enough copies of a layer that weights are read from memory rather than from a cache."""
    size = sum(p.numel() * p.element_size() for p in layer.parameters())
    return [layer, *(copy.deepcopy(layer) for _ in range(int(2 * CACHE_BYTES / size)))]


def _layers(timer: Timer, layers: list[nn.Module], dtype: torch.dtype, rows: int) -> tuple[float, float, float]:
    """(flops, bytes, seconds) of one of equal linear layers on ``rows`` rows."""
    flops, moved, calls = _calls(layers, dtype, rows)
    return flops, moved, timer.median(calls)


def _calls(layers: list[nn.Module], dtype: torch.dtype, rows: int) -> tuple[float, float, list[Callable[[], object]]]:
    """(flops, bytes, calls in turn) of one of equal linear layers on ``rows`` rows."""
    out, width = int(layers[0].out_features), int(layers[0].in_features)  # type: ignore[arg-type]
    x = torch.randn(rows, width, dtype=dtype)
    # Few rows come from the operator before; of many, most have left the caches meanwhile.
    inputs = [x, *(x.clone() for _ in range(min(64, CACHE_BYTES // x.nbytes) if rows > max(GEMM_ROWS) else 0))]
    moved = sum(p.numel() * p.element_size() for p in layers[0].parameters())
    many = max(len(layers), len(inputs))
    calls = [functools.partial(layers[i % len(layers)], inputs[i % len(inputs)]) for i in range(many)]
    return 2.0 * rows * out * width, moved + float(rows * (out + width) * x.element_size()), calls  # type: ignore[return-value]


def _kinds(
    timer: Timer, device: torch.device, name: str, dtype: torch.dtype, inference: bool
) -> dict[str, dict[str, Any]]:
    """Both sizes of every other kind of operator; of those with a backward also in ``inference``, without autograd."""
    out: dict[str, dict[str, Any]] = {}
    sizes = ((1, 4), (4, 256))
    by_kind: dict[str, list[tuple[Work, float, float]]] = {}
    bare: dict[str, list[tuple[float, float, float]]] = {}
    for batch, length in sizes:
        for w in _works(device, name, dtype, batch, length):
            by_kind.setdefault(w.kind, []).append((w, *timer.work(w)))
            if inference and by_kind[w.kind][0][2] > 0:
                bare.setdefault(w.kind, []).append((w.flops, w.bytes, timer.inference(w)))
    for kind, measured in by_kind.items():
        forward = [(w.flops, w.bytes, f) for w, f, _ in measured]
        backward = [
            (w.back_flops / w.back_calls, w.back_bytes / w.back_calls, b / w.back_calls) for w, _, b in measured
        ]
        if all(b > 0 for _, _, b in measured):
            out[f"{kind}.forward.{name}"] = rate(forward)
            out[f"{kind}.backward.{name}"] = rate(backward)
        else:
            out[f"{kind}.{name}"] = rate(forward)  # the same work in either direction
    return out | {f"{kind}.inference.{name}": rate(points) for kind, points in bare.items()}


def _works(device: torch.device, name: str, dtype: torch.dtype, batch: int, length: int) -> list[Work]:
    h, f, heads, d, vocab = 256, 704, 8, 32, 4096
    t, w = batch * length, torch.empty((), dtype=dtype).element_size()
    scores = float(batch * heads * length * length)

    def random(*shape: int, grad: bool = True) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)

    norm = RMSNorm(h, 1e-5).to(device, dtype)
    norm.weight.requires_grad_(False)
    angles = torch.randn(length, 1, d, device=device, dtype=dtype)
    bias = torch.zeros(length, length, device=device, dtype=dtype)
    flash = BACKENDS["flash"].function
    qkv = lambda: tuple(random(batch, length, heads, d).transpose(1, 2).detach().requires_grad_() for _ in range(3))  # noqa: E731
    elements = float(batch * heads * length * d)
    bmm_bytes = (2 * elements + scores) * w
    works = [
        Work("bmm", name, lambda: (random(batch * heads, length, d), random(batch * heads, d, length)), matmul,
             2 * scores * d, bmm_bytes, 4 * scores * d, 2 * bmm_bytes),
        Work("mask", name, lambda: (random(batch, heads, length, length, grad=False),), lambda s: s + bias,
             0, 2 * scores * w),
        Work("softmax", name, lambda: (random(batch, heads, length, length),), lambda s: _softmax(s),
             0, 2 * scores * w, 0, 3 * scores * w),
        Work("attention", name, qkv, lambda q, k, v: flash(q, k, v, Mask(None, True)),
             4 * scores * d, 4 * elements * w, 10 * scores * d, 8 * elements * w),
        Work("norm", name, lambda: (random(batch, length, h),), norm, 0, 2 * t * h * w, 0, 3 * t * h * w),
        Work("activation", name, lambda: (random(t, f), random(t, f)), lambda g, u: gated("silu", g, u),
             0, 3 * t * f * w, 0, 5 * t * f * w),
        Work("rope", name, lambda: (random(batch, length, heads, d),), lambda x: rotate(x, (angles, angles)),
             0, 2 * t * h * w, 0, 2 * t * h * w),
        Work("residual", name, lambda: (random(t, h, grad=False), random(t, h, grad=False)), torch.add,
             0, 3 * t * h * w),
        Work("copy", name, lambda: (random(t, h, grad=False),), torch.clone, 0, 2 * t * h * w),
        Work("reduce", name, lambda: (random(t, h, grad=False),), lambda x: x.sum(0), 0, t * h * w),
    ]  # fmt: skip
    if name == "fp32":
        ids = torch.randint(vocab, (t,), device=device)
        labels = torch.randint(vocab, (1, t), device=device)
        head = nn.Identity()
        works += [
            Work("embedding", name, lambda: (random(vocab, h),), lambda e: F.embedding(ids, e),
                 0, 2.0 * t * h * w, 0, (vocab * h + 3.0 * t * h) * w),
            Work("loss", name, lambda: (random(1, t, vocab),), lambda x: token_loss(x * 1.0, head, labels)[0],
                 0, 8.0 * t * vocab * w, 0, 2.0 * t * vocab * w),
        ]  # fmt: skip
    return works


def _softmax(s: Tensor) -> Tensor:
    """As the unfused attention does it: fp32 statistics, result in the input's dtype."""
    return s.softmax(-1, dtype=torch.float32).to(s.dtype)


def _update(timer: Timer, device: torch.device) -> dict[str, dict[str, Any]]:
    """AdamW, clipping, casts and dequantization: per element of a parameter."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for rows in (1, 4096):
        weight = [nn.Parameter(torch.randn(rows, 256, device=device)) for _ in range(8)]
        for p in weight:
            p.grad = torch.randn_like(p)
        optimizer = torch.optim.AdamW(weight, lr=1e-9, fused=True)
        n = float(sum(p.numel() for p in weight))
        points.setdefault("optimizer.fp32", []).append((0, 28 * n, timer.median([optimizer.step])))

        def clip(parameters: list[nn.Parameter] = weight) -> Tensor:
            return nn.utils.clip_grad_norm_(parameters, 1e9)

        points.setdefault("clip.fp32", []).append((0, 12 * n, timer.median([clip])))
        one = [torch.randn(max(1, rows // 4), 256, device=device) for _ in range(32)]
        low = [w.bfloat16() for w in one]
        size = float(one[0].numel())
        points.setdefault("cast.forward.bf16", []).append((0, 6 * size, timer.median([w.bfloat16 for w in one])))
        points.setdefault("cast.backward.bf16", []).append((0, 6 * size, timer.median([w.float for w in low])))
        for bits in (8, 4):
            codes, scale = quantize(one[0], bits)
            fns = [lambda c=codes.clone(), s=scale.clone(): dequantize(c, s) for _ in one]
            points.setdefault(f"cast.int{bits}", []).append((0, (bits / 8 + 4) * size, timer.median(fns)))
        for name, moved, layer in (
            ("nf4", nf4.BYTES, nf4.NF4Linear(_with(one[0]))),
            ("binary", bcq.moved(4), bcq.BinaryLinear(_with(one[0]), 4, rounds=0)),
        ):
            layers = [layer, *(copy.deepcopy(layer) for _ in one[1:])]
            points.setdefault(f"cast.{name}", []).append((0, moved * size, timer.median([x.dense for x in layers])))
    return {k: rate(v) for k, v in points.items()}


def _with(weight: Tensor) -> nn.Linear:
    """A linear layer with this weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _bandwidth(timer: Timer, device: torch.device) -> float:
    a = torch.empty(32 * 2**20, device=device).normal_()
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / timer.median([lambda: b.copy_(a)])


def _ring_copies(timer: Timer) -> dict[str, dict[str, Any]]:
    """Copies of weights that are in no cache into rings of some sizes, in bytes of weights."""
    piece = min(RING_BYTES)
    source = torch.zeros(2 * max(RING_BYTES) // piece, piece, dtype=torch.uint8)
    least = timer.median([functools.partial(torch.zeros(64).copy_, torch.zeros(64))])
    rates = {}
    for size in RING_BYTES:
        ring = torch.zeros(size // piece, piece, dtype=torch.uint8)
        calls = [functools.partial(ring[i % len(ring)].copy_, part) for i, part in enumerate(source)]
        rates[f"copy_ring{size >> 20}"] = rate([(0, 0, least), (0, piece, timer.median(calls))])
    return rates


def _collectives(timer: Timer, device: torch.device, ranks: int, widths: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Loopback collectives: seconds against bytes of the full buffer on one rank.

    Gathers and reductions of sharded parameters are timed as ``fully_shard`` itself makes them (what it adds to the
    forward and to the backward of the same linears): its copies and hooks, and the cores that moving bytes takes away
    from computing, cost more than the bare collective.
    """
    points = []
    for n in (ranks * 64, 2**18, 2**20, 2**21):
        full = torch.randn(n, device=device)

        def call(full: Tensor = full) -> None:
            dist.all_reduce(full)
            timer.sync()

        times = []
        for _ in range(10):  # a fixed number: ranks must agree on how many collectives there are
            timer.together()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        points.append((0.0, 4.0 * n, steady(times)))
    gather, reduce = [], []
    for width in widths:
        plain, sharded = (_linears_step(timer, device, ranks, width, shard) for shard in (False, True))
        size = 4.0 * 2 * width * width
        gather.append((0.0, size, max(1e-5, sharded[0] - plain[0])))
        reduce.append((0.0, size, max(1e-5, sharded[1] - plain[1])))
    return {"all_reduce.fp32": rate(points), "all_gather.fp32": rate(gather), "reduce_scatter.fp32": rate(reduce)}


def _linears_step(
    timer: Timer, device: torch.device, ranks: int, width: int, shard: bool, groups: int = 6
) -> tuple[float, float]:
    """Seconds of forward and of backward of one group of two linears, sharded over the ranks or not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    linears = [[nn.Linear(width, width, bias=False, device=device) for _ in range(2)] for _ in range(groups)]
    model = nn.Sequential(*(nn.Sequential(*pair) for pair in linears))
    if shard:
        mesh = init_device_mesh(device.type, (ranks,))
        for group in model:
            fully_shard(group, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    x = torch.randn(256, width, device=device)
    forward, backward = [], []
    for _ in range(8):
        timer.together()
        start = time.perf_counter()
        y = model(x).sum()
        timer.sync()
        middle = time.perf_counter()
        y.backward()
        timer.sync()
        backward.append(time.perf_counter() - middle)
        forward.append(middle - start)
        model.zero_grad(set_to_none=True)
    return steady(forward) / groups, steady(backward) / groups


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    import psutil

    return float(psutil.virtual_memory().total)


def _units(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    from ridgeline.measure.environment import cores

    return cores()
