"""A probed machine's profile against steps that it measured afterwards (``benchmarks/probed_sample.py``)."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from ridgeline import catalog
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Pretrain
from ridgeline.techniques.registry import normalize

SAMPLE = Path(__file__).parents[1] / "data" / "probed.json"
CLAIMED = 0.10
"""docs/accuracy.md, "In short": a CPU after `ridgeline probe`."""


@pytest.fixture(scope="module")
def judged():
    """(row, its prediction) of the sample."""
    sample = json.loads(SAMPLE.read_text())
    device, work = Device(**sample["device"]), Pretrain(**{**sample["workload"], "kind": "pretrain"})
    return [
        (row, predict(normalize(Experiment(
            model=catalog.model(sample["model"]), cluster=Cluster(device=device, devices_per_node=row["ranks"]),
            workload=work, plan=Plan.parse(row["plan"]),
        ))))
        for row in sample["rows"]
    ]  # fmt: skip


def test_steps_of_a_probed_machine(judged):
    errors = {row["name"]: r.metrics["tokens_per_s"].value / row["tokens_per_s"] - 1 for row, r in judged}
    print({name: f"{e:+.1%}" for name, e in errors.items()})
    assert fmean(map(abs, errors.values())) <= CLAIMED


def test_memory_of_a_probed_machine(judged):
    for row, r in judged:
        held = r.metrics["peak_bytes"]
        assert held.low <= row["peak_bytes"] <= held.high, row["name"]
