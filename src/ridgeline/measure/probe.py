"""``ridgeline probe``: measure this machine and keep the profile as device ``local``. No torch here; ranks measure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from ridgeline import catalog
from ridgeline.measure.environment import cores, cpu_model
from ridgeline.predict import predict
from ridgeline.spec.device import Cluster, Device, Rate
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.workload import Pretrain
from ridgeline.train.launch import Job, JobFailed, run_job


def probe(
    max_ranks: int = 2, quick: bool = False, progress: Callable[[str], None] | None = None
) -> tuple[Device, Path]:
    """Measure with 1 … ``max_ranks`` processes sharing the machine (powers of two); returns the device and its file.

    Raises :class:`UserError` when a measurement cannot run.
    """
    found: dict[int, dict[str, Any]] = {}
    ranks = 1
    while ranks <= max(1, min(max_ranks, cores() if max_ranks > 1 else 1)):
        say = progress or (lambda _: None)

        def watch(message: dict[str, Any], ranks: int = ranks, say: Callable[[str], None] = say) -> None:
            say(f"{ranks} process{'es' if ranks > 1 else ''}: {message.get('stage', '')}")

        try:
            found[ranks] = run_job(Job("probe", None, {"quick": quick}, ranks=ranks), watch, timeout=300)
        except JobFailed as failure:
            raise UserError(f"the probe with {ranks} processes failed: {failure.reason}", failure.log) from None
        ranks *= 2
    device = _device(found)
    return device, catalog.save_device(device, "probe")


REFERENCE = "llama-tiny"
"""The model whose real step is compared with the sum of its operators."""


def reference_experiment(device: Device | None = None) -> Experiment:
    """A plain training step of the reference model in one process."""
    if device is None:
        device = Device(name="local", kind="cpu", peak_flops={"fp32": 1.0}, memory_bytes=1.0, memory_bandwidth=1.0)
    return Experiment(
        model=catalog.model(REFERENCE), cluster=Cluster(device=device), workload=Pretrain(seq_len=256, batch_size=4)
    )


def host_latency(device: Device, found: dict[int, dict[str, Any]]) -> dict[str, float]:
    """By number of processes: what the reference step takes beyond its operators timed alone, per operator."""
    out: dict[str, float] = {}
    for ranks, f in found.items():
        alone = predict(reference_experiment(device.shared_by(ranks)))
        seconds = sum(row.seconds for row in alone.breakdown)
        out[str(ranks)] = max(0.0, f["reference_step_s"] - seconds) / sum(row.count for row in alone.breakdown)
    return out


def _device(found: dict[int, dict[str, Any]]) -> Device:
    one = found[1]
    rates = {r: {k: Rate(**v) for k, v in f["rates"].items()} for r, f in found.items()}
    what = one.get("gpu") or cpu_model()
    device = Device(
        name="local",
        title=what,
        kind=one["kind"],
        peak_flops=one["peak_flops"],
        memory_bytes=one["memory_bytes"],
        memory_bandwidth=one["memory_bandwidth"],
        sm_count=one["units"],
        launch_latency=one["launch_latency"],
        rates=rates[1],
        ranks={str(r): v for r, v in rates.items() if r > 1},
        source=f"ridgeline probe of {what}, {cores()} cores, {date.today().isoformat()}, torch {one['torch']}; "
        "peak_flops is the fastest GEMM measured, memory_bandwidth a large copy (read + write)",
    )
    return device.model_copy(update={"host_latency": host_latency(device, found)})
