"""``python -m ridgeline.docs``: writes ``docs/catalogue.md`` from the technique cards and the support matrix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ridgeline.techniques.cards import cards, unpredicted
from ridgeline.techniques.matrix import Pair, support_matrix


def catalogue_markdown() -> str:
    """The technique catalogue and the support matrix as one Markdown page."""
    found = cards()
    parts = [
        "# Technique catalogue",
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


def main() -> None:
    """Write the page below the current directory's ``docs``."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/catalogue.md")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(catalogue_markdown(), encoding="utf-8")
    print(f"wrote {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
