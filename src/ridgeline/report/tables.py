"""Ablation, Result and Comparison as tables for people (Markdown, terminal, HTML) and as records for machines (CSV)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ridgeline.report import table as render
from ridgeline.report.dissection import breakdown_table, memory_table
from ridgeline.report.table import Column, Record, Table
from ridgeline.report.units import COUNTS, NONE, SIZES, TIMES, Scale, metric, number, percent, scale, seconds, times
from ridgeline.spec.ablation import Ablation, Outcome
from ridgeline.spec.comparison import Comparison
from ridgeline.spec.result import MEMORY_CATEGORIES, Metric, Result

if TYPE_CHECKING:
    from rich.console import Group

Reportable = Ablation | Result | Comparison
LOPSIDED = 2.0
"""An interval whose ends differ by more than this factor is written with both ends, not as ±."""


def tables(x: Reportable, width: int | None = None) -> list[Table]:
    """The tables of a document. ``width``: characters of the terminal; None: as wide as it takes."""
    if isinstance(x, Ablation):
        return ablation_tables(x, width)
    return result_tables(x) if isinstance(x, Result) else comparison_tables(x)


def to_markdown(x: Reportable) -> str:
    """Markdown that pastes into GitHub."""
    return render.markdown(tables(x))


def to_rich(x: Reportable, width: int | None = 140) -> Group:
    """For ``rich.print``, in at most ``width`` characters where that can be done by leaving out detail."""
    return render.rich(tables(x, width))


def to_csv(x: Reportable) -> str:
    """The :func:`records` as comma-separated lines."""
    return render.csv_text(records(x))


def records(x: Reportable) -> list[dict[str, Any]]:
    """One per plan (ablation) or per metric (result, comparison): SI units, whole bytes."""
    if isinstance(x, Ablation):
        return [_outcome_record(o) for o in x.outcomes]
    if isinstance(x, Result):
        found: list[dict[str, Any]] = [{"metric": k, **m.model_dump()} for k, m in x.metrics.items()]
        return found + [{"metric": f"memory.{m.category}", "value": round(m.bytes), "unit": "bytes"} for m in x.memory]
    return [m.model_dump() for m in x.metrics]


def ablation_tables(a: Ablation, width: int | None = None) -> list[Table]:
    """Speed and loss check first, then memory; predicted beside measured in one cell."""
    speed, memory, quality, latency = speed_table(a), ablation_memory_table(a), quality_table(a), latency_table(a)
    if width is not None and memory.width > width:
        memory = ablation_memory_table(a, side_by_side=False)
    speed.notes += failures(a)
    return [part for t in (quality, speed, latency, memory) if len(t.columns) > 1 for part in fit(t, width)]


def speed_table(a: Ablation) -> Table:
    """Per plan: tokens/s, residual, step time, speed-up with verdict, loss, held-out loss and the sameness check."""
    sides = [r for o in a.outcomes for r in (o.predicted, o.measured)]
    rate = scale([r.metric("tokens_per_s") for r in sides if r], COUNTS)
    step = scale([r.metric("step_time_s") for r in sides if r], TIMES)
    rows = []
    for o in a.outcomes:
        rows.append(
            [
                o.name,
                verdict_text(o),
                speedup_text(o),
                both(_value(o.predicted, "tokens_per_s", rate), _spread(o.measured, "tokens_per_s", rate)),
                percent(residual(o, "tokens_per_s"), signed=True),
                sameness(o),
                NONE if (loss := final_loss(o.measured)) is None else f"{loss:.4f}",
                NONE if (held := _held_out(o.measured)) is None else f"{held:.4f}",
                both(_value(o.predicted, "step_time_s", step), _spread(o.measured, "step_time_s", step)),
            ]
        )
    columns = [
        Column("Plan", align="left"),
        Column("Verdict", "verdict", "left"),
        Column("Speed-up", "speedup"),
        Column(f"{rate.label} tokens/s, pred | meas".strip(), "tokens_per_s"),
        Column("Residual", "residual"),
        Column("Same", "same"),
        Column("Loss", "loss"),
        Column("Held out", "held_out"),
        Column(f"Step time, {step.label}, pred | meas", "step_time_s"),
    ]
    return Table(f"Speed of {len(a.outcomes)} plans against {a.baseline}", columns, rows).without_empty_columns()


LATENCIES = (("ttft_p50_s", "TTFT"), ("tpot_p50_s", "TPOT"), ("e2e_p50_s", "End to end"))


def latency_table(a: Ablation) -> Table:
    """Per plan of a served load: median latencies with their residuals, and how full the engine's steps were."""
    sides = [r for o in a.outcomes for r in (o.predicted, o.measured)]
    served = any(r and "ttft_p50_s" in r.metrics and "batch_mean" in r.metrics for r in sides)
    columns = [Column("Plan", align="left")]
    rows = [[o.name] for o in a.outcomes]
    for name, title in LATENCIES if served else ():
        unit = scale([r.metric(name) for r in sides if r], TIMES)
        columns += [Column(f"{title} p50, {unit.label}, pred | meas", name), Column("Residual")]
        for row, o in zip(rows, a.outcomes, strict=True):
            row += [both(_value(o.predicted, name, unit), _spread(o.measured, name, unit)),
                    percent(residual(o, name), signed=True)]  # fmt: skip
    for name, title in (("batch_mean", "Tokens per step"), ("preemptions", "Sent back")) if served else ():
        columns.append(Column(f"{title}, pred | meas", name))
        for row, o in zip(rows, a.outcomes, strict=True):
            row.append(both(*(metric(r.metric(name), "") if r else NONE for r in (o.predicted, o.measured))))
    return Table("Latencies of the same requests", columns, rows).without_empty_columns()


