"""Train the three checkpoints that the benchmarks of compression start from, and record what that took.

    python benchmarks/compress_checkpoints.py runs/compress [--json benchmarks/results/compress_checkpoints.json]

Writes ``llama/model`` (16 million parameters), ``moe/model`` (7 million, 8 experts a layer) and ``moe_wide/model`` (one
layer, 8 experts of 6 million) under the folder. What is there is kept, and an interrupted training goes on; the files
say how they were trained.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from ridgeline.measure.environment import fingerprint

HERE = Path(__file__).parent


def train(name: str, folder: Path) -> dict[str, object] | None:
    """Train one checkpoint; None if it is there."""
    if (folder / name / "model" / "config.json").is_file():
        return None
    start = time.perf_counter()
    command = [sys.executable, "-m", "ridgeline", "train", str(HERE / f"compress_{name}.toml"), "--out",
               str(folder / name), "--save-every", "200", "--json"]  # fmt: skip
    said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return {"steps": said["step"], "first_loss": said["losses"][0], "last_loss": said["losses"][-1],
            "seconds": time.perf_counter() - start}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    made = {name: train(name, a.folder) for name in ("llama", "moe", "moe_wide")}
    print(json.dumps(made, indent=2))
    if a.json and any(made.values()):
        a.json.write_text(json.dumps({"checkpoints": made, "environment": fingerprint()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
