"""Cycles of matrix products on one systolic array: ZigZag and Stream beside the closed form, as JSON.

    python benchmarks/vs_hardware_peers.py --zigzag PYTHON --stream PYTHON [--out FILE]

Each PYTHON is an interpreter with that peer: ``zigzag-dse==3.9.1`` and ``six`` (Python 3.11 or later),
``stream-dse==2.1.1`` and ``six`` (3.12 or later). One that is left out, or that fails, is named in the result. ZigZag
fills and drains its array once per product; the closed form does so for every fold, as SCALE-Sim (``cycles``), or once
(``overlapped``). No memory or link limits any.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from math import ceil
from pathlib import Path
from typing import Any

from ridgeline.measure.environment import fingerprint
from ridgeline.predict.operators.systolic import cycles

HERE = Path(__file__).parent
PEERS = {"zigzag": "zigzag-dse 3.9.1", "stream": "stream-dse 2.1.1"}
SIDE = 32
PRODUCTS = [
    (m, n, k) for m in (32, 96, 512, 2048) for n, k in ((256, 1024), (512, 512), (1024, 256), (768, 3072))
] + [(100, 500, 700), (50, 1000, 300)]  # fmt: skip
"""m, n, k; the last two fill no fold."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PEERS:
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter with {PEERS[name]}")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "vs_hardware_peers.json")
    args = parser.parse_args()
    rows = [
        {"m": m, "n": n, "k": k, "cycles": cycles(m, n, k, SIDE, SIDE, "weight"),
         "overlapped": ceil(k / SIDE) * ceil(n / SIDE) * m + 3 * SIDE - 2}
        for m, n, k in PRODUCTS
    ]  # fmt: skip
    peers = {name: _compare(name, getattr(args, name), rows) for name in PEERS}
    result = {"array": f"{SIDE}x{SIDE}, weight stationary", "peers": peers, "rows": rows,
              "environment": fingerprint()}  # fmt: skip
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(peers, indent=2))


def _compare(name: str, python: str | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours relative to the peer's, whose cycles are added to ``rows``; or why it was not run."""
    if python is None:
        return {"version": PEERS[name], "not run": f"no interpreter was given: --{name} PYTHON"}
    start = time.perf_counter()
    command = [python, str(HERE / "peers" / f"{name}_worker.py")]
    ran = subprocess.run(command, input=json.dumps(PRODUCTS), capture_output=True, text=True, timeout=1800)
    if ran.returncode:
        return {"version": PEERS[name], "not run": (ran.stderr.strip().splitlines() or ["it failed"])[-1]}
    for row, theirs in zip(rows, json.loads(ran.stdout), strict=True):
        row[name] = theirs
    ratios = {form: _ratios([row[form] / row[name] for row in rows]) for form in ("cycles", "overlapped")}
    return {"version": PEERS[name], "seconds": time.perf_counter() - start, **ratios}


def _ratios(found: list[float]) -> dict[str, float]:
    """Of ours to theirs."""
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


if __name__ == "__main__":
    main()
