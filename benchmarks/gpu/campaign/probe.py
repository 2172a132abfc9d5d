"""The device itself: products by dtype, memory, attention, copies and collectives, beside what its data sheet says of
them; and `ridgeline probe` as a whole, with the back ends of operators that it compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from campaign.cells import Cell, Figures, Setting
from ridgeline.graph.graph import Op
from ridgeline.jobs.job import LaunchJob, ProbeOptions, SweepOptions
from ridgeline.jobs.launch import run_job
from ridgeline.measure.probing.gpu_operators import timed
from ridgeline.measure.probing.probe import device_of
from ridgeline.nn.quant.codec import E4M3
from ridgeline.predict.operators.kernel import op_time, roof_seconds
from ridgeline.spec.backends import order
from ridgeline.spec.device import Cluster
from ridgeline.study.operators import Operator, operator_metrics

COLLECTIVES: tuple[Operator, ...] = ("all_reduce", "all_gather", "reduce_scatter")
PROBE = 400.0
"""Seconds that `ridgeline probe` may take."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32,
          "int8": torch.int8, "fp8": E4M3}  # fmt: skip


def cells(setting: Setting) -> list[Cell]:
    """Products, copies on the device and over the host's link, attention of a prompt, collectives, the probe."""
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
    found += _collectives(setting)
    found.append(Cell("ridgeline probe", partial(probed, setting), limit=PROBE))
    return found


def _collectives(setting: Setting) -> list[Cell]:
    """Among all GPUs of the machine, if there are several; on a CPU among two processes."""
    ranks = torch.cuda.device_count() if setting.kind == "cuda" else 2
    sizes = (1 << 12, 1 << 20) if setting.small else (1 << 16, 1 << 22, 1 << 28)
    return [] if ranks < 2 else [
        Cell(f"collectives of {size >> 10} KiB over {ranks} ranks", partial(gathered, ranks, size),
             partial(gathered_said, setting, ranks, size))
        for size in sizes
    ]  # fmt: skip


def gathered_said(setting: Setting, ranks: int, size: int) -> Figures:
    """Seconds of each collective of a buffer of ``size`` bytes."""
    device = setting.device
    cluster = Cluster(device=device.shared_by(ranks), devices_per_node=ranks)
    axes = {"bytes": size, "ranks": ranks}
    return {f"{name}_s": operator_metrics(name, axes, cluster)["operator_s"] for name in COLLECTIVES}


def gathered(ranks: int, size: int) -> Figures:
    """The same, measured by the ranks of one job."""
    found = run_job(LaunchJob("sweep", None, SweepOptions(sizes=[size]), ranks=ranks), None, timeout=110)
    return {f"{name}_s": points[0][1] for name, points in found["seconds"].items()}


def probed(setting: Setting) -> Figures:
    """What `ridgeline probe --quick` runs, without keeping the profile: its time, what it found, and the back ends of
    operators that it would take, with those that failed."""
    options = ProbeOptions(quick=True, inference=not setting.small)
    start = time.perf_counter()
    found = run_job(LaunchJob("probe", None, options, ranks=1), None, timeout=PROBE - 10)
    took = time.perf_counter() - start
    device, rows = device_of({1: found}), found["backends"]
    return {
        "probe_s": took, "flops_per_s": max(found["peak_flops"].values()), "bytes_per_s": found["memory_bandwidth"],
        "back_ends_taken": [f"{operator}: {order(operator, held)[0]}" for operator, held in device.kernels.items()],
        "back_ends": [f"{r['operator']}, {r['backend']}: {1e3 * r['seconds']:.3g} ms, error {r['error']:.2g}"
                      for r in rows if "failed" not in r],
        "back_ends_failed": [f"{r['operator']}, {r['backend']}: {r['failed']}" for r in rows if "failed" in r],
    }  # fmt: skip


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
