"""Accuracy of operator and collective predictions on open measurements, and the fit behind the class defaults.

For every measured device: constants fitted on all rows (in sample), fitted on one half of the shapes and judged on the
other (cross-validated), and those of every other device (known by its datasheet only) — beside a three-constant
roofline with the same halves. Every fit starts from the generic constants, so nothing of a held-out row is known to it.

    python benchmarks/predict_operators.py DATA_DIR [--write] [--out benchmarks/results/predict_operators.json]

``--write`` stores the fits as the catalog's constants of their architectures.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import permutations
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from ridgeline import catalog
from ridgeline.predict.calibrate import Calibrated, TimedSample, calibrate, family_of
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.kernel import op_time, peak_flops
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.efficiency import Efficiency
from ridgeline.validate.samples import OPERATORS, samples

DEVICES = {"a100-80g-sxm": "ampere", "h100-sxm": "hopper", "l40s": "ada"}
_KERNEL = ("splits", "pack", "transpose", "rows", "narrow")
"""What is known of a device's decode kernels."""
_FLASH_2 = {"pack": 2e-6, "transpose": 5e-6}
KNOWN: dict[str, dict] = {
    "ampere": {
        "l2_gain": 1.5, "l2_share": 0.75, "decode": {"flash": {**_FLASH_2, "splits": "shared"}},
        "collective": {"nvls_share": 0.0, "nvls_latency": 0.0},
    },
    "hopper": {"l2_gain": 1.3, "l2_share": 0.7, "decode": {"flash": {"rows": 128}, "flash.fp8": {"narrow": True}}},
    "ada": {
        "l2_gain": 3.5, "l2_share": 0.95, "gemm": {"fp8": {"vector_rows": 8}},
        "prefill": {"trtllm.fp8": {"narrow": "queries"}},
        "decode": {"flash": _FLASH_2, "xqa.fp8": {"splits": "never"}},
        "collective": {"nvls_share": 0.0, "nvls_latency": 0.0},
    },
}  # fmt: skip
"""What sets an architecture apart and is not fitted row by row: how fast and how whole its last-level cache is, whether
a switch sums, which kernels its libraries have. FlashAttention-2 packs query heads by rearranging them, and splits keys
on Ampere only where heads share them; FlashAttention-3's tiles have 128 rows (``hopper/tile_size.h``), and it takes
queries of the cache's dtype only; TensorRT-LLM on Ada multiplies up to eight rows in 8 bits on the vector units,
and does not split an 8-bit cache."""
HEADER = """# {name}: constants of operator and collective times (see ridgeline/spec/efficiency.py for each)
#
# {data}
# Seconds are those at the clock below.

"""


def half(s: TimedSample) -> int:
    """0 or 1 by shape alone, so that all rows of one shape (whatever their source) fall on one side."""
    op = s.ops[-1]
    return zlib.crc32(repr((op.kind, op.shape, op.ranks, op.link_bytes)).encode()) & 1


def predicted(s: TimedSample, device: Device) -> float:
    op = s.ops[-1]
    if op.axis:
        return collective_time(op, Cluster(device=device, devices_per_node=op.ranks)).seconds
    return sum(op_time(o, device).seconds for o in s.ops)


def label(s: TimedSample) -> str:
    kind, key = family_of(s.ops[-1])
    op = s.ops[-1]
    return f"{kind} {op.dtype if kind == 'gemm' else op.kind if kind == 'collective' else key}"


def regime(s: TimedSample) -> str:
    """A coarse name of what bounds a row: its size against the machine."""
    op = s.ops[-1]
    if op.axis:
        return (
            "small (< 256 KiB)" if op.link_bytes < 2**18 else "medium (< 16 MiB)" if op.link_bytes < 2**24 else "large"
        )
    if s.seconds < 12e-6:
        return "latency (< 12 us)"
    m = op.shape[0] if op.kind == "gemm" else op.shape[3]
    return "memory (few rows)" if m <= 128 else "compute (many rows)"


def terms(s: TimedSample, device: Device) -> tuple[float, float, float]:
    op = s.ops[-1]
    if op.axis:
        rounds = 2 if op.kind == "all_reduce" else 1
        wire = device.link.bandwidth if device.link else 1.0
        return rounds * (op.ranks - 1) / op.ranks * op.link_bytes / wire, 1e-6 * (op.ranks - 1), 1e-6
    visible = 0.5 if op.kind == "attention" and op.shape[3] == op.shape[4] else 1.0
    return visible * op.flops / peak_flops(device, op.dtype), op.bytes / device.memory_bandwidth, 1e-6


def roofline(train: list[TimedSample], test: list[TimedSample], device: Device) -> list[float]:
    """Errors on ``test`` of the sum of three terms, each with one constant fitted on ``train`` (relative errors)."""
    a = np.array([[t / s.seconds for t in terms(s, device)] for s in train])
    c, _ = nnls(a, np.ones(len(train)))
    return [float(np.dot(c, terms(s, device)) / s.seconds - 1) for s in test]


