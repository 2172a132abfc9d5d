"""One page: every line predicted and measured, goals first."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, TypeGuard

from campaign.cells import commit, met, now, read
from ridgeline.report.files import write_atomic
from ridgeline.report.page import bullets, page, reproduce, section
from ridgeline.report.table import Column, Table
from ridgeline.report.table import html as table_html
from ridgeline.report.units import percent, seconds, size

PARTS = ("correctness", "probe", "kernels", "training", "serving", "offload")
WITHIN = 0.15
"""Maximum error of a prediction."""
FP8_GAIN = 1.3
"""Minimum throughput of training in fp8 relative to bf16 with the same plan."""
VLLM_SHARE = 0.8
"""Minimum throughput of decoding relative to vLLM with the same model and batch."""
PEERS_PROMPTS = ", 512 tokens"
"""How lines end that have the prompts of other engines' lines."""
HIDDEN = ("log", "losses", "failures", "until", "quartiles_s", "weights_bytes")


def write_report(folder: Path) -> Path:
    """``report.html`` of the parts that the folder has."""
    held = {part: read(folder / f"{part}.json") for part in PARTS}
    said = read(folder / "predictions.json")
    lines = [(part, line) for part, data in held.items() for line in data.get("lines", [])]
    environment = next((d["environment"] for d in held.values() if d), {"on": said.get("on", "")})
    sections = [
        section("Goals", table_html(_goals(lines))),
        section("Predictions", table_html(_errors(lines)),
                "Measured over predicted, where both are known. Predictions are of the data sheet: nothing that was"
                " measured here went into them."),
        bullets("What failed", [f"{part}, {r['name']}: {r['status']}: {r.get('reason', '')}" for part, r in lines
                                if r["status"] not in ("ok", "not installed")], "failed"),
        *(section(part.capitalize(), table_html(_part(part, held[part], said))) for part in PARTS
          if held[part] or part in said.get("lines", {})),
        reproduce("make gpu", environment, now(), commit() or ""),
    ]  # fmt: skip
    title = environment.get("gpu") or f"{environment['on']}, in small"
    done = sum(bool(d.get("finished")) for d in held.values())
    lead = f"{len(lines)} lines of {done} finished parts of {len(PARTS)}"
    return write_atomic(folder / "report.html", page(f"On {title}", lead, sections, []))


def _goals(lines: list[tuple[str, dict[str, Any]]]) -> Table:
    rows = [[part, line["name"], metric.replace("_", " "), goal["goal"], _text(metric, line["measured"][metric]),
             "✓" if goal["met"] else "✗"]
            for part, line in lines for metric, goal in line.get("goals", {}).items()]  # fmt: skip
    rows += [[part, name, what, f"{sign} {percent(bound) if sign == '<=' else f'{bound:g} x'}",
              percent(value) if sign == "<=" else f"{value:.2f} x", "✓" if met((sign, bound), value) else "✗"]
             for part, name, what, sign, bound, value in [*_compared(lines), *_predicted(lines)]]  # fmt: skip
    reached = sum(row[-1] == "✓" for row in rows)
    columns = [Column(t, align="left") for t in ("part", "line", "metric")] + [
        *map(Column, ("goal", "measured", "met"))
    ]
    return Table("goals", columns, rows, [f"{reached} of {len(rows)} met"])


Judged = tuple[str, str, str, str, float, float]
"""(part, line, what is judged, sign, bound, value)."""


def _compared(lines: list[tuple[str, dict[str, Any]]]) -> list[Judged]:
    """Goals of one line relative to another one: fp8 beside bf16, our decode steps beside vLLM's."""
    rates = {(part, line["name"]): line["measured"]["tokens_per_s"] for part, line in lines
             if line["status"] == "ok" and _number(line["measured"].get("tokens_per_s"))}  # fmt: skip
    found: list[Judged] = []
    for (part, name), rate in rates.items():
        model, _, rest = name.partition(", ")
        if part == "training" and rest.startswith("fp8"):
            wide = rest.replace("fp8 by rows", "fp8").replace("fp8", "bf16")
            other, what, goal = f"{model}, {wide}", "throughput over bf16's", FP8_GAIN
        elif part == "serving" and rest.startswith("bf16, decode") and rest.endswith(PEERS_PROMPTS):
            other = f"{model}, vLLM{rest.removeprefix('bf16').removesuffix(PEERS_PROMPTS)}"
            what, goal = "throughput over vLLM's", VLLM_SHARE
        else:
            continue
        if (part, other) in rates:
            found.append((part, name, what, ">=", goal, rate / rates[part, other]))
    return found


def _predicted(lines: list[tuple[str, dict[str, Any]]]) -> list[Judged]:
    """The goal of predictions: the median error of each part."""
    found: list[Judged] = []
    for part in PARTS:
        errors = [abs(r - 1) for p, _, _, r in ratios(lines) if p == part]
        if errors:
            found.append((part, "predictions", "median error", "<=", WITHIN, statistics.median(errors)))
    return found


def ratios(lines: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str, str, float]]:
    """(part, line, metric, measured over predicted) of every metric with both."""
    found = []
    for part, line in lines:
        said = ((line.get("predicted") or {}).get("figures")) or {}
        for metric, value in (line.get("measured") or {}).items():
            told = said.get(metric)
            if _number(value) and _number(told) and min(value, told) > 0:
                found.append((part, line["name"], metric, value / told))
    return found


def _errors(lines: list[tuple[str, dict[str, Any]]]) -> Table:
    rows = []
    for part in PARTS:
        mine = [abs(r - 1) for p, _, _, r in ratios(lines) if p == part]
        if mine:
            inside = sum(x <= WITHIN for x in mine)
            rows.append(
                [
                    part,
                    str(len(mine)),
                    percent(statistics.median(mine)),
                    percent(max(mine)),
                    percent(inside / len(mine)),
                ]
            )
    columns = [Column("part", align="left"), *map(Column, ("figures", "median error", "largest", "within 15 %"))]
    return Table("errors of predictions", columns, rows)


def _part(part: str, held: dict[str, Any], said: dict[str, Any]) -> Table:
    known = {line["name"]: line for line in held.get("lines", [])}
    predictions = said.get("lines", {}).get(part, {})
    rows = []
    for name in [*known, *(n for n in predictions if n not in known)]:
        line = known.get(name, {"status": "not measured"})
        told = ((line.get("predicted") or predictions.get(name) or {}).get("figures")) or {}
        found = line.get("measured") or {}
        metrics = [m for m in dict.fromkeys([*told, *found]) if m not in HIDDEN]
        first = True
        for metric in metrics or [""]:
            a, b = told.get(metric), found.get(metric)
            both = f"{b / a:.2f}" if _number(a) and _number(b) and a else ""
            rows.append([name if first else "", line["status"] if first else "", metric.replace("_", " "),
                         _text(metric, a), _text(metric, b), both])  # fmt: skip
            first = False
    columns = [Column("line", align="left"), Column("status", align="left"), Column("metric", align="left"),
               *map(Column, ("predicted", "measured", "ratio"))]  # fmt: skip
    return Table(part, columns, rows)


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(metric: str, value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    if not _number(value):
        return "" if value is None else str(value)
    if metric.endswith(("_s", "seconds")) and not metric.endswith("per_s"):
        return seconds(value)
    if metric.endswith("bytes"):
        return size(value)
    if metric in ("roof", "mfu", "share_of_bandwidth", "equal"):
        return percent(value)
    return f"{value:.4g}"
