"""Adding a technique is adding a file: it shows up everywhere by itself."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ridgeline

ROOT = Path(__file__).parents[2]

DUMMY = '''
"""A technique that does nothing but say so."""

from typing import ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Card, Phase, Technique


class Dummy(Technique):
    """Copy a few bytes after every layer, for no reason."""

    card: ClassVar[Card] = Card(
        name="dummy",
        title="A dummy",
        paper="none",
        taxonomy="training/dummy",
        tasks=frozenset({"pretrain", "finetune", "generate"}),
        lossless=True,
        claim="no claim is made",
    )
    phase: ClassVar[Phase] = "loop"

    kilobytes: int = Field(default=4, ge=1)
    """How much is copied."""

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """One more operator per layer."""
        return g.each_block(lambda b: b.forward.append(Op("dummy", "mlp", "copy", bytes=1024.0 * self.kilobytes)),
                            layers_only=True)

    def build(self, run) -> None:
        """Nothing."""
'''
FILE = """
model = "llama-tiny"
on = "2xa100"
[workload]
seq_len = 64
[plans]
baseline = []
dummy = ["dummy:kilobytes=8"]
both = ["dummy", "zero"]
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package with one file more; the original is not touched."""
    root = tmp_path_factory.mktemp("copy")
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(ridgeline.__file__).parent, root / "ridgeline", ignore=skip)
    (root / "ridgeline" / "techniques" / "memory" / "dummy.py").write_text(DUMMY)
    (root / "experiment.toml").write_text(FILE)
    return root


def run(package, *command):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(package), "RIDGELINE_HOME": str(package / "home")}
    done = subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


COMMANDS = """
import json, sys
from typer.testing import CliRunner
from ridgeline.cli import app

for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    print(json.dumps(json.loads(done.stdout)))
"""


def test_command_line(package):
    """All commands in one process, which has found the file by itself."""
    commands = (
        ("techniques",), ("techniques", "--matrix"), ("predict", "llama-tiny", "--on", "a100", "--with",
        "dummy:kilobytes=8"), ("ablate", str(package / "experiment.toml"), "--dry-run"),
    )  # fmt: skip
    listed, matrix, predicted, dry = map(json.loads, run(package, "-c", COMMANDS, json.dumps(commands)).splitlines())
    cards = [c for c in listed if c.get("kind") != "system"]
    found = {c["name"]: c for c in cards}["dummy"]
    assert [(o["name"], o["default"]) for o in found["options"]] == [("kilobytes", 4)]
    pairs = [p for p in matrix if "dummy" in (p["a"], p["b"])]
    assert len(pairs) == len(cards) - 1
    (row,) = [r for r in predicted["breakdown"] if r["operator"] == "dummy"]
    assert (row["count"], row["bytes"]) == (4, 4 * 8192)
    counts = {name: sum(r["operator"] == "dummy" for r in result["breakdown"]) for name, result in dry.items()}
    assert counts == {"baseline": 0, "dummy": 1, "both": 1}


def test_documentation(package):
    ask = (
        "from ridgeline.docs.catalog_page import catalog_markdown;"
        "from ridgeline.docs.technique_page import technique_markdown;"
        "from ridgeline.techniques.matrix import support_matrix; pairs = support_matrix();"
        "print(technique_markdown('dummy', pairs, [])); print(catalog_markdown(pairs))"
    )
    pages = run(package, "-c", ask)
    assert "# `dummy`: A dummy" in pages
    assert "`kilobytes`" in pages
    assert "[`dummy`](techniques/dummy.md)" in pages
    assert pages.count("| `dummy` |") == 2  # a row and a column of the matrix


@pytest.mark.nightly
def test_generic_tests(package):
    pytest_ = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist")
    listed = run(package, *pytest_, "--collect-only", "tests/techniques/test_parity.py").splitlines()
    mine = [line for line in listed if "dummy" in line]
    assert any("zero" in line for line in mine), "pairs take part too"
    assert len(mine) > 5
    out = run(package, *pytest_, "tests/techniques/test_contract.py", "-k", "dummy")
    assert "passed" in out or "100%" in out


def test_the_original_is_untouched():
    assert not (Path(ridgeline.__file__).parent / "techniques" / "memory" / "dummy.py").exists()
    assert "dummy" not in run(ROOT / "src", "-m", "ridgeline", "techniques", "--json")
