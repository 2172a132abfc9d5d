"""Runs whose workload changes during training (sequences that grow, batches that grow): a prediction for each
segment."""

from __future__ import annotations

from ridgeline.predict.common import COSTS
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result, Row, Traffic
from ridgeline.techniques.technique import Technique


def segments(e: Experiment, techniques: list[Technique]) -> list[tuple[float, Experiment]]:
    """(fraction of the steps, their experiment); the last is ``e`` as written."""
    parts = [(1.0, e)]
    for t in techniques:
        parts = [(share * s, later) for share, part in parts for s, later in t.segments(part)]
    return parts


def over_segments(parts: list[tuple[float, Result]]) -> Result:
    """One Result for the whole run: seconds and counts are means over its steps, rates and fractions means over its
    time, costs of a token means over its tokens, memory is that of the segment that needs most."""
    result = parts[-1][1]
    if len(parts) == 1:
        return result
    worst = max((r for _, r in parts), key=lambda r: r.metrics["peak_bytes"].value)
    times = [share * r.metrics["step_time_s"].value for share, r in parts]
    tokens = [share * r.metrics["tokens_per_step"].value for share, r in parts]
    for name, m in result.metrics.items():
        values = [r.metrics[name].value for _, r in parts]
        if m.unit == "bytes":
            m.value = max(values)
            continue
        weights = [share for share, _ in parts] if m.unit in ("s", "tokens") else tokens if name in COSTS else times
        m.value = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    result.memory, result.status, result.reason = worst.memory, worst.status, worst.reason
    result.notes = [*worst.notes, f"the mean over a run of {len(parts)} kinds of steps"]
    result.breakdown = _rows([(share, row) for share, r in parts for row in r.breakdown])
    result.traffic = _traffic([(share, t) for share, r in parts for t in r.traffic])
    return result


def _rows(rows: list[tuple[float, Row]]) -> list[Row]:
    sums: dict[tuple[str, str, str, str], Row] = {}
    for share, row in rows:
        key = (row.phase, row.module, row.operator, row.kind)
        scaled = {
            "seconds": row.seconds * share,
            "count": row.count * share,
            "flops": row.flops * share,
            "bytes": row.bytes * share,
            "link_bytes": row.link_bytes * share,
            "exposed_seconds": None if row.exposed_seconds is None else row.exposed_seconds * share,
        }
        if key in sums:
            old = sums[key]
            scaled = {k: v if v is None else v + (getattr(old, k) or 0.0) for k, v in scaled.items()}
        sums[key] = row.model_copy(update=scaled)
    return sorted(sums.values(), key=lambda r: -r.seconds)


def _traffic(sent: list[tuple[float, Traffic]]) -> list[Traffic]:
    sums: dict[tuple[str, int], list[float]] = {}
    for share, t in sent:
        entry = sums.setdefault((t.kind, t.ranks), [0.0, 0.0])
        entry[0] += share * t.calls
        entry[1] += share * t.bytes
    return [Traffic(kind=k, ranks=n, calls=calls, bytes=size) for (k, n), (calls, size) in sorted(sums.items())]
