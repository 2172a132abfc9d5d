"""How long the studies that come with the project take to predict, and what their findings come to.

python benchmarks/study.py --json benchmarks/results/study.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.study import load_study, run_study

STUDIES = Path(__file__).parents[1] / "studies"
REPEATS = 3


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, object] = {"load_average": load_average()}
    for path in sorted(STUDIES.glob("*.toml")):
        runs = [run_study(load_study(path), Path("unused")) for _ in range(REPEATS)]
        seconds = [r.seconds for r in runs]
        report[path.stem] = {
            "cells": len(runs[0].cells), "feasible": sum(c.status == "ok" for c in runs[0].cells),
            "findings": len(runs[0].findings), "agree": sum(f.verdict == "agrees" for f in runs[0].findings),
            "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        }  # fmt: skip
    text = json.dumps({**report, "environment": fingerprint()}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
