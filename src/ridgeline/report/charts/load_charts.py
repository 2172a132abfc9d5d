"""Pictures of a served load: distributions of latencies, and latency against throughput."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.report.charts.chart import GRAY, MEASURED, PREDICTED, SPARE, Chart, Figure, axis, layout, plain
from ridgeline.report.table import Column, Table
from ridgeline.report.units import TIMES, Scale, scale, seconds
from ridgeline.spec.result import Result

NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "end to end"}
LINES = (MEASURED, "#3a9a5b", "#a2488a", "#d8b93c", "#66b8dd", "#e0606e", *SPARE)
LIMITS = {"ttft_s": "slo_ttft", "tpot_s": "slo_tpot"}


def cdf_charts(results: Sequence[Result]) -> list[Chart]:
    """One picture per latency: the share of requests (for ITL: of gaps) within a time; a line per result."""
    return [c for key in NAMES if (c := _cdf(results, key)) is not None]


def _cdf(results: Sequence[Result], key: str) -> Chart | None:
    known = [r for r in results if r.distributions.get(key)]
    if not known:
        return None
    unit = scale([max(r.distributions[key]) for r in known], TIMES)
    data = []
    for i, r in enumerate(known):
        points = r.distributions[key]
        share = [100 * k / max(1, len(points) - 1) for k in range(len(points))]
        predicted = r.source == "predicted"
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": plain(_label(r)), "x": [p / unit.factor for p in points],
                "y": share,
                "line": {"width": 2, "color": PREDICTED if predicted else LINES[i % len(LINES)],
                         "dash": "dash" if predicted else "solid"},
                "hovertemplate": f"{plain(_label(r))}<br>%{{y:.1f}} % within %{{x:.4g}} {unit.label}<extra></extra>",
            }
        )  # fmt: skip
    figure: Figure = {"data": data, "layout": layout(340, xaxis=axis(f"{NAMES[key]}, {unit.label}", rangemode="tozero"),
                                                     yaxis=axis("", ticksuffix=" %", range=[0, 101]))}  # fmt: skip
    figure["layout"]["shapes"] = _limit(known, key, unit)
    rows = [[_label(r), *(seconds(r.metric(f"{key[:-2]}{q}_s")) for q in ("", "_p50", "_p90", "_p99"))] for r in known]
    columns = [Column("Load", align="left"), *(Column(c) for c in ("mean", "p50", "p90", "p99"))]
    what = "gaps between chunks" if key == "itl_s" else "requests"
    return Chart(f"cdf-{key[:-2]}", f"Distribution of {NAMES[key]}", f"Share of {what} that took at most so long; a"
                 " dotted line is the limit of a good request.", figure, Table(NAMES[key], columns, rows),
                 wide=False)  # fmt: skip


def _limit(results: Sequence[Result], key: str, unit: Scale) -> list[Figure]:
    limits = {r.experiment.get("workload", {}).get(LIMITS.get(key, ""), None) for r in results} - {None}
    return [{"type": "line", "xref": "x", "yref": "paper", "x0": v / unit.factor, "x1": v / unit.factor, "y0": 0,
             "y1": 1, "line": {"color": GRAY, "width": 1.5, "dash": "dot"}} for v in sorted(limits)]  # fmt: skip


def throughput_latency_charts(results: Sequence[Result]) -> list[Chart]:
    """p50 and p99 of TTFT and TPOT against generated tokens/s, one point per load; nothing for a single load."""
    known = [r for r in results if r.metric("tokens_per_s")]
    if len(known) < 2:
        return []
    return [c for key in ("ttft", "tpot") if (c := _against(known, key)) is not None]


def _against(results: Sequence[Result], key: str) -> Chart | None:
    unit = scale([r.metric(f"{key}_{q}_s") for r in results for q in ("p50", "p90", "p99")], TIMES)
    data = []
    for quantile, color, dash in (("p50", MEASURED, "solid"), ("p90", "#66b8dd", "dash"), ("p99", "#e0606e", "dot")):
        points = [(r.metrics["tokens_per_s"].value, m, _label(r)) for r in results
                  if (m := r.metrics.get(f"{key}_{quantile}_s"))]  # fmt: skip
        if not points:
            continue
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": quantile, "x": [p[0] for p in points],
                "y": [p[1].value / unit.factor for p in points], "text": [plain(p[2]) for p in points],
                "error_y": {"type": "data", "symmetric": False, "thickness": 1.5, "width": 5,
                            "array": [((m.high or m.value) - m.value) / unit.factor for _, m, _ in points],
                            "arrayminus": [(m.value - (m.low or m.value)) / unit.factor for _, m, _ in points]},
                "line": {"width": 2, "color": color, "dash": dash}, "marker": {"size": 8},
                "hovertemplate": f"%{{text}}<br>%{{x:.4g}} tokens/s, {quantile} %{{y:.4g}} {unit.label}"
                                 "<extra></extra>",
            }
        )  # fmt: skip
    if not data:
        return None
    name = NAMES[f"{key}_s"]
    figure = {"data": data, "layout": layout(360, xaxis=axis("generated tokens/s", rangemode="tozero"),
                                             yaxis=axis(f"{name}, {unit.label}", rangemode="tozero"))}  # fmt: skip
    rows = [
        [_label(r), *(unit.say(r.metric(f"{key}_{q}_s")) for q in ("p50", "p90", "p99")),
         f"{r.metrics['tokens_per_s'].value:.4g}"]
        for r in results
    ]  # fmt: skip
    columns = [Column("Load", align="left"), Column(f"p50, {unit.label}"), Column("p90"), Column("p99"),
               Column("Tokens/s")]  # fmt: skip
    text = f"Each point is one load: what the server gave, and the {name} that went with it, with 95 % intervals."
    return Chart(f"throughput-{key}", f"{name} against throughput", text, figure, Table(name, columns, rows),
                 wide=False)  # fmt: skip


def _label(r: Result) -> str:
    return f"{r.name or r.experiment_id}{', predicted' if r.source == 'predicted' else ''}"
