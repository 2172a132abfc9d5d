"""The time and the bytes of one step: breakdown rows, grouped; memory by kind. The totals add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ridgeline.report.table import Column, Table
from ridgeline.report.units import NONE, TIMES, count, percent, scale, size
from ridgeline.spec.result import Result, Row

KEYS = ("phase", "module", "operator", "kind")


def grouped(rows: Sequence[Row], by: Sequence[str] = ("module", "phase", "operator")) -> list[Row]:
    """Rows summed over every key that is not in ``by``, longest first. ``roof`` is averaged over time."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for r in rows:
        groups[tuple(getattr(r, k) for k in by)].append(r)
    out = []
    for key, members in groups.items():
        named = dict(zip(by, key, strict=True))
        roofed = [(r.roof, r.seconds) for r in members if r.roof is not None]
        weight = sum(s for _, s in roofed)
        out.append(
            Row(
                **{k: named.get(k, "") for k in KEYS},
                seconds=sum(r.seconds for r in members),
                count=sum(r.count for r in members),
                flops=sum(r.flops for r in members),
                bytes=sum(r.bytes for r in members),
                link_bytes=sum(r.link_bytes for r in members),
                roof=sum(roof * s for roof, s in roofed) / weight if weight else None,
                exposed_seconds=sum(r.seconds if r.exposed_seconds is None else r.exposed_seconds for r in members),
            )
        )
    return sorted(out, key=lambda r: -r.seconds)


def attributed(result: Result) -> list[Row]:
    """The breakdown with an explicit ``unattributed`` row: the part of the step time that the rows do not cover."""
    rows = list(result.breakdown)
    step = result.metric("step_time_s")
    if not rows or step is None or any(r.kind == "unattributed" for r in rows):
        return rows
    # Hidden work shares the step's time with what hides it, so only exposed seconds count towards the step.
    known = sum(r.seconds if r.exposed_seconds is None else r.exposed_seconds for r in rows)
    gap = max(0.0, step - known)
    return [*rows, Row(phase="other", module="", operator="unattributed", kind="unattributed", seconds=gap, count=0)]


def breakdown_table(result: Result, by: Sequence[str] = ("module", "phase", "operator"), top: int = 25) -> Table:
    """Time by ``by``, the ``top`` longest rows, the rest in one row, ``unattributed`` apart, and a total that sums."""
    rows = attributed(result)
    lost = [r for r in rows if r.kind == "unattributed"]
    listed = grouped([r for r in rows if r.kind != "unattributed"], by)
    total = sum(r.seconds for r in rows)
    unit = scale([total], TIMES)
    cells = [_line([getattr(r, k) or NONE for k in by], r, total, unit.factor) for r in listed[:top]]
    if len(listed) > top:
        rest = grouped(listed[top:], ())[0]
        cells.append(_line([f"({len(listed) - top} smaller rows)", *[""] * (len(by) - 1)], rest, total, unit.factor))
    if lost:
        cells.append(_line(["unattributed", *[""] * (len(by) - 1)], grouped(lost, ())[0], total, unit.factor))
    if rows:
        cells.append(_line(["total", *[""] * (len(by) - 1)], grouped(rows, ())[0], total, unit.factor))
    columns = [*(Column(k.capitalize(), align="left") for k in by), Column(f"Time, {unit.label}"),
               Column("Share", "share"), Column("Calls"), Column("FLOPs"), Column("Bytes"), Column("Link bytes"),
               Column("Of roof", "roof")]  # fmt: skip
    step = result.metric("profiled_step_s") or result.metric("step_time_s")  # measured rows are of a profiled step
    notes = []
    if step is not None and total > 1.01 * step:
        notes.append(
            f"the rows add up to {percent(total / step)} of the step time: some of them run at the same time (overlap)"
        )
    title = f"Time of one {_whole(result)} by {' × '.join(by)}, {result.source}"
    return Table(title, columns, cells, notes, total=bool(rows)).without_empty_columns()


