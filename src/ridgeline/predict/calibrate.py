"""Calibration: fits the constants of a device to measured times of operators and collectives.

Each family of constants (GEMM by operand width, attention by kernel, collectives) is fitted separately, by least
squares on the logarithm of predicted ÷ measured with a soft bound on outliers and a weak regularization towards the
starting constants, so that constants that the samples do not determine stay where they were. NumPy and SciPy are
imported when it runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from ridgeline.graph.graph import Op
from ridgeline.predict.machine import Machine
from ridgeline.predict.operators.attention_time import decode, decode_kernel, is_decode, prefill
from ridgeline.predict.operators.collective_time import algorithm_time, path
from ridgeline.predict.operators.gemm import quantize_time, tiled
from ridgeline.spec.device import DTYPE_BYTES, Device
from ridgeline.spec.efficiency import Efficiency, PrefillConstants

C = TypeVar("C", bound=BaseModel)
_PULL = 0.01
"""Weight of the regularization: a factor of e away costs as much as a 1 % error of every sample."""
_SOFT = 0.1
"""Relative error beyond which a sample's loss is linear instead of quadratic."""
_MOST_ROWS = 800


@dataclass(frozen=True)
class TimedSample:
    """One measured sample: the operators that ran, in order, and their total seconds."""

    ops: tuple[Op, ...]
    seconds: float


@dataclass
class Fit:
    """What calibration did to one family of constants: mean absolute relative error before and after."""

    family: str
    rows: int
    before: float
    after: float


@dataclass
class Calibrated:
    """The fitted constants and the result for each family."""

    efficiency: Efficiency
    fits: list[Fit] = field(default_factory=list)

    def on(self, device: Device) -> Device:
        """``device`` with these constants as its own."""
        return device.model_copy(update={"efficiency": self.efficiency})


def calibrate(
    samples: Iterable[TimedSample], device: Device, start: Efficiency | None = None, source: str = "measured profile"
) -> Calibrated:
    """Fit the constants of ``device`` to ``samples``; families without enough samples keep those of ``start``.

    ``start`` defaults to the device's own constants or its architecture's.
    """
    base = start or Machine(device).efficiency
    if device.clock:
        base = _at_clock(base, device.clock)
    m = Machine(device, base)
    families: dict[tuple[str, str], list[TimedSample]] = {}
    for sample in samples:
        families.setdefault(family_of(sample.ops[-1]), []).append(sample)
    fitted: set[tuple[str, str]] = set()
    out = Calibrated(base)
    update: dict[str, Any] = {"source": source, "fitted_on": [device.name], "spread": dict(base.spread)}
    update["data"] = f"Fitted on {sum(map(len, families.values()))} measured rows of {device.name}."
    errors: dict[str, list[float]] = {}
    for (kind, key), rows in sorted(families.items(), key=lambda f: ("fp8" in f[0][1], f[0])):  # 16 bits before 8
        table, wide = update.get(kind, getattr(base, kind)), _wide(key)
        old = (table.get(key) or table.get(wide) or next(iter(table.values()))) if key else table
        names = _free(old)
        if key != wide and (kind, wide) in fitted:  # the same processor: only constants of the width are free
            names = [n for n in names if n in _OF_WIDTH[kind]]
            old = table[wide].model_copy(update={n: getattr(old, n) for n in (*names, *_KERNELS[kind])})
        if len(rows) < 2 * len(names):
            continue
        if kind in ("gemm", "prefill"):
            old = _referred(old, m, rows[0].ops[-1].dtype)
        new = _fit(old, rows, m, predict := _PREDICT[kind], names)
        before, after = _errors(old, rows, m, predict), _errors(new, rows, m, predict)
        out.fits.append(Fit(f"{kind} {key}".strip(), len(rows), _mean(before), _mean(after)))
        fitted.add((kind, key))
        errors.setdefault(kind, []).extend(after)
        if key:
            update[kind] = {**table, key: new}
        else:
            update[kind] = new
    for kind, found in errors.items():
        update["spread"][kind] = round(sorted(found)[int(0.68 * len(found))], 3)
    out.efficiency = base.model_copy(update=update)
    return out


def _referred(c: Any, m: Machine, dtype: str) -> Any:
    """``c`` with the datasheet figures of this device that its constants will be relative to."""
    if isinstance(c, PrefillConstants):
        peak = m.peak("fp8" if c.narrow else "bf16")
        return c.model_copy(update={"tensor_rate": float(f"{peak / m.units / m.clock:.4g}")})
    return c.model_copy(update={"power": float(f"{m.device.watts / m.peak(dtype):.4g}")}) if m.device.watts else c


def family_of(op: Op) -> tuple[str, str]:
    """(field of :class:`Efficiency`, key in it) for the constants that time an operator."""
    if op.kind == "gemm":
        return "gemm", "fp8" if DTYPE_BYTES[op.dtype] < 2 else "fp32" if DTYPE_BYTES[op.dtype] > 2 else "bf16"
    if op.kind != "attention":
        return "collective", ""
    _, heads, kv_heads, q_len, kv_len, _ = op.shape
    narrow = ".fp8" if DTYPE_BYTES[op.kv_dtype or op.dtype] < 2 else ""
    library = op.kernel or "flash"
    if is_decode(q_len, kv_len):
        return "decode", decode_kernel(library, heads, kv_heads) + narrow
    return "prefill", library + narrow


def _wide(key: str) -> str:
    """The key of the 16-bit kernels of the same kind."""
    return "bf16" if key in ("fp8", "fp32") else key.removesuffix(".fp8")


# ---- prediction with given constants ------------------------------------------------------------------------------


