"""``python -m ridgeline.docs [DIR]`` writes the generated pages below ``docs`` of a checkout, or into a directory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ridgeline.docs.architecture import SOURCE, architecture_markdown
from ridgeline.docs.catalog_page import catalog_markdown
from ridgeline.docs.device_page import device_markdown
from ridgeline.docs.effects import Effects
from ridgeline.docs.hardware_page import hardware_markdown
from ridgeline.docs.technique_page import technique_markdown
from ridgeline.report.study_tables import study_markdown
from ridgeline.study import load_study, run_study
from ridgeline.techniques.matrix import Pair, support_matrix
from ridgeline.techniques.registry import registry


def pages() -> dict[str, Callable[[], str]]:
    """{path below ``docs``: function that returns its Markdown} of every generated page."""
    pairs = support_matrix()
    effects = Effects(SOURCE.parents[1])
    techniques = {f"techniques/{name}.md": partial(_technique, name, pairs, effects) for name in registry()}
    return {
        "architecture.md": architecture_markdown,
        "catalogue.md": partial(catalog_markdown, pairs),
        "hardware-figures.md": hardware_markdown,
        "prediction-cards.md": partial(device_markdown, effects.results),
        **{f"studies/{name}.md": partial(_study, name) for name in ("dissecting", "survey", "systems")},
        **techniques,
    }


def _technique(name: str, pairs: list[Pair], effects: Effects) -> str:
    return technique_markdown(name, pairs, effects.of(name))


def _study(name: str) -> str:
    study = load_study(SOURCE.parents[1] / "studies" / f"{name}.toml")
    return study_markdown(run_study(study, Path("unused"), called=f"ridgeline study studies/{name}.toml"))


def main() -> None:
    """Write the pages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs")
    makers = pages()
    for name, make in makers.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")
    print(f"wrote {len(makers)} pages below {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
