"""The documentation's links and pages exist, and the examples can be predicted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline import experiments
from ridgeline.predict import predict

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
GENERATED = {"architecture.md", "catalogue.md"}


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings can be linked with."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", t.lower()).strip().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, fragment = target.partition("#")
        if "://" in target or name in GENERATED:
            continue
        found = (page.parent / name) if name else page
        assert found.exists(), f"{page.name}: {target}"
        assert not fragment or fragment in anchors(found), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": (\S+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert listed - GENERATED == {p.name for p in (ROOT / "docs").glob("*.md")} - GENERATED


def test_the_planned_example_fits():
    e = experiments.load(ROOT / "examples" / "llama2-70b-64xa100.toml")
    assert e.cluster.size == 64
    assert predict(e).status == "ok"
