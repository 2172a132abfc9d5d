"""What a shell completes: models, clusters, techniques and their options (`ridgeline --install-completion`)."""

from __future__ import annotations

import re


def models(incomplete: str) -> list[str]:
    """Catalog models that start with the typed text."""
    from ridgeline import catalog

    return [name for name in catalog.models() if name.startswith(incomplete)]


def clusters(incomplete: str) -> list[str]:
    """Catalog devices, with the typed count kept: ``8xa1`` gives ``8xa100-80g-sxm`` and others."""
    from ridgeline import catalog

    counts, start = re.fullmatch(r"((?:\d+x){0,2})(.*)", incomplete).groups()  # type: ignore[union-attr]
    return [counts + name for name in ("local", *catalog.devices()) if name.startswith(start)]


def techniques(incomplete: str) -> list[str]:
    """Techniques and systems that start with the typed text; after ``NAME:`` the technique's options."""
    from ridgeline import catalog
    from ridgeline.techniques.registry import registry

    name, colon, given = incomplete.partition(":")
    if not colon:
        return [n for n in (*registry(), *catalog.systems()) if n.startswith(incomplete)]
    if name not in registry():
        return []
    done, last = re.fullmatch(r"((?:.*,)?)([^,]*)", given).groups()  # type: ignore[union-attr]
    return [f"{name}:{done}{option}=" for option in registry()[name].model_fields if option.startswith(last)]