MODULES = (
    ("attention.q_proj", "qkv"), ("attention.k_proj", "qkv"), ("attention.v_proj", "qkv"), ("attention.qkv", "qkv"),
    ("attention.q_rope", "rope"), ("attention.k_rope", "rope"), ("attention.rope", "rope"),
    ("attention.o_proj", "output"),
    ("attention.reduce", "communication"), ("attention_norm", "norm"), ("attention_residual", "residual"),
    ("attention", "attention"), ("mlp_norm", "norm"), ("mlp_residual", "residual"), ("mlp.reduce", "communication"),
    ("mlp", "mlp"), ("norm", "norm"), ("embed", "embedding"), ("head", "head"), ("loss", "loss"), ("block", "residual"),
)  # fmt: skip
"""Module of a layer that a row belongs to, by the beginning of its operator's name (predicted) or of its module's
(measured); the first that fits."""


def parts_of(r: Result, by: str = "module") -> dict[str, float]:
    """Exposed seconds of a step by phase, or by phase and module as ``forward/qkv``."""
    found: dict[str, float] = {}
    for row in r.breakdown:
        seconds = row.seconds if row.exposed_seconds is None else row.exposed_seconds
        names = (row.operator, row.module)
        module = next((m for name in names for start, m in MODULES if name.startswith(start)), row.module)
        name = row.phase if by == "phase" else f"{row.phase}/{module}"
        found[name] = found.get(name, 0.0) + seconds
    return found


def parts_table(predicted: Result, measured: Result) -> Table:
    """Time by phase and module, predicted beside measured under the profiler."""
    sides = [parts_of(predicted), parts_of(measured)]
    order = sorted({**sides[0], **sides[1]}, key=lambda k: -max(side.get(k, 0.0) for side in sides))
    totals = [sum(side.values()) for side in sides]
    unit = scale(totals, TIMES)
    rows = [
        [*name.split("/", 1), *(f"{side[name] / unit.factor:.3f}" if name in side else NONE for side in sides),
         *(percent(side[name] / total) if name in side else NONE for side, total in zip(sides, totals, strict=True))]
        for name in order
    ]  # fmt: skip
    rows.append(["total", "", *(f"{t / unit.factor:.3f}" for t in totals), *(percent(1.0) for _ in totals)])
    columns = [Column("Phase", align="left"), Column("Module", align="left"), Column(f"Predicted, {unit.label}"),
               Column(f"Measured, {unit.label}"), Column("Share predicted"), Column("Share measured")]  # fmt: skip
    return Table("Predicted beside measured", columns, rows, total=True)


def memory_table(result: Result) -> Table:
    """Bytes at the peak by category; the total is the peak of one rank."""
    total = result.peak_bytes or 0.0
    rows = [[m.category, size(m.bytes), percent(m.bytes / total) if total else NONE, m.device]
            for m in sorted(result.memory, key=lambda m: -m.bytes)]  # fmt: skip
    if rows:
        rows.append(["total", size(total), percent(1.0), ""])
    columns = [Column("Category", align="left"), Column("Size", "peak_bytes"), Column("Share", "share"),
               Column("Where", align="left")]  # fmt: skip
    return Table(f"Memory at the peak by category, {result.source}", columns, rows, total=bool(rows))


def _whole(result: Result) -> str:
    """What the breakdown describes."""
    generated = "e2e_s" in result.metrics and "batch_mean" not in result.metrics
    return "generation" if generated else "step"


def _line(names: list[str], r: Row, total: float, unit: float) -> list[str]:
    return [
        *names,
        f"{r.seconds / unit:.3f}" if unit else NONE,
        percent(r.seconds / total) if total else NONE,
        f"{r.count:g}" if r.count else NONE,
        count(r.flops) if r.flops else NONE,
        size(r.bytes) if r.bytes else NONE,
        size(r.link_bytes) if r.link_bytes else NONE,
        percent(r.roof) if r.roof is not None else NONE,
    ]
