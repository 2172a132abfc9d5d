"""The HTML file around the charts: one document, everything inlined, nothing loaded.

The content security policy makes the browser itself refuse any network access from the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import Any

from ridgeline.report.charts.chart import Chart
from ridgeline.report.definitions import DEFINITIONS
from ridgeline.report.table import html as table_html
from ridgeline.report.units import count, size

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
NAMES = {
    "tokens_per_s": "tokens/s", "tokens_per_s_per_device": "tokens/s per device", "step_time_s": "step time",
    "peak_bytes": "peak memory", "mfu": "MFU", "hfu": "HFU", "ttft_s": "TTFT", "tpot_s": "TPOT",
    "exposed_communication_s": "exposed communication", "speedup": "speed-up", "memory_ratio": "memory of baseline",
    "interval": "95 % interval", "warmup": "warm-up", "roof": "of roof", "same": "same (✓ ✗)",
}  # fmt: skip


def page(title: str, lead: str, sections: Sequence[str], charts: Sequence[Chart]) -> str:
    """The whole document. ``title`` and ``lead`` are text; ``sections`` are HTML made by this module."""
    figures = {c.id: c.figure for c in charts}
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · Ridgeline</title>
<style>{_resource("page.css")}</style>
</head>
<body>
<main>
<header><p class="brand">Ridgeline</p><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>
{"".join(sections)}
</main>
<script type="application/json" id="figures">{script_json(figures)}</script>
<script>{_chart_code() if charts else ""}</script>
<script>{_resource("page.js")}</script>
</body>
</html>
"""


def section(title: str, body: str, text: str = "") -> str:
    """A titled part of the page. ``body`` is HTML."""
    lead = f"<p>{escape(text)}</p>" if text else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"


def chart_section(chart: Chart) -> str:
    """The picture, how to read it, and its numbers, which open without JavaScript."""
    height = int(chart.figure["layout"]["height"])
    numbers = (
        f"<details><summary>Numbers</summary>{table_html(chart.table)}</details>" if chart.table is not None else ""
    )
    return (
        f'<section class="chart{" wide" if chart.wide else ""}"><h2>{escape(chart.title)}</h2>'
        f'<p>{escape(chart.text)}</p><div class="plot" data-chart="{escape(chart.id)}" style="min-height:{height}px">'
        f"<noscript>The chart needs JavaScript; its numbers are below.</noscript></div>{numbers}</section>"
    )


def chart_grid(charts: Sequence[Chart]) -> str:
    """Charts in page order, narrow ones side by side."""
    return f'<div class="grid">{"".join(chart_section(c) for c in charts)}</div>'


def definitions() -> str:
    """Every metric of the report, defined."""
    items = "".join(
        f"<dt>{escape(NAMES.get(k, k.replace('_', ' ')))}</dt><dd>{escape(v)}</dd>" for k, v in DEFINITIONS.items()
    )
    return section("Definitions", f"<details><summary>What each number means</summary><dl>{items}</dl></details>")


def reproduce(command: str, environment: dict[str, Any], created: str, key: str) -> str:
    """The command, the environment and the identity of the document."""
    rows = "".join(
        f'<tr><th scope="row">{escape(k.replace("_", " "))}</th><td>{escape(_text(k, v))}</td></tr>'
        for k, v in environment.items()
    )
    shown = f"<pre>{escape(command)}</pre>" if command else '<p class="note">No command was recorded.</p>'
    facts = f'<p class="note">{escape(" · ".join(x for x in (key, created) if x))}</p>'
    table = f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>' if rows else ""
    return section("Environment and command", shown + table + facts)


def bullets(title: str, items: Sequence[str], kind: str = "") -> str:
    """A list of sentences; nothing when there are none."""
    if not items:
        return ""
    entries = "".join(f"<li>{escape(i)}</li>" for i in items)
    return f'<section class="{kind}"><h2>{escape(title)}</h2><ul>{entries}</ul></section>'


def script_json(data: Any) -> str:
    """JSON that may stand inside a script element: no ``<`` can end it early. What is not finite becomes null."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _text(key: str, value: Any) -> str:
    """A fact of the environment, human-readable."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(key, v)}" for k, v in value.items())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if key.endswith("bytes"):
        return size(value)
    unit = {"peak_flops": "FLOP/s", "memory_bandwidth": "B/s"}.get(key)
    return count(value, unit) if unit else f"{value:.6g}" if isinstance(value, float) else str(value)


def _resource(name: str) -> str:
    return files("ridgeline.report").joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _chart_code() -> str:
    """What draws the figures, 0.6 MB: built from ``web/src/report.ts`` with ECharts (Apache-2.0)."""
    return _resource("charts.js")
