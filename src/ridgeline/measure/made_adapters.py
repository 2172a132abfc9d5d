"""LoRA adapters that nobody has trained, as many as a plan states for predictions: to measure and to trace with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.plan import Plan
from ridgeline.techniques.registry import techniques_of

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine


def add_stated(plan: Plan, engine: Engine, drawn: bool = False) -> list[str]:
    """Load what is stated, unless it is there → the names that requests have in turn; "": the base, where nothing is.
    ``drawn``: of random numbers; they add nothing otherwise."""
    stated = next((t for t in techniques_of(plan) if getattr(t, "adapters", 0)), None)
    if stated is None or engine.adapters is None:
        return [""]
    count, rank = int(stated.adapters), int(stated.rank)  # type: ignore[attr-defined]
    names = [f"adapter {i}" for i in range(count)]
    for i, name in enumerate(names):
        if name not in engine.adapters:
            engine.adapters.add_made(name, rank, i if drawn else None)
    return names
