"""The architecture page: the packages, their imports and their purposes, read from the source files."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1]
FLOORS = [
    ("spec", "catalog", "hardware"),
    ("report", "jobs", "data"),
    ("graph", "nn"),
    ("runtime",),
    ("techniques",),
    ("predict", "train", "compress", "serve"),
    ("search", "measure", "validate", "fleet"),
    ("study", "swarm"),
    ("cli", "web", "docs"),
]
"""The packages, lowest floor first: none imports one on a higher floor (a test)."""


def architecture_markdown() -> str:
    """A picture of the floors, and the purpose of each package and its parts."""
    parts = [
        "# Architecture",
        "Generated from the packages and their imports. One Plan acts on two twins of a model: `graph` and `predict`"
        " know it as numbers, `nn` and the engines (`train`, `compress`, `serve`) run it. A technique stands between"
        " them and touches both: `techniques/FAMILY/NAME.py` holds its card, checks and analytic rewrite,"
        " `NAME_torch.py` beside it its torch half. A package imports only from its own floor and from those below.",
        _picture(),
    ]
    for room in (room for floor in reversed(FLOORS) for room in floor):
        inner = sorted(f.parent for f in (SOURCE / room).glob("*/__init__.py"))
        parts += [f"## `{room}`", summary(SOURCE / room)]
        if inner:
            parts.append("\n".join(f"- `{f.name}`: {summary(f)}" for f in inner))
    return "\n\n".join(parts) + "\n"


def summary(package: Path) -> str:
    """The first paragraph of a package's docstring, as Markdown."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


def imported(file: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it, lazily too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _picture() -> str:
    """An SVG of the floors; the thicker an arrow, the more files import from one package to the other."""
    width, height, gap = 150, 44, 46
    spots: dict[str, tuple[float, float]] = {}
    for level, rooms in enumerate(reversed(FLOORS)):
        for i, room in enumerate(rooms):
            spots[room] = (20 + (i + (4 - len(rooms)) / 2) * (width + 25), 20 + level * (height + gap))
    arrows: Counter[tuple[str, str]] = Counter()
    for room in spots:
        for file in (SOURCE / room).rglob("*.py"):
            others = {n.split(".")[1] for n in imported(file) if n.startswith("ridgeline.")}
            arrows.update((room, other) for other in others & spots.keys() - {room})
    lines = []
    for (a, b), count in sorted(arrows.items()):
        (x, y), (u, v) = spots[a], spots[b]
        lines.append(f'<line x1="{x + width / 2}" y1="{y + height}" x2="{u + width / 2}" y2="{v}" stroke="#8aa4c8"'
                     f' stroke-opacity="0.5" stroke-width="{0.5 + count**0.5 / 2:.1f}"/>')  # fmt: skip
    for room, (x, y) in spots.items():
        files = list((SOURCE / room).rglob("*.py"))
        size = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files)
        middle = x + width / 2
        lines.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="#eef3fa" stroke="#3d6098"/>'
                     f'<text x="{middle}" y="{y + 19}" text-anchor="middle" font-size="14">{room}</text>'
                     f'<text x="{middle}" y="{y + 36}" text-anchor="middle" font-size="10">{len(files)} files,'
                     f' {size} lines</text>')  # fmt: skip
    tall = 40 + len(FLOORS) * (height + gap)
    return f'<svg viewBox="0 0 740 {tall}" font-family="sans-serif">\n' + "\n".join(lines) + "\n</svg>"
