"""The technique catalog: every technique by family with a link to its page, the systems, and the support matrix."""

from __future__ import annotations

import inspect
from pathlib import Path

from ridgeline import catalog
from ridgeline.docs.architecture import SOURCE, summary
from ridgeline.techniques.cards import cards
from ridgeline.techniques.matrix import Pair
from ridgeline.techniques.registry import registry


def family(name: str) -> str:
    """The folder in ``techniques/`` of a technique."""
    return Path(inspect.getfile(registry()[name])).parent.name


def catalog_markdown(pairs: list[Pair]) -> str:
    """``docs/catalogue.md``. ``pairs``: the support matrix."""
    parts = [
        "# Technique catalog",
        "Every technique has a page: what it does, its options, what it goes with, and the paper's claim beside the"
        " effect that is predicted and the one measured here.",
    ]
    found = cards()
    for room in sorted({family(c["name"]) for c in found}):
        rows = [
            f"| [`{c['name']}`](techniques/{c['name']}.md) | {c['title']} | {', '.join(c['tasks'])}"
            f" | {'lossless' if c['lossless'] else 'lossy'}{'' if c['runs'] else ', predicted only'} |"
            for c in found
            if family(c["name"]) == room
        ]
        parts += [
            f"## {room.capitalize()}",
            summary(SOURCE / "techniques" / room),
            "\n".join(["| name | technique | tasks | contract |", "|---|---|---|---|", *rows]),
        ]
    parts += ["## Systems", "Plans of the literature by name, used wherever a technique is.", _systems()]
    parts += [
        "## Support matrix",
        "Every pair works together and has a passing parity test (✓), can be predicted but not yet run (○), or is"
        " refused (✗) with a reason, which the pages of the two give.",
        _matrix(pairs),
    ]
    return "\n\n".join(parts) + "\n"


def _systems() -> str:
    lines = ["| name | system | paper | techniques |", "|---|---|---|---|"]
    for name in catalog.systems():
        s = catalog.system(name)
        lines.append(f"| `{name}` | {s.title} | {s.paper} | {', '.join(f'`{call}`' for call in s.plan)} |")
    return "\n".join(lines)


def _matrix(pairs: list[Pair]) -> str:
    names = sorted({p.a for p in pairs} | {p.b for p in pairs})
    marks = {frozenset((p.a, p.b)): p.mark for p in pairs}
    lines = ["| | " + " | ".join(f"`{n}`" for n in names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| `{a}` | " + " | ".join(marks.get(frozenset((a, b)), "") for b in names) + " |" for a in names]
    return "\n".join(lines)
