"""Cycles of matrix products on one systolic array: ZigZag's search of mappings beside the closed form, as JSON.

    python benchmarks/vs_zigzag.py --peer-python PATH [--out benchmarks/results/vs_zigzag.json]

``--peer-python`` has ``zigzag-dse==3.9.1`` and ``six``. ZigZag fills and drains its array once per product; the closed
form does so for every fold, as SCALE-Sim (``cycles``), or once (``overlapped``). No memory limits either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from math import ceil
from pathlib import Path

from ridgeline.predict.operators.systolic import cycles

SIDE = 32
PRODUCTS = [
    (m, n, k) for m in (32, 96, 512, 2048) for n, k in ((256, 1024), (512, 512), (1024, 256), (768, 3072))
] + [(100, 500, 700), (50, 1000, 300)]  # fmt: skip
"""m, n, k; the last two fill no fold."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "vs_zigzag.json")
    args = parser.parse_args()
    start = time.perf_counter()
    worker = Path(__file__).parent / "peers" / "zigzag_worker.py"
    answer = subprocess.run([args.peer_python, str(worker)], input=json.dumps(PRODUCTS), stdout=subprocess.PIPE,
                            text=True, check=True, timeout=900)  # fmt: skip
    seconds = time.perf_counter() - start
    rows = []
    for (m, n, k), theirs in zip(PRODUCTS, json.loads(answer.stdout), strict=True):
        once = ceil(k / SIDE) * ceil(n / SIDE) * m + 3 * SIDE - 2
        rows.append({"m": m, "n": n, "k": k, "zigzag": theirs, "cycles": cycles(m, n, k, SIDE, SIDE, "weight"),
                     "overlapped": once})  # fmt: skip
    result = {
        "peer": "zigzag-dse 3.9.1", "array": f"{SIDE}x{SIDE}, weight stationary", "peer_seconds": seconds,
        **{name: _ratios([r[name] / r["zigzag"] for r in rows]) for name in ("cycles", "overlapped")}, "rows": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=2))


def _ratios(found: list[float]) -> dict[str, float]:
    """Of ours to theirs."""
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


if __name__ == "__main__":
    main()