def summary(errors: Iterable[float]) -> dict[str, float]:
    e = sorted(abs(x) for x in errors)
    return {
        "n": len(e), "mean_ape": round(sum(e) / len(e), 4), "median_ape": round(e[len(e) // 2], 4),
        "p68": round(e[int(0.68 * len(e))], 4), "p90": round(e[int(0.9 * len(e))], 4),
    }  # fmt: skip


def grouped(
    samples: list[TimedSample], errors: list[float], key: Callable[[TimedSample], str]
) -> dict[str, dict[str, float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for s, e in zip(samples, errors, strict=True):
        groups[key(s)].append(e)
    return {k: summary(v) for k, v in sorted(groups.items())}


def errors(samples: list[TimedSample], device: Device) -> list[float]:
    return [predicted(s, device) / s.seconds - 1 for s in samples]


def kind(s: TimedSample) -> str:
    return family_of(s.ops[-1])[0]


def start(device: Device) -> Efficiency:
    """The generic constants, with what is known of the device's architecture."""
    document = catalog.merged(catalog.architecture_document("generic"), KNOWN[device.architecture])
    if "fp8" not in device.peak_flops:
        for kind in ("gemm", "prefill", "decode"):
            document[kind] = {name: c for name, c in document[kind].items() if not name.endswith("fp8")}
    return Efficiency.model_validate(document)


def tensor_rate(device: Device) -> float:
    """FLOP per clock and processor in 16 bits."""
    return device.peak_flops["bf16"] / device.sm_count / device.clock


def moved(e: Efficiency, target: Device) -> Efficiency:
    """Constants of one architecture for a device of another, changed by what is known without measuring it.

    Watts per FLOP/s compare within one process technology only; operands reach the tensor cores of each generation at
    the rate at which these multiply (0.017 bytes per FLOP on both A100 and H100).
    """
    other, source = start(target), catalog.device(e.fitted_on[0])
    faster = tensor_rate(target) / tensor_rate(source)
    gemm_table = {
        k: c.model_copy(
            update={
                "power": 0.0, "vector_rows": other.gemm[k].vector_rows if k in other.gemm else 1,
                "load_bytes_per_clock": c.load_bytes_per_clock * faster,
            }
        )
        for k, c in e.gemm.items()
    }  # fmt: skip
    prefill_table = {
        k: c.model_copy(update={"narrow": other.prefill[k].narrow, "pack": other.prefill[k].pack})
        for k, c in e.prefill.items() if k in other.prefill
    }  # fmt: skip
    decode_table = {
        k: c.model_copy(update={n: getattr(other.decode[k], n) for n in _KERNEL})
        for k, c in e.decode.items() if k in other.decode
    }  # fmt: skip
    cache = {"l2_gain": other.l2_gain, "l2_share": other.l2_share}
    return e.model_copy(update={"gemm": gemm_table, "prefill": prefill_table, "decode": decode_table, **cache})


def document(e: Efficiency) -> dict:
    """What a file must say: constants that differ from an ideal machine's, of 8-bit kernels those of their own."""
    out = e.model_dump(exclude_defaults=True)
    for table in (out["gemm"], out["prefill"], out["decode"]):
        for name in [n for n in table if n.endswith("fp8")]:
            wide = table["bf16" if name == "fp8" else name.removesuffix(".fp8")]
            table[name] = {k: v for k, v in table[name].items() if wide.get(k) != v}
    return out


def constants_in(document: dict) -> int:
    """How many numbers of it are constants of the time models."""
    tables = [t for kind in ("gemm", "prefill", "decode") for t in document.get(kind, {}).values()]
    tables += [
        document.get("collective", {}),
        {k: v for k, v in document.items() if isinstance(v, float) and k != "clock"},
    ]
    return sum(isinstance(v, (int, float)) and not isinstance(v, bool) for t in tables for v in t.values())


def write(name: str, e: Efficiency) -> None:
    import tomli_w

    folder = Path(catalog.__file__).parent / "efficiency"
    text = HEADER.format(name=name, data=e.data) + tomli_w.dumps(document(e))
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")


def spread(found: list[float]) -> float:
    """The standard deviation of a log-normal of which 1.96 hold 95 % of these errors, as the intervals assume."""
    sizes = sorted(abs(math.log1p(e)) for e in found)
    return round(sizes[int(0.95 * len(sizes))] / 1.96, 3)


def spreads_of(rows: list[TimedSample], found: list[float]) -> dict[str, float]:
    groups: dict[str, list[float]] = defaultdict(list)
    for s, e in zip(rows, found, strict=True):
        groups[kind(s)].append(e)
    return {k: spread(v) for k, v in sorted(groups.items())}


def widest(known: list[dict[str, float]]) -> dict[str, float]:
    """The largest spread of each kind, over devices that were predicted by the constants of others."""
    return {k: max(v[k] for v in known) for k in known[0]}


def judged(device: Device, rows: list[TimedSample], fitted: Calibrated) -> tuple[dict, dict[str, float]]:
    """One device's part of the report, and its spreads: in sample, by halves of the shapes, by numbers of ranks."""
    held, found, base = [], [], []
    for side in (0, 1):
        train, test = ([s for s in rows if (half(s) == side) is here] for here in (True, False))
        held += test
        found += errors(test, calibrate(train, device, start(device)).on(device))
        for group in sorted({label(s) for s in test}):
            part = [s for s in test if label(s) == group]
            base += zip(part, roofline([s for s in train if label(s) == group], part, device), strict=True)
    ranks = [s for s in rows if s.ops[-1].axis]
    without = {}
    for n in sorted({s.ops[-1].ranks for s in ranks}):
        cut = calibrate([s for s in ranks if s.ops[-1].ranks != n], device, start(device)).on(device)
        without[f"{n} ranks left out"] = summary(errors([s for s in ranks if s.ops[-1].ranks == n], cut))
    one = {
        "constants": constants_in(document(fitted.efficiency)),
        "as_shipped": grouped(rows, errors(rows, device), label),
        "in_sample": grouped(rows, errors(rows, fitted.on(device)), label),
        "cross_validated": grouped(held, found, label),
        "cross_validated_by_regime": grouped(held, found, lambda s: f"{kind(s)}: {regime(s)}"),
        "cross_validated_by_kind": grouped(held, found, kind),
        "three_constant_roofline": grouped([s for s, _ in base], [e for _, e in base], label),
        "collective_ranks_left_out": without,
    }
    return one, spreads_of(held, found)


def left_out(rows: dict[str, list[TimedSample]], fitted: dict[str, Efficiency]) -> tuple[dict, dict[str, float]]:
    """Every device with the constants of every other, how far an interval made of such errors holds, the spreads."""
    pairs, out_rows, out_errors = {}, defaultdict(list), defaultdict(list)
    for source, target in permutations(DEVICES, 2):
        device = catalog.device(target).model_copy(update={"efficiency": moved(fitted[source], catalog.device(target))})
        eight = any(family_of(s.ops[-1])[1].endswith("fp8") for s in rows[source])
        part = [s for s in rows[target] if eight or not family_of(s.ops[-1])[1].endswith("fp8")]
        found = errors(part, device)
        pairs[f"{source} -> {target}"] = grouped(part, found, label)
        out_rows[target] += part
        out_errors[target] += found
    spreads = {t: spreads_of(out_rows[t], out_errors[t]) for t in DEVICES}
    coverage = {}
    for target in DEVICES:  # a class's interval from the devices that are not judged by it
        known = widest([spreads[t] for t in DEVICES if t != target])
        inside: dict[str, list[bool]] = defaultdict(list)
        for s, e in zip(out_rows[target], out_errors[target], strict=True):
            inside[kind(s)].append(abs(math.log1p(e)) <= 1.96 * known[kind(s)])
        coverage[target] = {k: round(sum(v) / len(v), 3) for k, v in sorted(inside.items())}
    return {"leave_device_out": pairs, "interval_coverage": coverage}, widest(list(spreads.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "predict_operators.json")
    args = parser.parse_args()
    began = time.perf_counter()
    report: dict = {"data": sorted(OPERATORS), "devices": {}}
    rows, fitted, spreads = {}, {}, {}
    for name in DEVICES:
        device = catalog.device(name)
        rows[name], _ = samples([args.data], name)
        everything = calibrate(rows[name], device, start(device), "open data")
        fitted[name] = everything.efficiency
        report["devices"][name], spreads[name] = judged(device, rows[name], everything)
    across, spreads["class"] = left_out(rows, fitted)
    report |= {**across, "spreads": spreads, "seconds": round(time.perf_counter() - began, 1)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)
    if args.write:
        for name, architecture in DEVICES.items():
            own = {**spreads[name], "pointwise": 0.15}
            data = f"Fitted on open gemm, attention and collectives measurements of {name}."
            e = fitted[name].model_copy(
                update={"data": data, "spread": own, "class_spread": {**spreads["class"], "pointwise": 0.25}}
            )
            write(architecture, e)


def show(report: dict) -> None:
    for name, one in report["devices"].items():
        print(f"\n{name}  mean |error|: {'in sample':>10} {'held-out half':>14} {'roofline':>9}")
        for group, v in one["in_sample"].items():
            other = [
                one[k].get(group, {}).get("mean_ape", math.nan) for k in ("cross_validated", "three_constant_roofline")
            ]
            print(f"  {group:30} {v['n']:6} {v['mean_ape']:8.1%} {other[0]:12.1%} {other[1]:12.1%}")
        for part in ("cross_validated_by_regime", "collective_ranks_left_out"):
            print(f"  {part.replace('_', ' ')}")
            for group, v in one[part].items():
                print(f"    {group:34} {v['n']:6} {v['mean_ape']:8.1%} (p90 {v['p90']:.1%})")
    for pair, groups in report["leave_device_out"].items():
        print(f"\n{pair}")
        for group, v in groups.items():
            print(f"  {group:30} {v['n']:6} {v['mean_ape']:8.1%} (median {v['median_ape']:.1%})")
    print(f"\nshare of rows in the interval of the classes without them: {report['interval_coverage']}")
    print(f"\n{report['seconds']} s")


if __name__ == "__main__":
    main()