def quality_table(a: Ablation) -> Table:
    """Per plan of a compression: perplexity and its change, bits per weight, bytes, layer error, time it took."""
    sides = [r for o in a.outcomes for r in (o.predicted, o.measured)]
    unit = scale([r.metric("checkpoint_bytes") for r in sides if r], SIZES)
    rows = []
    for o in a.outcomes:
        m, worse = o.measured, o.perplexity_ratio
        found = m.metrics.get("perplexity") if m else None
        bits = [r.metric("bits_per_weight") if r else None for r in (o.predicted, m)]
        error, took = (m.metric(k) if m else None for k in ("layer_error", "compress_s"))
        rows.append(
            [
                o.name,
                NONE if found is None else f"{found.value:.3f}",
                NONE if worse is None else _change(worse),
                both(*(NONE if b is None else f"{b:.2f}" for b in bits)) if found else NONE,
                both(_value(o.predicted, "checkpoint_bytes", unit), _value(m, "checkpoint_bytes", unit)),
                NONE if error is None else f"{number(100 * error)} %",
                seconds(took),
            ]
        )
    columns = [Column("Plan", align="left"), Column("Perplexity", "perplexity"),
               Column("Change", "perplexity_ratio"), Column("Bits per weight, pred | meas", "bits_per_weight"),
               Column(f"Checkpoint, {unit.label}, pred | meas", "checkpoint_bytes"),
               Column("Layer error", "layer_error"), Column("Took", "compress_s")]  # fmt: skip
    if not any(o.measured and "perplexity" in o.measured.metrics for o in a.outcomes):
        return Table("", columns[:1], [])
    return Table("Quality and size", columns, rows).without_empty_columns()


def _change(ratio: Metric) -> str:
    """+1.23 % [+1.10, +1.36] of a ratio."""
    low, high = (f"{100 * ((v if v is not None else ratio.value) - 1):+.2f}" for v in (ratio.low, ratio.high))
    return f"{100 * (ratio.value - 1):+.2f} % [{low}, {high}]"


def ablation_memory_table(a: Ablation, side_by_side: bool = True) -> Table:
    """Per plan: peak bytes of one rank and the categories at that peak. Otherwise one value per category."""
    sides = [r for o in a.outcomes for r in (o.predicted, o.measured)]
    unit = scale([_peak(r) for r in sides], SIZES)
    categories = memory_categories([r for r in sides if r])
    rows = []
    for o in a.outcomes:
        cells = [o.name, both(unit.say(_peak(o.predicted)), unit.say(_peak(o.measured))),
                 percent(peak_residual(o), signed=True), times(o.memory_ratio)]  # fmt: skip
        for c in categories:
            p, m = unit.say(_category(o.predicted, c)), unit.say(_category(o.measured, c))
            cells.append(both(p, m) if side_by_side else m if m != NONE else p)
        rows.append(cells)
    columns = [Column("Plan", align="left"), Column("Peak, pred | meas", "peak_bytes"),
               Column("Residual", "residual"), Column("Of baseline", "memory_ratio"),
               *(Column(c.replace("_", " ").capitalize()) for c in categories)]  # fmt: skip
    notes = [] if side_by_side else ["categories: as measured, or as predicted where nothing was measured"]
    return Table(f"Peak memory of one rank, {unit.label}", columns, rows, notes).without_empty_columns()


