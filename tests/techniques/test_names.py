"""No technique, and nothing in the core, knows a technique by its name: they ask for what it owns, changes or does.

Read from the syntax tree of every module: strings that are a technique's name, or begin with ``NAME:``, may stand in
that technique's own files only. Docstrings and sentences are free.
"""

import ast
import inspect
from functools import cache
from pathlib import Path

import pytest

import ridgeline
from ridgeline.techniques.registry import registry

ROOT = Path(ridgeline.__file__).parent
HOMES = {name: Path(inspect.getfile(cls)) for name, cls in registry().items()}

ORDINARY = {
    "fp8": "a dtype",
    "recompute": "a phase of techniques, a color, and a column of published tables",
    "gptq": "a checkpoint format, and a solver that other quantizers start from",
    "mxfp4": "a checkpoint format",
    "swarm": "a group of commands",
    "rtn": "a solver that another quantizer starts from",
}
"""Names that are also other words: they count only where a plan or a technique is asked for by them."""
ALLOWED = {
    "fleets.py": "what divides a replica over its devices, where a pool says nothing else",
    "validate/hardware_claims.py": "published setups become plans, as in the catalog",
    "validate/finetuning_rows.py": "published rows become plans, as in the catalog",
    "validate/generation_rows.py": "published rows become plans, as in the catalog",
    "validate/layouts.py": "published rows become plans, as in the catalog",
    "validate/memory_rows.py": "published rows become plans, as in the catalog",
    "validate/precisions.py": "published rows become plans, as in the catalog",
    "validate/serving_rows.py": "published rows become plans, as in the catalog",
    "validate/training_rows.py": "published rows become plans, as in the catalog",
}
BESIDE = "beside"
"""The card's field that is keyed by names: options for the examples of others."""


def named(text: object) -> str:
    """The technique that a string names, or nothing."""
    name = text.partition(":")[0] if isinstance(text, str) else ""
    return name if name in HOMES else ""


def lookups(node: ast.AST) -> list[ast.expr]:
    """Expressions by which ``node`` asks for a technique: ``plan.has(x)``, ``Call(name=x)``, ``card.name == x``."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if any(isinstance(s, ast.Attribute) and s.attr == "name" and "card" in ast.dump(s.value) for s in sides):
            return [leaf for side in sides for leaf in ast.walk(side) if isinstance(leaf, ast.expr)]
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("has", "option"):
            return node.args[:1]
        if called in ("Call", "parse"):
            return [*node.args[:1], *(k.value for k in node.keywords if k.arg == "name")]
    return []


def quoted(source: str) -> set[tuple[int, str]]:
    """(line, technique) of every technique that the source names."""
    if not any(name in source for name in HOMES):
        return set()
    nodes = list(ast.walk(ast.parse(source)))
    free: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            free.add(node.value)  # a docstring
        if isinstance(node, ast.keyword) and node.arg == BESIDE and isinstance(node.value, ast.Dict):
            free.update(key for key in node.value.keys if key is not None)
    asked = {leaf for node in nodes for leaf in lookups(node)}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and node not in free:
            name = named(node.value)
            if name and (name not in ORDINARY or node in asked):
                found.add((node.lineno, name))
    return found


@cache
def strays(path: Path) -> list[str]:
    """Techniques that a module names and that are not its own, as ``line: name``."""
    home = path.with_name(f"{path.stem.removesuffix('_torch')}.py")
    found = sorted(quoted(path.read_text(encoding="utf-8")))
    return [f"{line}: {name}" for line, name in found if HOMES[name] != home]


MODULES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}


def test_names_stay_at_home():
    found = {name: strays(path) for name, path in MODULES.items() if name not in ALLOWED}
    assert not {name: lines for name, lines in found.items() if lines}


def test_what_is_allowed_is_needed():
    for name in ALLOWED:
        assert strays(MODULES[name]), f"{name} names no technique: drop it from the list"
    assert set(ORDINARY) <= set(HOMES)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("e.plan.has('lora')", {"lora"}),
        ("e.plan.option('fp8', 'states')", {"fp8"}),
        ("Call(name='gptq')", {"gptq"}),
        ("t.card.name == 'rtn'", {"rtn"}),
        ("t.card.name in ('rtn', 'mxfp4')", {"rtn", "mxfp4"}),
        ("KNOWN = ('lora', 'lion')", {"lora", "lion"}),
        ("plan = f'zero:stage={s}'", {"zero"}),
        ("dtype = 'fp8'", set()),
        ("'''lora'''", set()),
        ("fix = 'add lora'", set()),
        ("Card(beside={'lora': {'rank': 2}})", set()),
    ],
)
def test_the_reading_itself(source, names):
    assert {name for _, name in quoted(source)} == names