def _gemm(m: Machine, c: Any, s: TimedSample) -> float:
    op = s.ops[-1]
    rows, n, k = op.shape
    t = tiled(m, c, op.dtype, rows, n, k, op.experts, op.bytes, DTYPE_BYTES.get(op.weight_dtype, 0), op.reuse).seconds
    return t + sum(quantize_time(m, c, q.bytes / 3.0) for q in s.ops[:-1])


def _prefill(m: Machine, c: Any, s: TimedSample) -> float:
    op = s.ops[-1]
    return prefill(m, c, op.shape, op.causal, op.dtype).seconds


def _decode(m: Machine, c: Any, s: TimedSample) -> float:
    op = s.ops[-1]
    apart = decode_kernel(op.kernel, op.shape[1], op.shape[2]) == "mmha"
    return decode(m, c, op.shape, DTYPE_BYTES[op.kv_dtype or op.dtype], apart, op.dtype, op.reuse).seconds


def _collective(m: Machine, c: Any, s: TimedSample) -> float:
    op = s.ops[-1]
    route = path(c, m.device, 1, op.ranks, op.ranks)
    return algorithm_time(m, c, op.kind, op.ranks, op.link_bytes, route, op.dtype)


_PREDICT: dict[str, Callable[[Machine, Any, TimedSample], float]] = {
    "gemm": _gemm, "prefill": _prefill, "decode": _decode, "collective": _collective,
}  # fmt: skip


# ---- least squares ------------------------------------------------------------------------------------------------

_STILL = {
    "dequantize_share", "backward_share", "network_share", "network_hop", "power", "share_limit", "tensor_share",
    "tensor_rate", "port", "tile_rows", "tile_columns",
}  # fmt: skip
"""Constants that single kernels on one node of one device cannot determine."""
_OF_WIDTH = {
    "gemm": {"latency", "share", "vector_clocks", "quantize_latency", "quantize_share"},
    "prefill": {"latency", "softmax_clocks", "block", "query_passes", "kv_passes"},
    "decode": {"latency", "memory_share", "tile", "slots", "block", "draw_bytes_per_clock"},
}
"""Constants that 8-bit kernels have separately."""
_KERNELS: dict[str, tuple[str, ...]] = {"gemm": ("vector_rows",), "prefill": ("narrow",), "decode": ("splits",)}
"""Properties of a library's kernels that are known and not fitted."""


def _free(c: BaseModel) -> list[str]:
    """The constants that can change: numbers above zero (a zero means that the machine lacks the feature)."""
    return [k for k, v in c if isinstance(v, float) and v > 0 and k not in _STILL]


def _fit(
    start: C, samples: Sequence[TimedSample], m: Machine, predict: Callable[[Machine, Any, TimedSample], float],
    names: list[str],
) -> C:  # fmt: skip
    import numpy as np
    from scipy.optimize import least_squares

    chosen = list(samples)
    if len(chosen) > _MOST_ROWS:
        chosen = random.Random(0).sample(chosen, _MOST_ROWS)
    fixed = {k: v for k, v in start if k not in names}
    x0 = np.array([math.log(getattr(start, k)) for k in names])
    goal = np.array([math.log(s.seconds) for s in chosen])
    pull = _PULL * math.sqrt(len(chosen))

    def residuals(x: Any) -> Any:
        c = type(start).model_construct(**fixed, **dict(zip(names, np.exp(x).tolist(), strict=True)))
        got = np.array([math.log(predict(m, c, s)) for s in chosen])
        return np.concatenate([got - goal, pull * (x - x0)])

    low, high = zip(*(_bounds(k, x) for k, x in zip(names, x0, strict=True)), strict=True)
    found = least_squares(residuals, x0, bounds=(low, high), loss="soft_l1", f_scale=_SOFT, diff_step=0.01, max_nfev=15)
    values = {k: float(f"{v:.4g}") for k, v in zip(names, np.exp(found.x), strict=True)}
    return start.model_copy(update=values)


def _bounds(name: str, x: float) -> tuple[float, float]:
    """Logarithmic bounds of a constant: e^2.5 in either direction from the start, within physical limits.

    No efficiency exceeds one.
    """
    low, high = x - 2.5, x + 2.5
    if name.endswith("_share") or name == "share":
        high = 0.0 if x < 0.0 else x
    return low, max(high, x + 1e-6)


def _errors(
    c: Any, samples: Sequence[TimedSample], m: Machine, predict: Callable[[Machine, Any, TimedSample], float]
) -> list[float]:
    return [abs(predict(m, c, s) / s.seconds - 1.0) for s in samples]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _at_clock(e: Efficiency, clock: float) -> Efficiency:
    """The same constants with their seconds converted to another clock rate."""
    if not e.clock or e.clock == clock:
        return e.model_copy(update={"clock": clock})
    ratio = e.clock / clock

    def rescaled(c: C) -> C:
        seconds = {
            k: getattr(c, k) * ratio for k in type(c).model_fields if k in _SECONDS and isinstance(getattr(c, k), float)
        }
        return c.model_copy(update=seconds)

    tables = {k: {name: rescaled(c) for name, c in getattr(e, k).items()} for k in ("gemm", "prefill", "decode")}
    return e.model_copy(
        update={
            **tables, "collective": rescaled(e.collective), "clock": clock,
            "pointwise_latency": e.pointwise_latency * ratio,
        }
    )  # fmt: skip


_SECONDS = {
    "latency", "quantize_latency", "block", "split", "pack", "transpose", "ll_hop", "ll128_hop",
    "ll128_latency", "simple_hop", "simple_latency", "tree_hop", "alltoall_latency", "alltoall_ramp", "nvls_latency",
}  # fmt: skip
