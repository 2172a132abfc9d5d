"""Text output of an explanation: the time as a tree, the levers, and what the plan could change."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.text import Text
from rich.tree import Tree

from ridgeline.predict.explain import GAIN, Explanation, TimePart
from ridgeline.report.units import percent, seconds

SMALLEST = 0.004
"""Nodes below this fraction of the whole are combined into one line."""


def print_explanation(x: Explanation) -> None:
    """Print the tree, then what would have to change."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print(Group(_grow(x.tree), Text(), *(Text(line) for line in sentences(x))), soft_wrap=True)


def sentences(x: Explanation) -> list[str]:
    """Levers and moves in words."""
    out = [f"To gain {GAIN:.0%} in speed, one of these alone would have to be better:"]
    for lever in x.levers:
        if lever.factor is None:
            limit = "nothing" if lever.limit < 0.005 else f"at most {percent(lever.limit)}"
            out.append(f"  {lever.resource}: no factor is enough (without limit it gains {limit})")
        else:
            out.append(f"  {lever.resource}: {lever.factor:.2f}x")
    if x.moves:
        out.append("On this hardware, one change of the plan would gain:")
        for m in x.moves:
            fits = "" if m.fits else " - but it does not fit"
            out.append(f"  {m.change}: {percent(m.gain, signed=True)}{fits}")
    else:
        out.append("No single technique that is off would gain 1 %.")
    if x.result.status != "ok":
        out.append(f"This plan does not fit: {x.result.reason}")
    return out


def as_dict(x: Explanation) -> dict[str, Any]:
    """The ``--json`` document."""
    return {
        "metric": x.metric,
        "seconds": x.tree.seconds,
        "tree": _node(x.tree),
        "levers": [{"resource": v.resource, "factor": v.factor, "gain_without_limit": v.limit} for v in x.levers],
        "moves": [{"change": m.change, "gain": m.gain, "fits": m.fits, "note": m.note} for m in x.moves],
        "status": x.result.status,
        "reason": x.result.reason,
    }


def _node(n: TimePart) -> dict[str, Any]:
    return {
        "name": n.name, "seconds": n.seconds, "share": n.share, "bound": n.bound, "bounds": n.bounds, "note": n.note,
        "children": [_node(c) for c in n.children],
    }  # fmt: skip


def _grow(n: TimePart, into: Tree | None = None) -> Tree:
    tree = Tree(_line(n)) if into is None else into.add(_line(n))
    small = [c for c in n.children if abs(c.share) < SMALLEST]
    for child in n.children:
        if child not in small:
            _grow(child, tree)
    if small:
        rest = sum(c.share for c in small)
        tree.add(Text(f"{len(small)} smaller: {percent(rest)}", style="dim"))
    return tree


def _line(n: TimePart) -> Text:
    text = Text(f"{n.name}  ", style="bold" if n.children else "")
    text.append(f"{seconds(n.seconds)}  {percent(n.share)}", style="")
    if n.bounds:
        bounds = ", ".join(f"{k} {v:.0%}" for k, v in n.bounds.items() if v >= 0.05) if n.children else n.bound
        text.append(f"  [{bounds}]", style="cyan")
    if n.note:
        text.append(f"  {n.note}", style="dim")
    return text
