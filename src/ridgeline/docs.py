"""``python -m ridgeline.docs`` writes the generated pages: ``catalogue.md`` from the technique cards and the support
matrix, ``architecture.md`` from the packages and their imports."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.techniques.cards import cards, unpredicted
from ridgeline.techniques.matrix import Pair, support_matrix

SOURCE = Path(__file__).parent
FLOORS = [
    ("spec", "catalog"),
    ("report", "jobs", "data"),
    ("graph", "nn"),
    ("runtime",),
    ("techniques",),
    ("predict", "train", "compress", "serve"),
    ("search", "measure", "validate"),
    ("cli",),
]
"""The packages, lowest floor first: none imports one on a higher floor (a test)."""


def catalogue_markdown() -> str:
    """The technique catalog and the support matrix as one Markdown page."""
    found = cards()
    parts = [
        "# Technique catalog",
        "Generated from the cards in `ridgeline/techniques`. Claims are the papers' own, on the papers' hardware.",
        *(_card(c) for c in found),
        "# Support matrix",
        "Every pair either has a passing parity test (✓), can be predicted but not yet run (○), or is refused with a"
        " reason (✗).",
        _matrix(support_matrix(), {c["name"]: set(c["tasks"]) for c in found}),
    ]
    return "\n\n".join(parts) + "\n"


def _card(c: dict[str, Any]) -> str:
    contract = f"lossless (same loss within {c['tolerance']:g})" if c["lossless"] else f"lossy: {c['quality']}"
    lines = [
        f"## `{c['name']}` — {c['title']}",
        "",
        c["summary"],
        "",
        f"- **Paper:** {c['paper']}. **Claim:** {c['claim']}",
        f"- **Tasks:** {', '.join(c['tasks'])}. **Phase:** {c['phase']}. **Place:** {c['taxonomy']}",
        f"- **Contract:** {contract}",
        *([] if c["runs"] else ["- **State:** predicted only; not yet run"]),
        *(f"- **Predicted as without it** in {tasks}: {why}" for why, tasks in unpredicted(c).items()),
    ]
    if c["options"]:
        lines += ["", "| option | type | default | meaning |", "|---|---|---|---|"]
        for o in c["options"]:
            kind = o["type"].replace("|", "or")  # a bar would end the cell
            lines.append(f"| `{o['name']}` | {kind} | `{o['default']}` | {o['help']} |")
    return "\n".join(lines)


def _matrix(pairs: list[Pair], tasks: dict[str, set[str]]) -> str:
    names = sorted({p.a for p in pairs} | {p.b for p in pairs})
    status = {frozenset((p.a, p.b)): p for p in pairs}
    lines = ["| | " + " | ".join(f"`{n}`" for n in names) + " |", "|---" * (len(names) + 1) + "|"]
    for a in names:
        marks = []
        for b in names:
            p = status.get(frozenset((a, b))) if a != b else None
            marks.append("" if p is None else p.mark)
        lines.append(f"| `{a}` | " + " | ".join(marks) + " |")
    refused = [p for p in pairs if p.status == "refused"]
    together = [p for p in refused if tasks[p.a] & tasks[p.b]]
    lines += ["", *(f"- `{p.a}` × `{p.b}`: {p.reason}" for p in together)]
    if len(together) < len(refused):
        lines.append("- The other pairs marked ✗ have no task in common.")
    return "\n".join(lines)


def architecture_markdown() -> str:
    """The packages as they are: a picture of the floors, and what each package and its parts are for."""
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
        parts += [f"## `{room}`", _summary(SOURCE / room)]
        if inner:
            parts.append("\n".join(f"- `{f.name}`: {_summary(f)}" for f in inner))
    return "\n\n".join(parts) + "\n"


def _summary(package: Path) -> str:
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


def main() -> None:
    """Write the pages below the current directory's ``docs``, or in the directory given."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs")
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in (("catalogue.md", catalogue_markdown), ("architecture.md", architecture_markdown)):
        (folder / name).write_text(page(), encoding="utf-8")
        print(f"wrote {folder / name}", file=sys.stderr)


if __name__ == "__main__":
    main()
