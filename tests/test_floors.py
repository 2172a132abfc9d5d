"""The house: no room imports one on a higher floor, at any level of a file (a lazy import is an import)."""

import pytest

from ridgeline.docs.architecture import FLOORS, SOURCE, imported

LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


@pytest.mark.parametrize("room", LEVEL)
def test_a_room_imports_no_higher_one(room):
    for file in (SOURCE / room).rglob("*.py"):
        for name in imported(file):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            assert package != "ridgeline" or LEVEL.get(other, 0) <= LEVEL[room], f"{file} imports {name}"


def test_every_package_has_its_floor():
    assert {f.parent.name for f in SOURCE.glob("*/__init__.py")} == set(LEVEL)
