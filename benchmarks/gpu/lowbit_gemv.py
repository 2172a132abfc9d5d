"""Products with low-bit codes on a GPU: share of the memory bandwidth, and speed against a plain product in bf16.

Every product is captured in a CUDA graph with copies of its weights that together exceed the caches, so that neither
launches nor cached weights count. Results are checked against the expanded weight before they are timed.

    python benchmarks/gpu/lowbit_gemv.py --on h200 [--out benchmarks/results/gpu_lowbit.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from ridgeline import catalog
from ridgeline.measure.environment import fingerprint
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.ternary import VECTOR_LINES, ZEROS, Ternary, TernaryLinear

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))
ROWS = (1, 2, 4, 8, 16, 64, 256)
TERNARY = 0
"""In the place of bits: words of QMoE's dictionary, less than one."""
CACHE = 2**28
"""Bytes of weights that are cycled through at least: more than any cache holds."""


def codes(out: int, width: int, bits: int, group: int) -> Packed:
    """Random codes."""
    kept = torch.randint(1 << bits, (out, width), dtype=torch.uint8)
    return Packed(kept, torch.rand(out, width // group).half() * 0.01, None, bits, group)


def ternary(out: int, width: int) -> Ternary:
    """Random rows with QMoE's share of zeros, in words of the dictionary."""
    drawn = torch.rand(out, width)
    symbols = torch.where(drawn < ZEROS, 0, torch.where(drawn < (1 + ZEROS) / 2, 1, 2)).to(torch.uint8)
    return Ternary.encode(symbols, -torch.rand(out).half(), torch.rand(out).half())


def seconds(layers: list, x: torch.Tensor, repeats: int = 20) -> float:
    """Median seconds of one product, in a graph of one product with each of the layers."""
    for layer in layers[:2]:
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer(x)
    taken = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / len(layers))
    return statistics.median(taken)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", required=True, help="catalog name of this GPU: its bandwidth is the roof")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_lowbit.json"))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: there is nothing to measure")
    roof = catalog.device(given.on).memory_bandwidth
    result: dict = {"environment": fingerprint(), "gpu": torch.cuda.get_device_name(), "roof": roof, "rows": []}
    for out, width in SHAPES:
        plain = [torch.randn(out, width, dtype=torch.bfloat16, device="cuda")]
        plain += [plain[0].clone() for _ in range(CACHE // plain[0].nbytes)]
        for bits in (8, 4, 3, 2, TERNARY):
            record = ternary(out, width) if bits == TERNARY else codes(out, width, bits, given.group)
            kind = TernaryLinear if isinstance(record, Ternary) else PackedLinear
            held = sum(p.nbytes for p in kind(record, device=torch.device("cuda")).parameters())
            layers = [kind(record, device=torch.device("cuda")) for _ in range(1 + CACHE // held)]
            for m in (m for m in ROWS if bits != TERNARY or m <= VECTOR_LINES):
                x = torch.randn(m, width, dtype=torch.bfloat16, device="cuda")
                want = F.linear(x.float(), record.dense().cuda())
                error = float((layers[0](x).float() - want).norm() / want.norm())
                if error > 2e-2:
                    raise SystemExit(f"{bits} bits at {m} rows are wrong by {error:.1%}")
                ours = seconds(layers, x)
                base = seconds([lambda a, w=w: F.linear(a, w) for w in plain], x)
                row = {"out": out, "in": width, "bits": bits, "rows": m, "seconds": ours, "bf16_seconds": base,
                       "speedup": base / ours, "share_of_roof": held / ours / roof, "error": error}  # fmt: skip
                result["rows"].append(row)
                print(f"{out}x{width} {bits} bits {m:4d} rows {1e6 * ours:8.1f} us  {row['speedup']:.2f}x bf16  "
                      f"{row['share_of_roof']:.0%} of the roof")  # fmt: skip
            del layers
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
