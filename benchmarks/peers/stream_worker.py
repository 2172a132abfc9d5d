"""Stream's cycles of matrix products on one of its TPU-like cores: JSON list of [m, n, k] on stdin, cycles on stdout.

The core's 32 × 32 weight-stationary array with memories and links wide and large enough not to limit it.
"""

import contextlib
import json
import logging
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import yaml
from onnx import save
from product_model import product
from stream.api import SolveOptions, evaluate_mapping

WIDE = 1 << 16
"""Bits per cycle of memories and links."""
SMALL, LARGE = 1 << 20, 1 << 34
"""Bits: memories beyond the array's own registers are made large."""


def main() -> None:
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        chip = _chip(Path(folder))
        found = []
        for i, (m, n, k) in enumerate(json.load(sys.stdin)):
            model = Path(folder) / f"{i}.onnx"
            save(product(m, n, k), str(model))
            options = SolveOptions(artifacts=False)
            found.append(evaluate_mapping(str(chip), str(model), f"{folder}/{i}", options=options).cycles)
    json.dump(found, sys.stdout)


def _chip(folder: Path) -> Path:
    """The hardware file of one TPU-like core and its off-chip memory."""
    cores = files("stream") / "inputs" / "examples" / "hardware" / "cores"
    for name in ("tpu_like", "offchip"):
        core = yaml.safe_load((cores / f"{name}.yaml").read_text())
        for memory in core["memories"].values():
            memory["size"] = max(memory["size"], LARGE) if memory["size"] > SMALL else memory["size"]
            for port in memory["ports"]:
                port["bandwidth_min"] = port["bandwidth_max"] = WIDE
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(core, sort_keys=False))
    chip = {
        "name": "one_core", "cores": {0: "./tpu_like.yaml", 1: "./offchip.yaml"}, "offchip_core_id": 1,
        "unit_energy_cost": 0, "core_connectivity": [{"type": "bus", "cores": [0, 1], "bandwidth": WIDE}],
    }  # fmt: skip
    path = folder / "chip.yaml"
    path.write_text(yaml.safe_dump(chip, sort_keys=False))
    return path


if __name__ == "__main__":
    main()
