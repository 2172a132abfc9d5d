"""ZigZag's cycles of matrix products on its TPU-like array: JSON list of [m, n, k] on stdin, list of cycles on stdout.

Its 32 × 32 weight-stationary array with memories wide and large enough not to limit it.
"""

import contextlib
import json
import logging
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import yaml
from product_model import product
from zigzag.api import get_hardware_performance_zigzag

WIDE = 1 << 16
"""Bits per cycle of the memories beyond the array."""


def main() -> None:
    inputs = files("zigzag") / "inputs"
    array = yaml.safe_load((inputs / "hardware" / "tpu_like.yaml").read_text())
    for name in ("dram", "sram_2MB"):
        for port in array["memories"][name]["ports"]:
            port["bandwidth_min"] = port["bandwidth_max"] = WIDE
    array["memories"]["sram_2MB"]["size"] = 1 << 32
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        path = Path(folder) / "array.yaml"
        path.write_text(yaml.safe_dump(array, sort_keys=False))  # the order is that of the hierarchy
        found = []
        for m, n, k in json.load(sys.stdin):
            _, cycles, _ = get_hardware_performance_zigzag(
                product(m, n, k), str(path), str(inputs / "mapping" / "tpu_like.yaml"), opt="latency",
                dump_folder=folder, loma_show_progress_bar=False,
            )  # fmt: skip
            found.append(cycles)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
