"""A GPU's probe: its rows are of the schemas, and its profile is the datasheet with constants fitted to them."""

from __future__ import annotations

import pytest
import torch

from ridgeline import catalog
from ridgeline.measure.probing import gpu_operators as operators
from ridgeline.measure.probing.probe import datasheet, gpu_device
from ridgeline.predict.operators.kernel import op_time
from ridgeline.validate.samples import as_samples


def test_rows_are_of_the_schemas(monkeypatch):
    monkeypatch.setattr(operators, "ROWS", (1, 16))
    monkeypatch.setattr(operators, "WEIGHTS", ((32, 64),))
    monkeypatch.setattr(operators, "PREFILL", ((1, 16),))
    monkeypatch.setattr(operators, "HEADS", ((4, 2, 8),))
    stages: list[str] = []
    rows = list(operators.operator_rows(torch.device("cpu"), stages.append))
    samples = as_samples(rows)
    assert [s.ops[-1].kind for s in samples] == ["gemm", "gemm", "attention"]
    assert samples[1].ops[-1].shape == (16, 32, 64)
    assert samples[2].ops[-1].shape == (1, 4, 2, 16, 16, 8)
    assert all(0 < s.seconds < 1 for s in samples)
    assert stages[-1] == "attention"


@pytest.mark.parametrize(
    ("title", "memory", "name"),
    [
        ("NVIDIA H200", 150e9, "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100-80g-sxm"),
        ("NVIDIA A100-PCIE-40GB", 42.3e9, "a100-40g-pcie"),
        ("NVIDIA A100 80GB PCIe", 85.1e9, "a100-80g-pcie"),
        ("NVIDIA GeForce RTX 4090", 25.4e9, "rtx4090"),
        ("NVIDIA GeForce RTX 3090", 25.4e9, "rtx3090"),
        ("NVIDIA L4", 24.1e9, "l4"),
        ("NVIDIA L40S", 47.8e9, "l40s"),
        ("Tesla T4", 15.8e9, "t4"),
        ("Tesla V100-SXM2-16GB", 16.9e9, "v100-16g-sxm"),
        ("NVIDIA H100 80GB HBM3", 85.0e9, "h100-sxm"),
        ("NVIDIA H100 PCIe", 85.0e9, "h100-pcie"),
        ("NVIDIA GeForce GTX 1080", 8.5e9, None),
    ],
)
def test_driver_names_find_their_datasheet(title, memory, name):
    found = datasheet(title, memory)
    assert (found.name if found else None) == name


def test_a_profile_is_the_datasheet_with_fitted_constants():
    """Rows made from a device half as fast in memory: the profile must come out half as fast."""
    known = catalog.device("h200-sxm")
    slow = known.model_copy(update={"memory_bandwidth": known.memory_bandwidth / 2})
    rows = []
    for m in (1, 4, 16, 64, 512, 4096):
        for n, k in operators.WEIGHTS:
            row = {"device": "local", "dtype": "bf16", "m": m, "n": n, "k": k, "seconds": 1.0}
            (sample,) = as_samples([row])
            rows.append({**row, "seconds": op_time(sample.ops[-1], slow).seconds})
    one = {"gpu": "NVIDIA H200", "memory_bytes": 150e9, "rows": rows, "torch": "2.11", "peak_flops": {"bf16": 7e14},
           "memory_bandwidth": 4e12, "units": 132, "kind": "gpu",
           "disk": {"name": "disk", "bandwidth": 2e9, "latency": 1e-4}}  # fmt: skip
    device = gpu_device(one)
    assert device.disk is not None
    assert device.disk.bandwidth == 2e9
    assert device.name == "local"
    assert device.memory_bytes == known.memory_bytes
    errors = [abs(op_time(s.ops[-1], device).seconds / s.seconds - 1) for s in as_samples(rows)]
    before = [abs(op_time(s.ops[-1], known).seconds / s.seconds - 1) for s in as_samples(rows)]
    assert sum(errors) < 0.35 * sum(before)
    assert device.efficiency is not None
    assert device.efficiency.source == "measured profile"