def fit(t: Table, width: int | None) -> list[Table]:
    """The table cut into as many as it takes to fit ``width`` characters, each with the first column. None: uncut."""
    if width is None or t.width <= width:
        return [t]
    parts: list[list[int]] = [[0]]
    for i in range(1, len(t.columns)):
        if len(parts[-1]) > 1 and t.only([*parts[-1], i]).width > width:
            parts.append([0])
        parts[-1].append(i)
    cut = [t.only(keep) for keep in parts]
    for later in cut[:-1]:
        later.notes = []
    return cut


def result_tables(r: Result) -> list[Table]:
    """Metrics, checks, memory and breakdown of one result."""
    rows = [
        [k, metric(m.value, m.unit), _interval(m), str(m.n) if m.n is not None else NONE, m.source or NONE]
        for k, m in r.metrics.items()
    ]
    columns = [Column("Metric", align="left"), Column("Value"), Column("95 % interval", "interval"), Column("n"),
               Column("Source", align="left")]  # fmt: skip
    out = [Table(f"{r.name or r.experiment_id}, {r.source}", columns, rows, metrics=True).without_empty_columns()]
    if r.status != "ok":
        out[0].notes.append(f"failed: {r.status}: {r.reason}")
    if r.checks:
        out.append(checks_table(r))
    out += [t for t in (memory_table(r), breakdown_table(r)) if t.rows]
    return out


def load_tables(results: Sequence[Result]) -> list[Table]:
    """Loads on a server: throughput, then latencies, one line per load; percentiles that n does not support are –."""
    given, late = [], []
    unit = {k: scale([r.metric(f"{k}_{q}_s") for r in results for q in ("p50", "p90", "p99")], TIMES)
            for k in ("ttft", "tpot", "itl", "e2e")}  # fmt: skip
    for r in results:
        get = r.metric
        given.append(
            [r.name, metric(get("offered_per_s"), ""), metric(get("requests_per_s"), ""),
             metric(get("tokens_per_s"), "tokens/s"), metric(get("concurrency_mean"), ""),
             _share(r.metrics.get("slo_share")), metric(get("goodput_per_s"), ""),
             f"{get('errors') or 0:.0f} of {get('requests') or 0:.0f}", seconds(get("schedule_lag_s")), r.status]
        )  # fmt: skip
        for k, name in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "end to end")):
            u = unit[k]
            if f"{k}_s" in r.metrics:
                late.append([r.name, f"{name}, {u.label}", _value(r, f"{k}_s", u),
                             *(_spread(r, f"{k}_{q}_s", u) for q in ("p50", "p90", "p99"))])  # fmt: skip
    heads = [Column("Load", align="left"), Column("Offered/s"), Column("Answered/s"), Column("Generated"),
             Column("Under way"), Column("Within limits", "slo_share"), Column("Goodput/s", "goodput_per_s"),
             Column("Errors"), Column("Sent late", "schedule_lag_s"), Column("Status", align="left")]  # fmt: skip
    columns = [Column("Load", align="left"), Column("Latency", align="left"), Column("Mean"), Column("p50"),
               Column("p90"), Column("p99")]  # fmt: skip
    return [Table("What the server gave", heads, given).without_empty_columns(),
            Table("Latencies, with 95 % intervals", columns, late)]  # fmt: skip


def _share(m: Metric | None) -> str:
    if m is None:
        return NONE
    ends = f" [{percent(m.low)}, {percent(m.high)}]" if m.low is not None and m.high is not None else ""
    return percent(m.value) + ends


