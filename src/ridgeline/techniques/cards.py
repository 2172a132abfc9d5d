"""Cards as plain data, for the command line, the documentation and the search."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from functools import cache
from itertools import pairwise
from typing import Any

from ridgeline.spec.system import System
from ridgeline.techniques.registry import partners, registry
from ridgeline.techniques.technique import PHASES, Technique

_PARSING = threading.Lock()
"""Held while source is parsed: Python 3.11 counts the depth of all threads' trees together, and fails."""


def card(cls: type[Technique]) -> dict[str, Any]:
    """One technique's card with its options (name, type, default, meaning)."""
    c = cls.card
    schema, meanings = cls.model_json_schema().get("properties", {}), _meanings(cls)
    options = [
        {
            "name": name,
            "type": _type(schema.get(name, {})),
            "default": field.get_default(call_default_factory=True),
            "help": " ".join(meanings.get(name, "").split()),
        }
        for name, field in cls.model_fields.items()
    ]
    return {
        "name": c.name,
        "title": c.title,
        "summary": " ".join((cls.__doc__ or "").split()),
        "paper": c.paper,
        "taxonomy": c.taxonomy,
        "tasks": sorted(c.tasks),
        "phase": cls.phase,
        "lossless": c.lossless,
        "tolerance": c.tolerance,
        "quality": c.quality,
        "claim": c.claim,
        "min_ranks": c.min_ranks,
        "requires": list(partners(cls.model_validate(dict(c.example)))),
        "unpredicted": dict(c.unpredicted),
        "runs": c.runs,
        "runs_by": c.runs_by,
        "options": options,
    }


@cache
def _meanings(cls: type[Technique]) -> dict[str, str]:
    """The docstrings below a class's options. Pydantic would collect them whenever the classes are imported, which
    takes longer than all else there."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(Technique)]):
        with _PARSING:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = str(ast.literal_eval(text.value))
    return found


def classes() -> list[type[Technique]]:
    """Every technique, in phase order."""
    return sorted(registry().values(), key=lambda t: (PHASES.index(t.phase), t.order, t.card.name))


def cards() -> list[dict[str, Any]]:
    """The cards of all :func:`classes`."""
    return [card(cls) for cls in classes()]


def card_table(c: dict[str, Any]) -> str:
    """A card as readable text."""
    lines = [
        f"{c['name']}: {c['title']}",
        "",
        f"  {c['summary']}",
        "",
        f"  paper     {c['paper']}",
        f"  claim     {c['claim']}",
        f"  place     {c['taxonomy']}, phase {c['phase']}",
        f"  tasks     {', '.join(c['tasks'])}",
        f"  contract  {_contract(c)}",
        *([] if c["runs"] else [f"  state     {state(c)}"]),
        *(f"  the same  in {tasks}: {why}" for why, tasks in unpredicted(c).items()),
        "",
        "  options" if c["options"] else "  no options",
    ]
    for o in c["options"]:
        lines.append(f"    {o['name']} = {_value(o['default'])}  ({o['type']})  {o['help']}")
    example = c["options"][0] if c["options"] else None
    use = f"{c['name']}:{example['name']}={_value(example['default'])}" if example else c["name"]
    return "\n".join([*lines, "", f"  use       --with {use}"])


def state(c: dict[str, Any]) -> str:
    """Where a technique is run that engines do not run."""
    return f"run by `{c['runs_by']}`, predicted in a plan" if c["runs_by"] else "can be predicted, not yet run"


def unpredicted(c: dict[str, Any]) -> dict[str, str]:
    """{reason why the technique changes no prediction: the tasks in which that holds}."""
    found: dict[str, list[str]] = {}
    for task, why in sorted(c["unpredicted"].items()):
        found.setdefault(why, []).append(task)
    return {why: ", ".join(tasks) for why, tasks in found.items()}


def system_card(s: System) -> dict[str, Any]:
    """One system of the literature as plain data."""
    return {**s.model_dump(), "kind": "system"}


def system_table(s: System) -> str:
    """A system's card as readable text."""
    reported, small = s.reported, s.shrunk
    workload = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in reported.workload.items() if k != "kind")
    task = f" --task {reported.workload['kind']}" if "kind" in reported.workload else ""
    lines = [
        f"{s.name}: {s.title} (a system: a named plan)",
        "",
        f"  {s.summary}",
        "",
        f"  paper     {s.paper}",
        f"  claim     {s.claim}",
        f"  place     {s.taxonomy}",
        f"  reported  {_reported(s)}",
        "",
        "  plan",
        *(f"    {call}" for call in s.plan),
        *(f"    {call}  (for a mixture of experts)" for call in s.mixture),
        "",
        f"  on {small.ranks} ranks ({s.name}:ranks={small.ranks}){': ' if small.note else ''}{small.note}",
        *(f"    {call}" for call in small.plan),
        *(f"    {call}  (for a mixture of experts)" for call in small.mixture),
        "",
        f"  use       --with {s.name}, and --with TECHNIQUE:option=value to override an option or add a technique",
        f"  paper's   ridgeline predict {reported.model} --on {reported.on}{task} --with {s.name} {workload}",
    ]
    return "\n".join(lines)


def _reported(s: System) -> str:
    r = s.reported
    if not r.quantity:
        return r.says
    value = {"hfu": f"{r.value:.1%} of peak", "states_bytes": f"{r.value / 1e9:.2f} GB of states per rank",
             "tokens_per_s": f"{r.value:.3g} tokens/s",
             "speedup": f"{r.value:g}x against {' '.join(r.against)}"}[r.quantity]  # fmt: skip
    return f"{value} ({r.says})"


def _contract(c: dict[str, Any]) -> str:
    if c["lossless"]:
        return f"lossless: same loss within {c['tolerance']:g} (relative, fp32)"
    return f"lossy: {c['quality']}"


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(str(v) for v in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "anyOf" in schema:  # optional
        return _type(schema["anyOf"][0])
    return str(schema.get("type", "value")).replace("array", "list, a+b")


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, value))
    return str(value)
