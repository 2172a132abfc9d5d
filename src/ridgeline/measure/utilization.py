"""MFU, HFU and shares of the roof of a measured result: always against a stated peak, the one `probe` measured."""

from __future__ import annotations

from ridgeline.predict.common import rank_cluster
from ridgeline.predict.operators.kernel import peak_flops
from ridgeline.predict.predict import training_flops
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Check, Metric, Result


def add_utilization(result: Result, e: Experiment) -> Result:
    """Add ``mfu`` and ``hfu`` to a measured training result, the peaks to its environment, and roofs to its rows.

    Does nothing without a measured profile, or when the result did not finish. A value above 1 is a failed check.
    """
    device = rank_cluster(e).device
    step = result.metric("step_time_s")
    if result.status != "ok" or not e.is_training or step is None or not device.rates:
        return result
    model, executed, dtype = training_flops(e)
    peak = peak_flops(device, dtype)
    source = f"matrix-multiply FLOPs over {peak / 1e12:.3g} TFLOP/s, the fastest {dtype} GEMM that probe measured"
    for name, flops in (("mfu", model), ("hfu", executed)):
        result.metrics[name] = Metric(value=flops / step / peak, better="higher", source=source)
    share = result.metrics["mfu"].value
    result.checks.append(Check(name="MFU is at most 1", passed=share <= 1, expected=1.0, got=share))
    result.environment["peak_flops"] = dict(device.peak_flops)
    result.environment["memory_bandwidth"] = device.memory_bandwidth
    for row in result.breakdown:
        roof = max(row.flops / peak, row.bytes / device.memory_bandwidth)
        if row.seconds and roof and row.roof is None:
            row.roof = roof / row.seconds  # above 1: the data came from a cache
    return result