def checks_table(r: Result) -> Table:
    """Identities and bounds that were tested, with the numbers beside the rule."""
    rows = [
        [
            "✓" if c.passed else "✗",
            c.name,
            NONE if c.expected is None else number(c.expected, 4),
            NONE if c.got is None else number(c.got, 4),
            NONE if c.tolerance is None else f"{c.tolerance:g}",
            c.note,
        ]
        for c in r.checks
    ]
    columns = [Column("", align="left"), Column("Check", align="left"), Column("Expected"), Column("Got"),
               Column("Tolerance"), Column("Note", align="left")]  # fmt: skip
    return Table("Checks", columns, rows).without_empty_columns()


def comparison_tables(c: Comparison) -> list[Table]:
    """Metric by metric; what moved; memory; and what differs between the environments."""
    predicted = c.kind == "prediction residual"
    rows = []
    for m in c.metrics:
        interval = NONE if m.low is None or m.high is None else f"[{number(m.low)}, {number(m.high)}]"
        change = NONE if m.ratio is None else percent(m.ratio - 1, signed=True)
        rows.append([m.name, metric(m.a, m.unit), metric(m.b, m.unit), times(m.ratio), interval, change, m.verdict])
    columns = [Column("Metric", align="left"), Column(c.a), Column(c.b), Column("Ratio"), Column("95 %", "interval"),
               Column("Residual" if predicted else "Change", "residual" if predicted else ""),
               Column("Verdict", "verdict", "left")]  # fmt: skip
    first = Table(f"{c.b} against {c.a}: {c.kind}", columns, rows, list(c.notes), metrics=True)
    out = [first.without_empty_columns()]
    if c.movers:
        unit = scale([s for r in c.movers for s in (r.a_seconds, r.b_seconds)], TIMES)
        moved = [
            [r.phase, r.module, r.operator, unit.say(r.a_seconds), unit.say(r.b_seconds),
             f"{(r.b_seconds - r.a_seconds) / unit.factor:+.3g}"] for r in c.movers
        ]  # fmt: skip
        heads = [Column("Phase", align="left"), Column("Module", align="left"), Column("Operator", align="left"),
                 Column(c.a), Column(c.b), Column("Change")]  # fmt: skip
        out.append(Table(f"What moved most, {unit.label}", heads, moved))
    if c.memory:
        unit = scale([b for m in c.memory for b in (m.a_bytes, m.b_bytes)], SIZES)
        kept = [
            [m.category, unit.say(m.a_bytes), unit.say(m.b_bytes), f"{(m.b_bytes - m.a_bytes) / unit.factor:+.3g}"]
            for m in c.memory
        ]
        heads = [Column("Category", align="left"), Column(c.a), Column(c.b), Column("Change")]
        out.append(Table(f"Memory at the peak, {unit.label}", heads, kept))
    if c.differences:
        heads = [Column("Environment", align="left"), Column(c.a, align="left"), Column(c.b, align="left")]
        out.append(Table("Unlike environments", heads, [[d.key, d.a, d.b] for d in c.differences]))
    return out


def failures(a: Ablation) -> list[str]:
    """One sentence per plan that did not finish."""
    return [
        f"{o.name}: {r.source} {r.status}: {r.reason or 'no reason was recorded'}"
        for o in a.outcomes
        for r in (o.measured, o.predicted)
        if r is not None and r.status != "ok"
    ]


def verdict_text(o: Outcome) -> str:
    """The verdict; for a failed plan, with how it failed; for one without a baseline, why."""
    if o.verdict != "failed":
        return o.verdict
    known = o.measured or o.predicted
    if known is None:
        return "failed"
    if known.status != "ok":
        return f"failed: {known.status}"
    return "not measured" if o.measured is None else "no baseline"


def speedup_text(o: Outcome) -> str:
    """1.42× [1.38, 1.46]; a predicted one is marked."""
    s = o.speedup
    if s is None:
        return NONE if o.predicted_speedup is None else f"{times(o.predicted_speedup)} pred"
    if o.verdict == "baseline" or s.low is None or s.high is None:
        return times(s.value)
    return f"{times(s.value)} [{_factor(s.low)}, {_factor(s.high)}]"


def _factor(ratio: float) -> str:
    """An end of an interval; beyond a factor of 100 digits are meaningless."""
    return "<0.01" if ratio < 0.01 else ">100" if ratio > 100 else f"{ratio:.2f}"


def sameness(o: Outcome) -> str:
    """✓ when every check of the plan passed, ✗ when one did not, – when none was made."""
    return NONE if not o.checks else "✓" if all(c.passed for c in o.checks) else "✗"


