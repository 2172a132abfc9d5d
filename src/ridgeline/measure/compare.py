"""Two results side by side: metric by metric, row by row, byte by byte; refuses to compare different environments."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from ridgeline.measure.stats import MARGIN, Interval, ratio_ci, step_blocks, verdict
from ridgeline.spec.comparison import (
    Comparison,
    ComparisonKind,
    Difference,
    Judgement,
    MemoryChange,
    MetricChange,
    RowChange,
)
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Metric, Result

VOLATILE = ("load", "date", "time", "created", "host", "pid", "uptime", "free", "available")
"""Environment keys with these prefixes describe when, not where: they never make two environments differ."""
RATE_TOLERANCE = 0.05
"""Probed rates (peak FLOP/s, bandwidth) differ a little from probe to probe on the same machine."""
TIMED = ("step_time_s", "tokens_per_s")
"""Metrics whose interval comes from the steps themselves."""
MOVERS = 12


def compare(a: Result, b: Result, force: bool = False) -> Comparison:
    """Compare b with a. Raises :class:`UserError` for two measured results of unlike environments, unless ``force``.

    A predicted against a measured result is always allowed: every ratio is then measured / predicted, a residual.
    """
    if a.source != b.source and a.source == "measured":
        a, b = b, a
    kind: ComparisonKind = (
        "prediction residual"
        if a.source != b.source
        else "measured vs measured"
        if a.source == "measured"
        else "predicted vs predicted"
    )
    differences = environment_differences(a.environment, b.environment) if kind == "measured vs measured" else []
    if differences and not force:
        listed = "; ".join(f"{d.key}: {d.a} | {d.b}" for d in differences)
        raise UserError(
            f"{_label(a)} and {_label(b)} were measured in unlike environments: {listed}",
            "measure both again on the same machine and code, or pass --force to compare them flagged",
        )
    out = Comparison(a=_label(a), b=_label(b), kind=kind, differences=differences, flagged=bool(differences))
    out.environment = dict(b.environment)
    out.commands = [r.command for r in (a, b) if r.command]
    out.metrics = [_metric(name, a, b, kind) for name in _names(a, b)]
    out.movers = _movers(a, b)
    out.memory = _memory(a, b)
    if a.experiment_id != b.experiment_id and kind == "prediction residual":
        out.notes.append("the prediction and the measurement are of different experiments")
    if out.flagged:
        out.notes.append("unlike environments: a difference may come from the machine, not from the plan")
    for r in (a, b):
        if r.status != "ok":
            out.notes.append(f"{_label(r)} did not finish: {r.status}: {r.reason}")
    return out


def environment_differences(a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    """Keys whose values make two measurements incomparable, sorted. Nested tables are compared entry by entry."""
    left, right = _flat(a), _flat(b)
    keys = sorted(k for k in left.keys() | right.keys() if not k.rpartition(".")[2].startswith(VOLATILE))
    return [
        Difference(key=k, a=_text(left.get(k)), b=_text(right.get(k)))
        for k in keys
        if not _alike(k, left.get(k), right.get(k))
    ]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, v in table.items():
        if isinstance(v, dict):
            out |= _flat(v, f"{prefix}{k}.")
        else:
            out[f"{prefix}{k}"] = v
    return out


def _alike(key: str, a: Any, b: Any) -> bool:
    if key.startswith(("peak_", "memory_bandwidth", "link")) and all(isinstance(v, (int, float)) for v in (a, b)):
        return bool(math.isclose(a, b, rel_tol=RATE_TOLERANCE))
    return bool(a == b)


def _text(value: Any) -> str:
    if value is None:
        return "not recorded"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _label(r: Result) -> str:
    return f"{r.name or r.experiment_id} ({r.source})"


def _names(a: Result, b: Result) -> list[str]:
    """Metrics of both in a's order, then those that only one has."""
    both = [n for n in a.metrics if n in b.metrics]
    return both + [n for n in (*a.metrics, *b.metrics) if n not in both]


def _metric(name: str, a: Result, b: Result, kind: ComparisonKind) -> MetricChange:
    ma, mb = a.metrics.get(name), b.metrics.get(name)
    known = ma or mb
    assert known is not None
    va, vb = a.metric(name), b.metric(name)
    out = MetricChange(name=name, unit=known.unit, a=va, b=vb)
    if ma is None or mb is None or not va or vb is None:
        return out
    out.ratio = vb / va
    if kind == "prediction residual":
        out.verdict = "residual"
        return out
    if not known.better:
        return out
    interval = _interval(name, a, b, ma, mb)
    if interval is None:
        out.verdict = "no interval" if kind == "measured vs measured" else ""
        return out
    out.ratio, out.low, out.high = interval
    out.verdict = judge(name, known.better, out.low, out.high)
    return out


def _interval(name: str, a: Result, b: Result, ma: Metric, mb: Metric) -> Interval | None:
    """Of b / a: from the steps themselves where both have them, else from the two metrics' own intervals."""
    if name in TIMED:
        rate = name == "tokens_per_s"  # per token, so that unequal batches still compare
        left, right = step_blocks(a.samples, per_token=rate), step_blocks(b.samples, per_token=rate)
        if left and right:
            return ratio_ci(left, right) if rate else ratio_ci(right, left)
    ends = (ma.low, ma.high, mb.low, mb.high)
    if any(e is None or e <= 0 for e in ends):
        return None
    la, ha, lb, hb = (math.log(e) for e in ends if e is not None)
    middle = math.log(mb.value / ma.value)
    # Independent errors add in squares; on a log scale a ratio is a difference.
    half = math.hypot((ha - la) / 2, (hb - lb) / 2)
    return Interval(mb.value / ma.value, math.exp(middle - half), math.exp(middle + half))


def judge(name: str, better: str, low: float, high: float) -> Judgement:
    """What the interval of a ratio b / a of a metric says about b; ``better``: lower or higher."""
    gain = (low, high) if better == "higher" else (1 / high, 1 / low)
    word = verdict(*gain, margin=MARGIN)
    if word == "no difference" or name.endswith("_s") or name.startswith("tokens_per_s"):
        return word
    return "better" if word == "faster" else "worse"


def _movers(a: Result, b: Result) -> list[RowChange]:
    seconds: dict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, r in enumerate((a, b)):
        for row in r.breakdown:
            seconds[row.phase, row.module, row.operator, row.kind][side] += row.seconds
    if not (a.breakdown and b.breakdown):
        return []
    ranked = sorted(seconds.items(), key=lambda kv: -abs(kv[1][1] - kv[1][0]))[:MOVERS]
    return [
        RowChange(phase=p, module=m, operator=o, kind=k, a_seconds=s[0], b_seconds=s[1]) for (p, m, o, k), s in ranked
    ]


def _memory(a: Result, b: Result) -> list[MemoryChange]:
    if not (a.memory and b.memory):
        return []
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, r in enumerate((a, b)):
        for m in r.memory:
            found[m.category][side] += m.bytes
    return [MemoryChange(category=c, a_bytes=v[0], b_bytes=v[1])
            for c, v in sorted(found.items(), key=lambda kv: -max(kv[1]))]  # fmt: skip
