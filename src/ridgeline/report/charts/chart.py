"""Chart, and what all charts share: colors that mean the same thing everywhere, and a quiet layout.

Colors of text and grid are left to the page, which knows whether it is light or dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from ridgeline.report.table import Table

Figure = dict[str, Any]

MEASURED = "#2f6db3"
PREDICTED = "#d9822b"
GRAY = "#9aa3ad"

# Paul Tol's "bright" and "muted" schemes: distinguishable with any common color blindness. One color per idea: what the
# optimizer does is green in time as in bytes, communication is red, what is left over is gray.
BLUE, CYAN, GREEN, YELLOW, RED, PURPLE = "#4477aa", "#66b8dd", "#3a9a5b", "#d8b93c", "#e0606e", "#a2488a"
COLORS = {
    "forward": BLUE, "backward": CYAN, "optimizer": GREEN, "communication": RED, "other": GRAY, "prefill": BLUE,
    "decode": CYAN, "recompute": YELLOW,
    "parameters": BLUE, "gradients": CYAN, "activations": YELLOW, "temporaries": PURPLE, "buffers": "#7d6bb0",
    "kv_cache": RED, "framework": GRAY,
    "gemm": BLUE, "attention": CYAN, "softmax": "#88ccee", "norm": YELLOW, "elementwise": "#c78a3a",
    "embedding": "#7d6bb0", "loss": PURPLE, "collective": RED, "copy": "#b0605e", "unattributed": GRAY,
    "bmm": "#7d6bb0", "all_gather": RED, "reduce_scatter": "#b8434f", "all_reduce": "#f09aa2", "clip": "#8fce9f",
    "residual": "#c78a3a", "activation": "#e6d48a", "rope": "#44aa99", "cast": "#b0605e", "mask": "#6f7a86",
    "smaller kinds": "#c3cad1", "qkv": "#7d6bb0", "mlp": BLUE, "output": "#b0605e", "head": GREEN,
}  # fmt: skip
SPARE = ("#44aa99", "#882255", "#999933", "#cc6677", "#332288")


@dataclass
class Chart:
    """One picture: how to read it in a sentence, the figure, and its numbers as a table."""

    id: str
    title: str
    text: str
    figure: Figure
    table: Table | None = None
    wide: bool = True
    """Takes the page's whole width; else two stand side by side."""


def color(name: str) -> str:
    """The color of a phase, kind or memory category; the same name always gets the same one."""
    return COLORS.get(name) or SPARE[sum(name.encode()) % len(SPARE)]


def plain(text: str, longest: int = 36) -> str:
    """A user's text for a label, whose tooltips render HTML; truncated to leave room for the picture."""
    return escape(text if len(text) <= longest else text[: longest - 1] + "…", quote=False)


def layout(height: int, **more: Any) -> Figure:
    """The shared layout. Dictionaries in ``more`` are axes, legend and the like."""
    return {
        "height": height,
        "margin": {"l": 10, "r": 24, "t": 12, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13},
        "hoverlabel": {"font": {"family": FONT}},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "bargap": 0.35,
        **more,
    }


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def axis(title: str = "", **more: Any) -> Figure:
    """An axis with its title, that makes room for its labels."""
    return {"title": {"text": title, "standoff": 10}, "automargin": True, "zeroline": False, **more}


def plans_axis(labels: list[str], **more: Any) -> Figure:
    """A vertical axis of plans at 0, 1, 2 …, the first on top."""
    n = len(labels)
    return axis(tickvals=list(range(n)), ticktext=[plain(x) for x in labels], range=[n - 0.5, -0.5], showgrid=False,
                ticks="", **more)  # fmt: skip


def rows_height(rows: int, each: int = 34) -> int:
    """Pixels for horizontal bars, the legend and the axis."""
    return 110 + each * max(rows, 2)