def residual(o: Outcome, name: str) -> float | None:
    """Measured / predicted − 1 of a metric; None unless both are known."""
    p = o.predicted.metric(name) if o.predicted else None
    m = o.measured.metric(name) if o.measured else None
    return m / p - 1 if p and m is not None else None


def peak_residual(o: Outcome) -> float | None:
    """Measured / predicted − 1 of the peak memory."""
    p, m = _peak(o.predicted), _peak(o.measured)
    return m / p - 1 if p and m is not None else None


def _held_out(r: Result | None) -> float | None:
    """Held-out loss after the last step."""
    return r.metric("eval_loss") if r else None


def final_loss(r: Result | None) -> float | None:
    """The last loss: the metric where there is one, else the last sample's."""
    if r is None:
        return None
    known = r.metric("final_loss")
    return known if known is not None else next((s.loss for s in reversed(r.samples) if s.loss is not None), None)


def memory_categories(results: Sequence[Result]) -> list[str]:
    """Categories that occur, in the schema's order, then any others."""
    found = {m.category for r in results for m in r.memory if m.bytes}
    return [c for c in MEMORY_CATEGORIES if c in found] + sorted(found - set(MEMORY_CATEGORIES))


def both(predicted: str, measured: str) -> str:
    """Predicted and measured in one cell."""
    return NONE if predicted == measured == NONE else f"{predicted} | {measured}"


def _peak(r: Result | None) -> float | None:
    if r is None:
        return None
    return r.peak_bytes if r.peak_bytes is not None else r.metric("peak_bytes")


def _category(r: Result | None, category: str) -> float | None:
    return sum(m.bytes for m in r.memory if m.category == category) if r and r.memory else None


def _value(r: Result | None, name: str, unit: Scale) -> str:
    return unit.say(r.metric(name) if r else None)


def _spread(r: Result | None, name: str, unit: Scale) -> str:
    """12.3 ± 0.2: the half-width of the 95 % interval."""
    m = r.metrics.get(name) if r else None
    if m is None or m.low is None or m.high is None:
        return _value(r, name, unit)
    if m.low <= 0 or m.high / m.low > LOPSIDED:
        return f"{unit.say(m.value)} [{unit.say(m.low, 2)}, {unit.say(m.high, 2)}]"
    return f"{unit.say(m.value)} ± {number((m.high - m.low) / 2 / unit.factor, 2)}"


def _interval(m: Metric) -> str:
    return NONE if m.low is None or m.high is None else f"{metric(m.low, m.unit)} – {metric(m.high, m.unit)}"


def _outcome_record(o: Outcome) -> Record:
    out: Record = {"plan": o.name, "techniques": " ".join(o.plan), "verdict": o.verdict}
    out |= {"speedup": None, "speedup_low": None, "speedup_high": None, "predicted_speedup": o.predicted_speedup}
    if o.speedup:
        out |= {"speedup": o.speedup.value, "speedup_low": o.speedup.low, "speedup_high": o.speedup.high}
    for side, r in (("predicted", o.predicted), ("measured", o.measured)):
        out[f"{side}_status"] = r.status if r else None
        for name in ("tokens_per_s", "step_time_s"):
            m = r.metrics.get(name) if r else None
            out[f"{side}_{name}"] = m.value if m else None
            if side == "measured":
                out |= {f"{side}_{name}_low": m.low if m else None, f"{side}_{name}_high": m.high if m else None}
        out |= {f"{side}_{name}": r.metric(name) for name, _ in LATENCIES if r and name in r.metrics}
        peak = _peak(r)
        out[f"{side}_peak_bytes"] = None if peak is None else round(peak)
        for c in MEMORY_CATEGORIES:
            size = _category(r, c)
            out[f"{side}_{c}_bytes"] = None if size is None else round(size)
    for name in ("perplexity", "bits_per_weight", "checkpoint_bytes", "layer_error", "compress_s"):
        out[name] = o.measured.metric(name) if o.measured else None
    out["perplexity_ratio"] = o.perplexity_ratio.value if o.perplexity_ratio else None
    out |= {"loss": final_loss(o.measured), "held_out_loss": _held_out(o.measured), "memory_ratio": o.memory_ratio}
    out["same"] = {"✓": "yes", "✗": "no"}.get(sameness(o))
    return out
