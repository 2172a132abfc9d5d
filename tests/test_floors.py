"""The house: no room imports one on a higher floor, at any level of a file (a lazy import is an import)."""

import ast
from pathlib import Path

import pytest

import ridgeline

SOURCE = Path(ridgeline.__file__).parent
FLOORS = [
    ("spec", "catalog"), ("report", "jobs", "data"), ("graph", "nn"), ("runtime",), ("techniques",),
    ("predict", "train", "compress", "serve"), ("search", "measure", "validate"), ("cli",),
]  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def imported(file):
    """Names of modules that a file imports anywhere."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", LEVEL)
def test_a_room_imports_no_higher_one(room):
    for file in (SOURCE / room).rglob("*.py"):
        for name in imported(file):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            assert package != "ridgeline" or LEVEL.get(other, 0) <= LEVEL[room], f"{file} imports {name}"
