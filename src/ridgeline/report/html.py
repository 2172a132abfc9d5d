"""Reports: an ablation, one result, or a comparison as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ridgeline.report.charts.chart import Chart
from ridgeline.report.charts.load_charts import cdf_charts, throughput_latency_charts
from ridgeline.report.charts.moved import movers_charts
from ridgeline.report.charts.pareto import pareto_chart
from ridgeline.report.charts.roofline import roofline_chart
from ridgeline.report.charts.speed import speedup_chart, tokens_chart
from ridgeline.report.charts.stack import memory_chart, step_charts
from ridgeline.report.charts.steps import loss_charts, step_chart
from ridgeline.report.charts.trust import trust_charts
from ridgeline.report.charts.waterfall import waterfall_chart
from ridgeline.report.files import write_atomic
from ridgeline.report.page import bullets, chart_grid, definitions, page, reproduce, section
from ridgeline.report.table import Column, Table
from ridgeline.report.table import html as table_html
from ridgeline.report.tables import (
    ablation_memory_table,
    comparison_tables,
    failures,
    latency_table,
    load_tables,
    quality_table,
    result_tables,
    speed_table,
)
from ridgeline.report.units import metric, percent, size, times
from ridgeline.spec.ablation import Ablation, Outcome
from ridgeline.spec.comparison import Comparison
from ridgeline.spec.result import Result


def ablation_html(a: Ablation, path: Path) -> Path:
    """Write the report of an ablation; returns the path."""
    plans = [(o.name, [r for r in (o.measured, o.predicted) if r is not None]) for o in a.outcomes]
    charts = [pareto_chart(a), speedup_chart(a), tokens_chart(a), *trust_charts(a), *step_charts(plans),
              memory_chart(plans), *_waterfalls(a), *_rooflines(a), *loss_charts(a)]  # fmt: skip
    drawn = [c for c in charts if c is not None]
    quality = quality_table(a)
    summary = table_html(quality) if len(quality.columns) > 1 else ""
    latency = latency_table(a)
    summary += table_html(speed_table(a)) + (table_html(latency) if len(latency.columns) > 1 else "")
    summary += table_html(ablation_memory_table(a))
    sections = [
        section("Verdict", summary),
        bullets("Plans that failed", failures(a), "failed"),
        bullets("Caveats", _caveats(a), "caveats"),
        chart_grid(drawn),
        section("Plans and checks", table_html(_plans(a))),
        definitions(),
        reproduce(a.command, a.environment, a.created, f"ablation {a.id}"),
    ]
    return write_atomic(path, page(a.name or f"Ablation {a.id}", headline(a), sections, drawn))


def result_html(r: Result, path: Path) -> Path:
    """Write the report of one result; returns the path."""
    name = r.name or r.experiment_id
    charts = [*cdf_charts([r]), *step_charts([(name, [r])]), waterfall_chart(r), roofline_chart(r),
              None if r.distributions else step_chart(r)]  # fmt: skip
    drawn = [c for c in charts if c is not None]
    rate = r.metric("tokens_per_s")
    facts = [
        f"{r.source} on {_machine(r.environment)}",
        metric(rate, "tokens/s") if rate else "",
        f"{size(r.peak_bytes)} at the peak" if r.peak_bytes else "",
        "" if r.status == "ok" else f"failed: {r.status}: {r.reason}",
    ]
    sections = [
        section("Numbers", "".join(table_html(t) for t in result_tables(r))),
        bullets("Notes", r.notes, "caveats"),
        chart_grid(drawn),
        definitions(),
        reproduce(r.command, r.environment, r.created, f"experiment {r.experiment_id}"),
    ]
    return write_atomic(path, page(name, " · ".join(f for f in facts if f), sections, drawn))


def load_html(results: Sequence[Result], path: Path) -> Path:
    """Write the report of one load or a sweep of several; returns the path."""
    last = results[-1]
    charts = [*throughput_latency_charts(results), *cdf_charts(results)]
    best = max(results, key=lambda r: r.metric("goodput_per_s") or 0.0)
    facts = [
        str(last.environment.get("endpoint", "")),
        f"{metric(best.metric('goodput_per_s'), 'requests/s')} within the limits at most" if _limited(last) else "",
        f"{metric(max(r.metric('tokens_per_s') or 0.0 for r in results), 'tokens/s')} at most",
    ]
    notes = [f"{r.name}: {n}" if len(results) > 1 else n for r in results for n in r.notes]
    sections = [
        section("Numbers", "".join(table_html(t) for t in load_tables(results))),
        bullets("Notes", notes, "caveats"),
        chart_grid(charts),
        definitions(),
        reproduce(last.command, last.environment, last.created, f"experiment {last.experiment_id}"),
    ]
    model = last.experiment.get("model")
    served = model.get("name", "") if isinstance(model, dict) else model
    title = last.name if len(results) == 1 else f"{len(results)} loads on {served}"
    return write_atomic(path, page(title, " · ".join(f for f in facts if f), sections, charts))


def comparison_html(c: Comparison, path: Path) -> Path:
    """Write the report of a comparison; returns the path."""
    tables = comparison_tables(c)
    by_word = {t.title.split()[0]: t for t in tables}
    charts = movers_charts(c, by_word)
    alike = [t for t in tables if t is tables[0] or t.title.startswith("Unlike")]
    sections = [
        section("Numbers", "".join(table_html(t) for t in alike)),
        chart_grid(charts),
        definitions(),
        reproduce("\n".join(dict.fromkeys(c.commands)), c.environment, "", f"environment of {c.b}"),
    ]
    return write_atomic(path, page(f"{c.b} against {c.a}", c.kind, sections, charts))


def headline(a: Ablation) -> str:
    """The result in one line: fastest, smallest peak, failed."""
    good = [o for o in a.outcomes if o.measured is not None and o.measured.status == "ok"]
    parts = []
    faster = [o for o in good if o.verdict == "faster" and o.speedup is not None]
    if faster:
        best = max(faster, key=_gain)
        parts.append(f"fastest: {best.name}, {times(_gain(best))} the baseline's tokens/s")
    elif any(o.verdict == "no difference" for o in good):
        parts.append("no plan was shown to be faster than the baseline")
    lean = [o for o in good if o.memory_ratio is not None]
    if lean:
        least = min(lean, key=lambda o: o.memory_ratio or 1.0)
        if (least.memory_ratio or 1.0) < 1:
            parts.append(f"leanest: {least.name}, {percent(least.memory_ratio)} of its memory")
    failed = [o for o in a.outcomes if o.measured is not None and o.measured.status != "ok"]
    if failed:
        parts.append(f"{len(failed)} of {len(a.outcomes)} plans failed")
    if not good:
        parts.append("predicted only: nothing was measured")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""


def _limited(r: Result) -> bool:
    work = r.experiment.get("workload", {})
    return work.get("slo_ttft") is not None or work.get("slo_tpot") is not None


def _gain(o: Outcome) -> float:
    return o.speedup.value if o.speedup else 0.0


def _waterfalls(a: Ablation) -> list[Chart]:
    """Waterfalls of the baseline and of the plan with the smallest peak."""
    known = [o for o in a.outcomes if o.measured is not None and o.measured.memory]
    leanest = min(known, key=lambda o: (o.measured and o.measured.peak_bytes) or 0.0, default=None)
    chosen = [o for o in known if o.name == a.baseline or o is leanest]
    charts = [waterfall_chart(o.measured, f"waterfall-{i}", o.name) for i, o in enumerate(chosen) if o.measured]
    return [c for c in charts if c is not None]


def _rooflines(a: Ablation) -> list[Chart]:
    """Rooflines of the baseline and of the fastest plan, measured where there is a measured breakdown."""
    ranked = sorted((o for o in a.outcomes if o.verdict == "faster"), key=_gain, reverse=True)
    chosen = [o for o in a.outcomes if o.name == a.baseline] + ranked[:1]
    out: list[Chart] = []
    for i, o in enumerate(chosen):
        r = next((x for x in (o.measured, o.predicted) if x is not None and x.breakdown), None)
        chart = roofline_chart(r, a.environment, f"roofline-{i}") if r is not None else None
        if chart is not None:
            out.append(chart)
    for chart in out:
        chart.wide = len(out) == 1
    return out


def _caveats(a: Ablation) -> list[str]:
    """The ablation's own notes, then those that its results share, once each."""
    found = list(a.notes)
    for o in a.outcomes:
        for r in (o.measured, o.predicted):
            found += [f"{o.name}: {c.name} – failed" for c in (r.checks if r else []) if not c.passed]
        found += [f"{o.name}: not the same as the baseline: {c.name}" for c in o.checks if not c.passed]
    unclear = [o.name for o in a.outcomes if o.too_noisy]
    if unclear:
        found.append(
            f"{', '.join(unclear)}: the interval of the speed-up is too wide for a verdict; measure again with more"
            " repeats, on a machine that does nothing else"
        )
    noted: dict[str, list[str]] = {}
    for o in a.outcomes:
        for n in o.measured.notes if o.measured and o.measured.status == "ok" else []:
            noted.setdefault(n, []).append(o.name)
    return list(dict.fromkeys(found)) + [f"{', '.join(names)}: {n}" for n, names in noted.items()]


def _plans(a: Ablation) -> Table:
    rows = []
    for o in a.outcomes:
        checks = "; ".join(_check(c.name, c.passed, c.expected, c.got, c.tolerance) for c in o.checks) or "–"
        rows.append([o.name, ", ".join(o.plan) or "no technique", checks])
    columns = [Column("Plan", align="left"), Column("Techniques", align="left"), Column("Checks", "same", "left")]
    return Table("What each plan switches on", columns, rows)


def _check(name: str, passed: bool, expected: float | None, got: float | None, tolerance: float | None) -> str:
    numbers = f" ({got:.5g} for {expected:.5g}" if got is not None and expected is not None else ""
    bound = f", tolerance {tolerance:g})" if numbers and tolerance is not None else ")" if numbers else ""
    return f"{'✓' if passed else '✗'} {name}{numbers}{bound}"


def _machine(environment: dict[str, Any]) -> str:
    return str(environment.get("gpu") or environment.get("cpu") or environment.get("device") or "an unnamed machine")
