"""A page per technique: what it does, its effect as claimed, predicted and measured, its options, its pairs."""

from __future__ import annotations

from typing import Any

from ridgeline import catalog
from ridgeline.docs.effects import Effect
from ridgeline.docs.markdown import table
from ridgeline.spec.plan import Plan
from ridgeline.spec.system import System
from ridgeline.techniques.cards import card, state
from ridgeline.techniques.matrix import Pair
from ridgeline.techniques.parts import PARTS
from ridgeline.techniques.registry import registry
from ridgeline.validate.systems import reproduce


def technique_markdown(name: str, pairs: list[Pair], effects: list[Effect]) -> str:
    """``docs/techniques/NAME.md``. ``pairs``: the support matrix; ``effects``: the rows of the table of effects."""
    c = card(registry()[name])
    parts = [
        f"# `{name}`: {c['title']}",
        c["summary"],
        _facts(c),
        "## Effect",
        table("| | setting | effect |", [[e.source, e.setting, e.says] for e in effects]),
        "Results of benchmarks are in `benchmarks/results`. A prediction's own error is on the page"
        " [Accuracy](../accuracy.md); a claim is the paper's, on the paper's hardware.",
        "## Options",
        _options(c),
        f"```bash\nridgeline techniques {name}\n```",
        "## Together with others",
        _company(name, pairs, c),
    ]
    systems = [s for s in map(catalog.system, catalog.systems()) if Plan.parse([*s.plan, *s.mixture]).has(name)]
    if systems:
        rows = [[f"`{s.name}`", s.title, s.claim, _reproduced(s)] for s in systems]
        parts += [
            "## Systems that use it",
            table("| name | system | the paper's claim | its numbers, predicted |", rows),
        ]
    return "\n\n".join(parts) + "\n"


def _facts(c: dict[str, Any]) -> str:
    contract = f"lossless: the same loss within {c['tolerance']:g}" if c["lossless"] else f"lossy: {c['quality']}"
    lines = [
        f"- **Paper:** {_paper(c['paper'])}",
        f"- **Tasks:** {', '.join(c['tasks'])}. **Phase:** {c['phase']}. **In the field's map:** {c['taxonomy']}",
        f"- **Contract:** {contract}",
    ]
    if not c["runs"]:
        lines.append("- **State:** " + state(c))
    return "\n".join(lines)


def _paper(text: str) -> str:
    kind, _, rest = text.partition(":")
    site = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}.get(kind)
    return f"[{text}]({site}{rest})" if site else text


def _options(c: dict[str, Any]) -> str:
    if not c["options"]:
        return f"None: write `{c['name']}`."
    rows = [[f"`{o['name']}`", o["type"].replace("|", "or"), _default(o["default"]), o["help"]] for o in c["options"]]
    return table("| option | type | default | meaning |", rows)


def _default(value: Any) -> str:
    """As written in a plan; empty if there is none."""
    text = "+".join(map(str, value)) if isinstance(value, (list, tuple)) else "" if value is None else str(value)
    return f"`{text}`" if text else ""


def _company(name: str, pairs: list[Pair], c: dict[str, Any]) -> str:
    own = registry()[name].card
    lines = []
    for title, parts in (("Owns", own.owns), ("Changes", own.changes)):
        if parts:
            lines.append(f"- **{title}:** {'; '.join(sorted(PARTS[p] for p in parts))}")
    for title, reasons in (("Needs", own.needs), ("Does not go with", own.conflicts)):
        lines += [f"- **{title}** {PARTS[p]}: {why.format(other='the other')}" for p, why in reasons.items()]
    mine = [p for p in pairs if name in (p.a, p.b)]
    works = sorted({p.a, p.b} - {name} for p in mine if p.status == "works")
    links = ", ".join(f"[`{n}`]({n}.md)" for n in sorted(x for pair in works for x in pair))
    lines.append(f"- **Works with** (each pair has a parity test): {links or 'none'}")
    refused = [p for p in mine if p.status == "refused"]
    tasks = set(c["tasks"])
    for p in refused:
        other = p.b if p.a == name else p.a
        if tasks & registry()[other].card.tasks:
            lines.append(f"- **Refused with** [`{other}`]({other}.md): {p.reason}")
    return "\n".join(lines)


def _reproduced(s: System) -> str:
    r = reproduce(s)
    reported = s.reported
    if r.predicted is None:
        return f"nothing to compare: {reported.says}"
    show = "{:.2e} bytes" if reported.quantity == "states_bytes" else "{:.3g}"
    ours, theirs = show.format(r.predicted / reported.apart), show.format(reported.value)
    return f"{reported.quantity} {theirs} reported, {ours} predicted ({reported.says})"
